"""Atoms that stay on their ranks follow the path of one process, whatever they are and do."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from domain_cases import Net
from oracle import assert_near, assert_same_bits, on_rank_0
from simulations import (
    PER_FS,
    THERMOSTATS,
    Path,
    ase_path,
    free_particles,
    hot_crystal,
    no_forces,
    owned_ids,
    record,
    simulate,
)
from structures import STRUCTURES

from nvdd_md.calculators import LennardJones, TwoHop
from nvdd_md.comm import SerialCommunicator, Traffic
from nvdd_md.integrators import Limits, Simulation
from nvdd_md.integrators.random_numbers import Stream, normals
from nvdd_md.potential import Potential

ALONE = SerialCommunicator()


# -- The path of one process


@cache
def alone(name: str) -> Path:
    return record(simulate(ALONE, hot_crystal(), name), 100, every=10)


@pytest.mark.parametrize("name", THERMOSTATS)
def test_the_trajectory_of_one_process(comm, name):
    simulation = simulate(comm, hot_crystal(), name)
    n_moved = simulation._engine.n_moved
    path = record(simulation, 100, every=10)
    wanted = on_rank_0(comm, lambda: alone(name))
    assert_same_bits(comm, path.thermo, path.positions, path.momenta)
    np.testing.assert_array_equal(path.steps, np.arange(0, 101, 10))
    assert np.abs(path.positions - wanted.positions).max() < 1e-10
    assert np.abs(path.momenta - wanted.momenta).max() < 1e-10
    assert_near(path.thermo, wanted.thermo, 1e-10)
    # It was worth comparing: lists were rebuilt, and atoms went to other ranks.
    assert 4 < simulation.n_rebuilds < 30
    moved = comm.sum(torch.tensor(simulation._engine.n_moved - n_moved))
    assert (moved > 0) == (comm.size > 1)


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_the_path_of_ase(comm):
    simulation = simulate(comm, hot_crystal())
    simulation.run(100)
    atoms = simulation.gather()
    wanted = on_rank_0(comm, lambda: ase_path(hot_crystal(), 2.0, 100))
    assert np.abs(wanted.positions - hot_crystal().positions).max() > 0.5
    assert np.abs(atoms.positions - wanted.positions).max() < 1e-9
    assert np.abs(atoms.get_momenta() - wanted.get_momenta()).max() < 1e-9
    assert abs(atoms.get_potential_energy() - wanted.get_potential_energy()) < 1e-9
    assert_near(atoms.get_forces(), wanted.get_forces(), 1e-9)
    assert_near(atoms.get_stress(), wanted.get_stress(), 1e-9)


def in_motion(name: str) -> Atoms:
    atoms = STRUCTURES[name]()
    rng = np.random.default_rng(6)
    atoms.set_velocities(rng.normal(0.0, 0.05, (len(atoms), 3)) * PER_FS)
    return atoms


@cache
def reference(name: str) -> Atoms:
    return ase_path(in_motion(name), 0.2, 6)


SLOW = ("large_flat_cell", "molecule_in_a_huge_box")
"""Structures that take ASE's neighbour list seconds at each step."""

MOVING = [name for name, make in STRUCTURES.items() if len(make()) and name not in SLOW]


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
@pytest.mark.parametrize("name", MOVING)
def test_every_structure_follows_ase(comm, name):
    # Some bonds are no bonds of this potential, and break at once.
    limits = Limits(max_move_A=None, max_drift_eV_per_atom=None)
    simulation = simulate(comm, in_motion(name), timestep_fs=0.2, skin=0.03, limits=limits)
    simulation.run(6)
    atoms, thermo = simulation.gather(), simulation.thermo()
    wanted = on_rank_0(comm, lambda: reference(name))
    assert simulation.n_rebuilds >= 2
    np.testing.assert_array_equal(atoms.numbers, wanted.numbers)
    np.testing.assert_array_equal(atoms.cell, wanted.cell)
    np.testing.assert_array_equal(atoms.pbc, wanted.pbc)
    # Coordinates of 2e6 Å are rounded at 2e-10 Å.
    assert np.abs(atoms.positions - wanted.positions).max() < 1e-9
    assert_near(atoms.get_momenta(), wanted.get_momenta(), 1e-9)
    assert abs(thermo.potential_eV - wanted.get_potential_energy()) < 1e-9
    assert_near(atoms.get_forces(), wanted.get_forces(), 1e-9)
    stress = wanted.calc.results.get("stress")
    assert (thermo.stress is None) == (stress is None) == (thermo.pressure_GPa is None)
    if stress is not None:
        assert_near(np.array(thermo.stress), stress, 1e-9)


