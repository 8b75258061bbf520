"""Many steps in a row: lists are rebuilt, atoms change owner, ranks run empty and fill again."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.cluster import Icosahedron
from ase.md.verlet import VelocityVerlet
from oracle import TwoHop as Reference
from oracle import assert_agree, assert_near, assert_same_bits, on_rank_0, outcome
from structures import STRUCTURES

from nvdd_md.calculators import DistributedCalculator, TwoHop
from nvdd_md.comm import SerialCommunicator

STEPS = 200
TIME_STEP = 3 * units.fs
VELOCITY = 1 / units.fs  # Å/fs


def distributed(comm, **options) -> DistributedCalculator:
    return DistributedCalculator(TwoHop(), comm, device="cpu", **options)


def hot_crystal() -> Atoms:
    atoms = bulk("Cu", cubic=True, a=3.7) * (3, 2, 2)
    rng = np.random.default_rng(5)
    atoms.set_velocities(rng.normal(0, 0.006, (len(atoms), 3)) * VELOCITY)
    return atoms


@cache
def trajectory(which: str) -> np.ndarray:
    """Return positions after each step in one process, (STEPS, n_atoms, 3) Å."""
    atoms = hot_crystal()
    atoms.calc = Reference() if which == "reference" else distributed(SerialCommunicator())
    if which == "disturbed":
        atoms.rattle(1e-10, seed=1)
    return np.array([atoms.positions.copy() for _ in steps(atoms, STEPS)])


def steps(atoms, n):
    """Yield after each of n velocity-Verlet steps."""
    dynamics = VelocityVerlet(atoms, TIME_STEP)
    for k, _ in enumerate(dynamics.irun(n)):
        if k:
            yield


def test_nve_stays_with_one_process(comm):
    """The trajectories separate as round-off grows, and by no more.

    What a difference of 1e-10 Å at the start grows to in one process says by how much an error
    is multiplied within the run (some tens). Each step adds round-off to the positions, about
    1e-15 Å of a force of 1 eV/Å and of coordinates of 10 Å, so STEPS of these, all in one
    direction and each multiplied by the whole growth, are a bound.
    """
    atoms = hot_crystal()
    atoms.calc = calculator = distributed(comm, skin=0.3)
    positions, owners, energies = [], [], []
    for _ in steps(atoms, STEPS):
        positions.append(atoms.positions.copy())
        owners.append(calculator.engine.decomposition.owners)
        energies.append(atoms.get_total_energy())
    assert_same_bits(comm, positions, energies)

    alone = on_rank_0(comm, lambda: trajectory("one rank"))
    by_reference = on_rank_0(comm, lambda: trajectory("reference"))
    disturbed = on_rank_0(comm, lambda: trajectory("disturbed"))
    growth = np.abs(disturbed - alone).max() / 1e-10
    assert growth < 1e3
    allowed = STEPS * growth * 2e-15
    assert np.abs(positions - alone).max() < allowed
    assert np.abs(positions - by_reference).max() < allowed

    assert 3 < calculator.engine.n_rebuilds < STEPS / 4
    changed = sum((old != new).any() for old, new in pairwise(owners))
    assert changed >= 1 or comm.size == 1
    assert np.abs(atoms.positions - hot_crystal().positions).max() > 1.0
    assert np.ptp(energies) < 2e-3 * len(atoms)


def test_lists_never_change_a_result(comm):
    """A list of another age or length has the same edges below the cutoff, in the same order."""
    runs = {}
    for skin in (0.0, 0.3, 1.0):
        atoms = hot_crystal()
        atoms.calc = calculator = distributed(comm, skin=skin)
        runs[skin] = np.array([atoms.get_forces() for _ in steps(atoms, 40)])
        runs[skin, "rebuilds"] = calculator.engine.n_rebuilds
    assert runs[0.0, "rebuilds"] > runs[0.3, "rebuilds"] > runs[1.0, "rebuilds"]
    for skin in (0.3, 1.0):
        assert_near(runs[skin], runs[0.0], 0.0 if comm.size == 1 else 1e-12)


def test_perfect_lattice_drifts_over_all_faces(comm):
    atoms = bulk("Cu", cubic=True, a=3.6) * (6, 2, 2)
    atoms.calc = calculator = distributed(comm, skin=0.3, cut_axes=(0,))
    atoms.set_velocities(np.tile([0.03 * VELOCITY, 0.01 * VELOCITY, 0], (len(atoms), 1)))
    energy = atoms.get_potential_energy()
    owners = calculator.engine.decomposition.owners
    for _ in steps(atoms, 80):
        assert abs(atoms.get_potential_energy() - energy) < 1e-12 * abs(energy)
        assert np.abs(atoms.get_forces()).max() < 1e-12
    assert atoms.positions[:, 0].min() > 7.0
    if comm.size > 1:
        assert (calculator.engine.decomposition.owners != owners).any()


def test_atoms_that_jump_further_than_the_skin(comm):
    atoms = bulk("Cu", cubic=True, a=3.6) * (6, 2, 2)
    atoms.calc = calculator = distributed(comm, skin=0.3)
    velocities = np.random.default_rng(7).normal(0, 0.02, (len(atoms), 3))
    atoms.set_velocities(velocities * VELOCITY)
    for _ in steps(atoms, 15):
        wanted = on_rank_0(comm, lambda: outcome(atoms.copy(), Reference()))
        assert_agree(outcome(atoms, calculator), wanted, 1e-12, 1e-11, 1e-12)
    assert calculator.engine.n_rebuilds == 16


@pytest.mark.parametrize("comm", [3], indirect=True)
def test_an_atom_evaporates(comm):
    atoms = Icosahedron("Cu", 2)
    atoms.positions *= 0.98
    n = len(atoms)
    velocities = np.zeros((n, 3))
    velocities[-1] = 0.05 * VELOCITY * atoms.positions[-1] / np.linalg.norm(atoms.positions[-1])
    atoms.set_velocities(velocities)
    atoms.calc = calculator = distributed(comm)
    energies, bound = [], []
    for k, _ in enumerate(steps(atoms, 500)):
        energies.append(atoms.get_total_energy())
        bound.append(bool(atoms.get_forces()[-1].any()))
        if k % 25 == 0:
            wanted = on_rank_0(comm, lambda: outcome(atoms.copy(), Reference()))
            assert_agree(outcome(atoms, calculator), wanted, 1e-12, 1e-11, 1e-12, f"step {k}")
    assert_same_bits(comm, energies, atoms.positions)
    assert np.ptp(energies) < 0.05
    assert bound[0]
    assert not any(bound[-300:])
    assert np.linalg.norm(atoms.positions[-1] - atoms.positions[:-1].mean(0)) > 40.0


@pytest.mark.parametrize("comm", [4], indirect=True)
def test_a_rank_runs_empty_and_fills_again(comm):
    """Two of four atoms collide: while they are a pair, both go to one side of the first cut."""
    atoms = Atoms("Cu4", [[0, 0, 0], [7, 0, 0], [20, 0, 0], [30, 0, 0]])
    atoms.set_velocities(np.array([[1, 0, 0], [-1, 0, 0], [0, 0, 0], [0, 0, 0]]) * 0.02 * VELOCITY)
    atoms.calc = calculator = distributed(comm, skin=0.3)
    owned = []
    for k, _ in enumerate(steps(atoms, 150)):
        owned.append([load.owned for load in calculator.partition_report(atoms)])
        if k % 10 == 0:
            wanted = on_rank_0(comm, lambda: outcome(atoms.copy(), Reference()))
            assert_agree(outcome(atoms, calculator), wanted, 1e-12, 1e-11, 1e-12, f"step {k}")
    empty = [0 in counts for counts in owned]
    assert not empty[0]
    assert any(empty)
    assert not empty[-1]
    assert atoms.get_distance(0, 1) > 4.5


# -- One calculator, one system after another


def test_one_calculator_follows_every_change(comm):
    calculator = distributed(comm)
    atoms = bulk("Cu", cubic=True, a=3.6) * (4, 3, 2)
    atoms.rattle(0.05, seed=5)
    cells = [
        np.eye(3),
        np.diag([1.02, 1, 0.98]),
        [[1, 0.05, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0.3, 1, 0], [0, 0.2, 0.9]],
        1.0001 * np.eye(3),
    ]
    for deformation in cells:
        changed = atoms.copy()
        changed.set_cell(atoms.cell.array @ np.array(deformation), scale_atoms=True)
        check(comm, changed, calculator)
    only_cell = atoms.copy()
    only_cell.set_cell(atoms.cell.array * 1.001, scale_atoms=False)
    check(comm, only_cell, calculator)
    for pbc in ((True, False, True), (False, False, False), (True, True, True)):
        changed.pbc = pbc
        check(comm, changed, calculator)
    del changed[::3]
    check(comm, changed, calculator)
    changed.numbers[:5] = 28
    check(comm, changed, calculator)
    changed = changed[np.random.default_rng(0).permutation(len(changed))]
    check(comm, changed, calculator)
    check(comm, bulk("Cu", cubic=True, a=7.5) * (2, 2, 2), calculator)


def test_ranks_empty_and_full_in_turn(comm):
    calculator = distributed(comm)
    names = ("crystal", "one_atom", "random_liquid", "no_atoms", "three_atoms", "two_atoms")
    for name in (*names, *names[::-1]):
        check(comm, STRUCTURES[name](), calculator, name)


def check(comm, atoms, calculator, name=""):
    """Compare with the reference and with a calculator made for these atoms only."""
    got = outcome(atoms, calculator)
    wanted = on_rank_0(comm, lambda: outcome(atoms.copy(), Reference()))
    assert_agree(got, wanted, 1e-12, 1e-11, 1e-12, name)
    fresh = outcome(atoms.copy(), distributed(comm))
    assert_agree(got, fresh, 1e-12, 1e-11, 1e-12, name)
    assert_same_bits(comm, *got.arrays())
