"""Situations reported by users of other programs, as whole scripts; more are tests elsewhere."""

import time
import tracemalloc

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.io import read
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet

from nvdd_md.calculators import DistributedCalculator, TwoHop
from nvdd_md.comm.ase_world import AseWorld


def test_memory_and_time_go_with_atoms_and_not_with_volume_or_distance(comm):
    water = molecule("H2O")
    water.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
    energy = water.get_potential_energy()
    far_away = water.copy()
    far_away.positions += 5000.0
    apart = water + water
    apart.positions[3:, 0] += 4000.0
    large = water.copy()
    large.set_cell([3000.0] * 3)
    large.pbc = True
    tracemalloc.start()
    started = time.perf_counter()
    for atoms, molecules in ((far_away, 1), (apart, 2), (large, 1)):
        atoms.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
        atoms.get_forces()
        assert abs(atoms.get_potential_energy() - molecules * energy) < 1e-9
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert time.perf_counter() - started < 30.0


def test_dynamics_stop_at_the_step_that_is_not_finite(comm, shared_tmp_path):
    """The error names the atom on all ranks, and no broken frame is written."""
    atoms = bulk("Cu", cubic=True, a=3.6) * (4, 2, 2)
    atoms.rattle(0.05, seed=1)
    atoms.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
    path = shared_tmp_path / "run.traj"
    world = AseWorld(comm)
    with VelocityVerlet(atoms, 1 * units.fs, trajectory=path, comm=world) as dynamics:
        dynamics.run(3)
        atoms.positions[17, 1] = np.nan
        with pytest.raises(ValueError, match=r"atom 17 \(Cu\)"):
            dynamics.run(3)
    comm.barrier()
    frames = read(path, ":", parallel=False)
    assert len(frames) == 4
    assert all(np.isfinite(frame.positions).all() for frame in frames)


def test_random_numbers_that_nobody_gave_are_the_same_on_all_ranks(world):
    """ASE draws them on one rank; nothing in the calculator makes copies drift apart."""
    atoms = bulk("Cu", cubic=True, a=3.6) * 2
    atoms.calc = DistributedCalculator(TwoHop(), world, device="cpu")
    thermalize_momenta(atoms, temperature_K=500)
    settings = {"temperature_K": 500, "friction": 0.02 / units.fs, "fixcm": False}
    Langevin(atoms, 2 * units.fs, **settings).run(20)
    assert len(set(world.allgather(atoms.positions.tobytes()))) == 1


@pytest.mark.parametrize("comm", [2], indirect=True)
def test_what_is_cached_is_served_to_one_rank_alone(comm):
    """Also after the ranks have gone different ways, as in ``if rank == 0: print(...)``."""
    atoms = Atoms("Cu2", [[0, 0, 0], [0, 0, 2.4]], cell=[9.0] * 3, pbc=True)
    atoms.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
    energy, stress = atoms.get_potential_energy(), atoms.get_stress()
    before = comm.traffic.snapshot()
    if comm.rank == 0:
        for _ in range(3):
            assert atoms.get_potential_energy() == energy
            assert np.array_equal(atoms.get_stress(), stress)
    assert comm.traffic == before