@pytest.mark.parametrize("fast", [0, 3, 6])
def test_one_fast_atom_on_any_rank_ends_the_list_of_all(comm, fast):
    """Nothing but its own moves says that it comes into the reach of the next one."""
    atoms = Atoms("Cu8", np.arange(8)[:, None] * [5.0, 0.0, 0.0])
    velocities = np.zeros((8, 3))
    velocities[fast, 0] = 0.06 * PER_FS
    atoms.set_velocities(velocities)
    simulation = simulate(comm, atoms)
    simulation.run(20)
    wanted = on_rank_0(comm, lambda: ase_path(atoms, 2.0, 20))
    assert np.abs(wanted.get_momenta() - atoms.get_momenta()).max() > 0.1
    assert np.abs(simulation.gather().positions - wanted.positions).max() < 1e-9


@pytest.mark.time_limit(200)
@pytest.mark.parametrize("comm", [2, 3], indirect=True)
def test_energy_of_a_long_run(comm):
    """R14: round-off of another order of sums does not add up in the energy."""
    path = long_run(comm)
    wanted = on_rank_0(comm, lambda: long_run(ALONE))
    energy, expected = path.thermo[:, 2], wanted.thermo[:, 2]
    assert len(energy) == 41
    assert np.ptp(expected) > 1e-6  # the error of the timestep, which is the same
    assert np.abs(energy - expected).max() <= 1e-9 * path.positions.shape[1]


def long_run(comm) -> Path:
    atoms = bulk("Ar", cubic=True, a=5.3) * (2, 2, 2)
    potential = LennardJones(3.4, 0.0104, rc=5.0, smooth=True)
    simulation = simulate(comm, atoms, timestep_fs=2.0, potential=potential, skin=0.5)
    simulation.draw_velocities(60.0, seed=2)
    return record(simulation, 2000, every=50)


# -- Noise


def test_noise_has_the_same_bits_on_any_number_of_ranks(comm):
    """R12: without forces there is no sum whose order could differ."""
    path = random_walk(comm)
    wanted = on_rank_0(comm, lambda: random_walk(ALONE))
    for name in ("positions", "momenta", "rebuilds"):
        np.testing.assert_array_equal(getattr(path, name), getattr(wanted, name))
    assert np.ptp(path.momenta, axis=0).min() > 0.0


def random_walk(comm) -> Path:
    simulation = simulate(comm, free_particles(), "Langevin", potential=no_forces())
    path = record(simulation, 100, every=20)
    forces = simulation.gather().get_forces()
    assert not forces.any()
    return path


def test_each_rank_draws_its_part_of_the_same_numbers(comm):
    simulation = simulate(comm, free_particles(), potential=no_forces())
    mine = torch.from_numpy(owned_ids(simulation))
    drawn = normals(7, Stream.THERMOSTAT, 12, mine)
    everybody = normals(7, Stream.THERMOSTAT, 12, torch.arange(24))
    assert torch.equal(drawn, everybody[mine])
    assert comm.sum(torch.tensor(len(mine))) == 24


# -- Counts


