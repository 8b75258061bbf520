"""Who owns which atom in the course of a simulation, and what comes along when that changes."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.cluster import Icosahedron
from oracle import assert_same_bits, on_rank_0
from simulations import (
    PER_FS,
    ase_path,
    free_particles,
    no_forces,
    numbers,
    owner_of,
    record,
    simulate,
)
from structures import STRUCTURES

from nvdd_md.calculators import TwoHop
from nvdd_md.integrators import Limits, Simulation

# -- Ranks without atoms


@pytest.mark.parametrize("comm", [4], indirect=True)
def test_a_rank_runs_empty_and_fills_again(comm):
    """Two of four atoms collide: while they are a pair, both go to one side of the first cut."""
    atoms = Atoms("Cu4", [[0, 0, 0], [7, 0, 0], [20, 0, 0], [30, 0, 0]])
    atoms.set_velocities(np.array([[1, 0, 0], [-1, 0, 0], [0, 0, 0], [0, 0, 0]]) * 0.02 * PER_FS)
    simulation = simulate(comm, atoms, timestep_fs=3.0)
    owned: list[list[int]] = []
    simulation.attach(lambda s: owned.append(s.comm.gather_objects(s.n_owned)))
    path = record(simulation, 150, every=50)
    empty = [0 in counts for counts in owned]
    assert not empty[0]
    assert any(empty)
    assert not empty[-1]
    wanted = on_rank_0(comm, lambda: ase_path(atoms, 3.0, 150))
    assert wanted.get_distance(0, 1) > 4.5
    assert np.abs(path.positions[-1] - wanted.positions).max() < 1e-9
    assert abs(path.thermo[-1, 2] - path.thermo[0, 2]) < 1e-4


@pytest.mark.parametrize("name", ["one_atom", "one_atom_in_a_box", "two_atoms", "three_atoms"])
def test_more_ranks_than_atoms(comm, name):
    atoms = STRUCTURES[name]()
    atoms.set_velocities(np.random.default_rng(1).normal(0.0, 0.02, (len(atoms), 3)) * PER_FS)
    simulation = simulate(comm, atoms)
    simulation.run(40)
    wanted = on_rank_0(comm, lambda: ase_path(atoms, 2.0, 40))
    assert np.abs(simulation.gather().positions - wanted.positions).max() < 1e-9
    counts = comm.gather_objects(simulation.n_owned)
    assert sum(counts) == len(atoms)
    assert counts.count(0) >= comm.size - len(atoms)


# -- Long ways


def test_free_particles_go_straight(comm):
    """Each crosses many domains and the cell several times; positions are given unwrapped."""
    atoms = free_particles(speed=0.2)
    atoms.positions += [100.0, -60.0, 30.0]  # nor need they begin inside of the cell
    limits = Limits(max_move_A=None)
    simulation = simulate(comm, atoms, timestep_fs=3.0, potential=no_forces(), limits=limits)
    owners = {owner_of(simulation, 7)}
    simulation.attach(lambda s: owners.add(owner_of(s, 7)), every=5)
    simulation.run(100)
    final = simulation.gather()
    straight = atoms.positions + atoms.get_velocities() * PER_FS**-1 * 300.0
    assert np.abs(straight - atoms.positions).max() > 4 * 26.0
    np.testing.assert_allclose(final.positions, straight, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(final.get_momenta(), atoms.get_momenta())
    assert owners == set(range(comm.size))
    # Inside, each atom is in the cell, and images say by how many cells it has left it.
    particles = simulation._dynamics.motion.particles
    assert len(particles) == simulation.n_owned
    inside = particles.positions.numpy() @ np.linalg.inv(atoms.cell.array)
    reach = 0.5 * simulation._engine.skin / 24.0 + 0.6 / 24.0
    assert ((inside > -reach) & (inside < 1.0 + reach)).all()


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_an_atom_evaporates(comm):
    atoms = Icosahedron("Cu", 2)
    atoms.positions *= 0.98
    velocities = np.zeros((len(atoms), 3))
    velocities[-1] = 0.1 * PER_FS * atoms.positions[-1] / np.linalg.norm(atoms.positions[-1])
    atoms.set_velocities(velocities)
    simulation = simulate(comm, atoms, timestep_fs=3.0)
    path = record(simulation, 100, every=50)
    wanted = on_rank_0(comm, lambda: ase_path(atoms, 3.0, 100))
    assert np.abs(path.positions[-1] - wanted.positions).max() < 1e-9
    assert np.linalg.norm(wanted.positions[-1] - wanted.positions[:-1].mean(0)) > 25.0
    assert not simulation.gather().get_forces()[-1].any()
    assert np.ptp(path.thermo[:, 2]) < 0.05


@pytest.mark.parametrize("name", ["slab_with_vacuum", "slab_across_the_face", "two_far_fragments"])
def test_vacuum(comm, name):
    atoms = STRUCTURES[name]()
    atoms.set_velocities(np.random.default_rng(2).normal(0.0, 0.01, (len(atoms), 3)) * PER_FS)
    simulation = simulate(comm, atoms)
    path = record(simulation, 30, every=10)
    wanted = on_rank_0(comm, lambda: ase_path(atoms, 2.0, 30))
    assert np.abs(path.positions[-1] - wanted.positions).max() < 1e-9
    assert_same_bits(comm, path.thermo)
    assert path.rebuilds[-1] > 1


# -- What belongs to an atom


def furnished(atoms: Atoms) -> Atoms:
    """Give each atom one of everything that can belong to it."""
    n, rng = len(atoms), np.random.default_rng(4)
    arrays = {
        "tags": np.arange(n) * 3,
        "residuenames": np.array([f"R{k % 5}" * (1 + k % 3) for k in range(n)]),
        "names": np.array([[f"a{k}", "é"] for k in range(n)]),
        "initial_magmoms": rng.normal(size=n),
        "pair": rng.normal(size=(n, 2)),
        "tensor": rng.normal(size=(n, 3, 3)),
        "single": rng.normal(size=n).astype(np.float32),
        "chosen": rng.random(n) < 0.5,
        "both": rng.random((n, 2)) < 0.5,
        "small": np.arange(n, dtype=np.int8),
        "unsigned": np.arange(n, dtype=np.uint32) + 2**31,
        "phase": rng.normal(size=n) + 1j * rng.normal(size=n),
        "swapped": np.arange(n).astype(">i4"),
        "columns": np.asfortranarray(rng.normal(size=(n, 4))),
        "nothing": np.zeros((n, 0)),
    }
    for name, array in arrays.items():
        atoms.arrays[name] = array
    atoms.arrays["tags"].flags.writeable = False
    atoms.info |= {"comment": "as given", "charge": 1, "list": [1, 2.5]}
    atoms.set_celldisp([0.5, 0.0, 0.0])
    return atoms


def assert_as_given(got: Atoms, given: Atoms) -> None:
    kept = set(given.arrays) - {"positions"}
    assert set(got.arrays) == {*kept, "positions"}
    for name in kept:
        np.testing.assert_array_equal(got.arrays[name], given.arrays[name], name)
        assert got.arrays[name].dtype.kind == given.arrays[name].dtype.kind
        assert got.arrays[name].dtype.itemsize == given.arrays[name].dtype.itemsize
    assert got.info == given.info
    assert (got.cell.array == given.cell.array).all()
    assert (got.pbc == given.pbc).all()
    np.testing.assert_array_equal(got.get_celldisp(), given.get_celldisp())


def test_everything_moves_with_its_atom(comm):
    atoms = furnished(free_particles(speed=0.2))
    before = atoms.copy()
    limits = Limits(max_move_A=None)
    simulation = simulate(comm, atoms, timestep_fs=3.0, potential=no_forces(), limits=limits)
    n_moved = simulation._engine.n_moved
    simulation.run(40)
    assert_as_given(simulation.gather(), before)
    on_root = simulation.gather_arrays(["tags", "names", "masses", "pair"])
    assert (on_root is None) == (comm.rank > 0)
    for name, array in (on_root or {}).items():
        np.testing.assert_array_equal(array, before.arrays[name], name)
    moved = sum(comm.gather_objects(simulation._engine.n_moved - n_moved))
    assert (moved > 24) == (comm.size > 1)
    # What came in was not touched.
    assert_as_given(atoms, before)
    np.testing.assert_array_equal(atoms.positions, before.positions)
    assert atoms.calc is None

    restored = Simulation.restore(
        simulation.state(), no_forces(), simulation.integrator, comm, device="cpu"
    )
    assert_as_given(restored.gather(), before)


class Pinned(TwoHop):
    """Two-hop with an energy of its own for each element, read from ``atoms.arrays``."""

    array_keys = ("depth",)

    def forward(self, graph):
        energies = super().forward(graph)["energies"]
        assert len(graph.arrays["depth"]) == len(energies)
        return {"energies": energies * (1.0 + graph.arrays["depth"])}


def test_charge_and_arrays_reach_the_potential(comm):
    atoms = STRUCTURES["charged"]()
    simulation = simulate(comm, atoms)
    neutral = atoms.copy()
    neutral.info.clear()
    wanted = on_rank_0(comm, lambda: ase_path(atoms, 2.0, 0).get_potential_energy())
    energy = simulation.thermo().potential_eV
    assert abs(energy - wanted) < 1e-10
    assert abs(simulate(comm, neutral).thermo().potential_eV - wanted) > 1e-3

    atoms.set_array("depth", np.zeros(len(atoms)))
    assert simulate(comm, atoms, potential=Pinned()).thermo().potential_eV == energy
    atoms.arrays["depth"][3] = 0.1
    atoms.set_velocities(np.full((len(atoms), 3), 0.02) * PER_FS)
    simulation = simulate(comm, atoms, potential=Pinned())
    deeper = simulation.thermo().potential_eV
    simulation.run(0)
    single = simulation.gather_arrays(["energies"])
    if single is not None:
        assert deeper - energy == pytest.approx(single["energies"][3] * 0.1 / 1.1, abs=1e-10)


# -- Work per rank


def drifting_block() -> Atoms:
    """Return a crystal in the open that moves by more than half its length."""
    atoms = bulk("Cu", cubic=True, a=3.6) * (6, 3, 3)
    atoms.pbc = False
    atoms.set_velocities(np.tile([0.1 * PER_FS, 0.0, 0.0], (len(atoms), 1)))
    return atoms


def bursting_droplet() -> Atoms:
    """Return a droplet of which one half flies apart, and loses its edges."""
    atoms = bulk("Cu", cubic=True, a=3.6) * (6, 4, 4)
    atoms.pbc = False
    atoms.rattle(0.15, seed=2)
    atoms.positions -= atoms.positions.mean(0)
    half = atoms.positions[:, 0] > 0.0
    atoms.set_velocities(np.where(half[:, None], 0.008 * atoms.positions, 0.0) * PER_FS)
    return atoms


@pytest.mark.parametrize("comm", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("make", [drifting_block, bursting_droplet])
def test_bricks_follow_the_work(comm, make):
    first, loads, n_cuts = balance_of_run(comm, make())
    assert n_cuts > 2
    assert max(loads) <= 1.1
    again, _, _ = balance_of_run(comm, make())
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_same_bits(comm, *first)


def balance_of_run(comm, atoms: Atoms) -> tuple[list[np.ndarray], list[float], int]:
    """Return the state after a run, max/mean of the work after each step, and cuts made."""
    simulation = simulate(comm, atoms, timestep_fs=3.0, skin=0.5)
    loads: list[float] = []

    def measure(simulation: Simulation) -> None:
        domain = simulation._engine.domain
        work = domain.edges_per_rank + domain.owned_counts
        loads.append(float(work.max() / work.mean()))

    simulation.attach(measure)
    simulation.run(40)
    final = simulation.gather()
    state = [final.positions, final.get_momenta(), numbers(simulation.thermo())]
    return state, loads, simulation._engine.n_rebalanced