def traffic_of_steps(simulation: Simulation, n_steps: int) -> list[Traffic]:
    """Return this rank's traffic in each of the next steps."""
    snapshots = []
    simulation.attach(lambda simulation: snapshots.append(simulation.comm.traffic.snapshot()))
    simulation.run(n_steps)
    return [after - before for before, after in pairwise(snapshots)]


@pytest.mark.parametrize("name", THERMOSTATS)
def test_collectives_of_a_step(comm, name):
    """R6: one for error, displacement, stop flag and energy; more for global thermostats."""
    simulation = simulate(comm, hot_crystal(), name, skin=1.0)
    for traffic in traffic_of_steps(simulation, 8):
        assert traffic.collectives == (THERMOSTATS[name].collectives if comm.size > 1 else 0)
        # Kinetic energy, momentum and mass in each sum of a thermostat.
        assert traffic.collective_bytes <= 64 + 40 * (traffic.collectives - 1)
    assert simulation.n_rebuilds == 1


POTENTIALS: dict[str, tuple[Potential, int, int]] = {
    "Lennard-Jones": (LennardJones(2.2, 0.01, rc=3.2), 0, 1),
    "two-hop": (TwoHop(rc=3.2), 8, 2),
    "network": (Net(layers=3, width=6, cutoff=3.2), 8 * 24, 3),
    "network, float32": (Net(4, 5, 3.2, torch.float32), 4 * 20, 4),
}
"""Potential, bytes of a row that it refreshes, layers."""


@pytest.mark.parametrize("name", POTENTIALS)
def test_within_the_skin_only_ghost_rows_travel(comm, name):
    """R5: positions and features out to the ghosts, their gradients and forces back."""
    potential, row, layers = POTENTIALS[name]
    simulation = simulate(comm, hot_crystal(), potential=potential, skin=0.8)
    routing = simulation._engine.domain.routing
    forward = (24 + (layers - 1) * row) * sum(routing.send_counts)
    backward = ((layers - 1) * row + 24) * sum(routing.recv_counts)
    assert (forward > 0) == (comm.size > 1)
    for traffic in traffic_of_steps(simulation, 4):
        assert traffic.message_bytes == forward + backward
    assert simulation.n_rebuilds == 1


@pytest.mark.parametrize("comm", [2, 3, 4], indirect=True)
def test_messages_only_between_neighbours(comm):
    chain = Atoms("Cu24", np.arange(24)[:, None] * [2.5, 0.0, 0.0])
    potential = Net(layers=3, cutoff=3.2)
    simulation = simulate(comm, chain, potential=potential, timestep_fs=0.1)
    # Domains follow each other along the row: the ends have one neighbour, the others two.
    partners = (comm.rank > 0) + (comm.rank < comm.size - 1)
    for traffic in traffic_of_steps(simulation, 3):
        assert traffic.messages == (1 + 2 + 2 + 1) * partners
    assert simulation.n_rebuilds == 1


@pytest.mark.parametrize("comm", [2, 4], indirect=True)
def test_no_step_moves_the_system(comm):
    """At the same cross-section the bytes of a step are the same, with a new list or without."""
    totals = []
    for length in (8, 16):
        atoms = bulk("Cu", cubic=True, a=3.6) * (length, 2, 2)
        atoms.set_velocities(np.full((len(atoms), 3), 1e-4) * PER_FS)
        for skin in (0.0, 0.3):
            simulation = simulate(comm, atoms, skin=skin, cut_axes=(0,))
            steps = traffic_of_steps(simulation, 5)
            assert simulation.n_rebuilds == (6 if skin == 0.0 else 1)
            assert simulation._engine.n_rebalanced == 0
            totals.append([traffic.message_bytes + traffic.collective_bytes for traffic in steps])
    rebuilding, steady, rebuilding_twice, steady_twice = totals
    assert steady == steady_twice
    assert max(rebuilding_twice) <= 1.05 * max(rebuilding)
    # Far from the positions of all atoms alone.
    assert max(steady_twice) < 0.5 * 24 * 16 * 16
