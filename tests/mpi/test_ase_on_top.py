"""ASE's own optimisers and dynamics, unchanged, on top of the calculator.

Each scenario runs once on one process with the reference, and on n ranks with the calculator.
ASE's world has all ranks of the job, but `comm` may have fewer: what ASE classes send, they send
over `comm`, given to them as an `AseWorld`.
"""

from functools import cache

import numpy as np
import oracle
import pytest
from ase import units
from ase.build import add_adsorbate, bulk, fcc100
from ase.calculators.lj import LennardJones
from ase.calculators.mixing import SumCalculator
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.io import read
from ase.io.trajectory import Trajectory
from ase.md.langevin import Langevin
from ase.md.nose_hoover_chain import MTKNPT, IsotropicMTKNPT, NoseHooverChainNVT
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from ase.parallel import DummyMPI
from oracle import assert_near, assert_same_bits, on_rank_0
from structures import STRUCTURES

from nvdd_md.agreement import DisagreementError
from nvdd_md.calculators import DistributedCalculator, TwoHop
from nvdd_md.comm.ase_world import AseWorld

FS = units.fs
SCENARIOS = {}


def scenario(run):
    """Enter a function into the table. It gets a maker of calculators and ASE's world.

    It returns arrays: positions first, then whatever else must come out the same.
    """
    SCENARIOS[run.__name__] = run
    return run


@cache
def by_reference(name: str) -> list[np.ndarray]:
    return [np.asarray(x) for x in SCENARIOS[name](oracle.TwoHop, DummyMPI())]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(comm, name):
    world = AseWorld(comm)
    got = SCENARIOS[name](lambda: DistributedCalculator(TwoHop(), comm, device="cpu"), world)
    got = [np.asarray(x) for x in got]
    wanted = on_rank_0(comm, lambda: by_reference(name))
    for place, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        assert_near(mine, right, 1e-9, f"result {place}")
    assert_same_bits(comm, *got)


def warm(atoms, world, temperature=600.0):
    thermalize_momenta(atoms, temperature, rng=np.random.default_rng(3), comm=world)
    return atoms


def recorded(atoms, dynamics, steps, *values):
    """Run, and return positions, cell, momenta and what `values` gave after each step."""
    start = atoms.positions.copy()
    ask = (atoms.get_total_energy, *values)
    series = [[value() for value in ask] for _ in dynamics.irun(steps)]
    assert len(series) == steps + 1
    assert np.abs(atoms.positions - start).max() > 0.05
    return [atoms.positions, atoms.cell.array, atoms.get_momenta(), series]


# -- Optimisers


@scenario
def bfgs(make, world):
    atoms = STRUCTURES["alloy"]()
    atoms.calc = make()
    energy = atoms.get_potential_energy()
    BFGS(atoms, logfile=None, comm=world).run(fmax=1e-3, steps=12)
    assert atoms.get_potential_energy() < energy - 1.0
    return atoms.positions, atoms.get_potential_energy(), atoms.get_forces()


@scenario
def fire(make, world):
    atoms = STRUCTURES["cluster_without_cell"]()
    atoms.calc = make()
    energy = atoms.get_potential_energy()
    FIRE(atoms, logfile=None, comm=world).run(fmax=1e-3, steps=25)
    assert atoms.get_potential_energy() < energy - 0.1
    return atoms.positions, atoms.get_potential_energy(), atoms.get_forces()


@scenario
def cell_alone_relaxes(make, world):
    atoms = bulk("Cu", cubic=True, a=3.85) * 2
    atoms.calc = make()
    assert FIRE(FrechetCellFilter(atoms), logfile=None, comm=world).run(fmax=1e-3, steps=400)
    stress = atoms.get_stress()
    assert np.abs(stress).max() * atoms.get_volume() / len(atoms) < 2e-3
    assert abs(atoms.cell.lengths()[0] / 2 - 3.85) > 0.05
    return atoms.positions, atoms.cell.array, stress


@scenario
def cell_and_atoms_relax(make, world):
    atoms = STRUCTURES["random_liquid_in_a_skewed_cell"]()
    atoms.calc = make()
    before = atoms.cell.array.copy()
    BFGS(FrechetCellFilter(atoms), logfile=None, comm=world).run(fmax=1e-3, steps=12)
    assert np.abs(atoms.cell.array - before).max() > 0.1
    return atoms.positions, atoms.cell.array, atoms.get_stress()


# -- Dynamics


@scenario
def verlet(make, world):
    atoms = warm(STRUCTURES["crystal"](), world)
    atoms.calc = make()
    dynamics = VelocityVerlet(atoms, 2 * FS, comm=world)
    return recorded(atoms, dynamics, 50, atoms.get_kinetic_energy, atoms.get_temperature)


@scenario
def langevin(make, world):
    atoms = warm(STRUCTURES["pbc_TFT"](), world)
    atoms.calc = make()
    rng = np.random.default_rng(7)
    settings = {"temperature_K": 600, "friction": 0.02 / FS, "fixcm": False}
    return recorded(atoms, Langevin(atoms, 2 * FS, rng=rng, comm=world, **settings), 40)


@scenario
def nose_hoover(make, world):
    atoms = warm(STRUCTURES["crystal"](), world)
    atoms.calc = make()
    dynamics = NoseHooverChainNVT(atoms, 2 * FS, temperature_K=600, tdamp=60 * FS, comm=world)
    return recorded(atoms, dynamics, 40, dynamics.get_conserved_energy)


def npt(dynamics_class, make, world):
    atoms = warm(STRUCTURES["crystal"](), world)
    atoms.calc = make()
    before = atoms.cell.array.copy()
    damping = {"tdamp": 60 * FS, "pdamp": 100 * FS}
    dynamics = dynamics_class(
        atoms, 2 * FS, temperature_K=600, pressure_au=0.05, comm=world, **damping
    )
    results = recorded(atoms, dynamics, 40, dynamics.get_conserved_energy, atoms.get_volume)
    assert np.abs(atoms.cell.array - before).max() > 0.05
    return results


@scenario
def isotropic_npt(make, world):
    return npt(IsotropicMTKNPT, make, world)


@scenario
def npt_with_any_cell(make, world):
    return npt(MTKNPT, make, world)


# -- Several images, several calculators


def images(make):
    ends = []
    for site in ("hollow", "bridge"):
        slab = fcc100("Cu", (3, 3, 2), a=3.6, vacuum=8.0)
        add_adsorbate(slab, "Ni", 1.8, site)
        slab.pbc = (True, True, False)
        slab.set_constraint(FixAtoms(mask=slab.get_tags() == 2))
        slab.calc = make()
        ends.append(slab)
    first, last = ends
    shared = make()
    middle = [first.copy() for _ in range(3)]
    for image in middle:
        image.calc = shared
    return [first, *middle, last]


@scenario
def neb(make, world):
    band = images(make)
    path = NEB(band, allow_shared_calculator=True, method="improvedtangent", world=world)
    path.interpolate()
    start = path.get_positions().copy()
    FIRE(path, logfile=None, comm=world).run(fmax=0.01, steps=10)
    assert np.abs(path.get_positions() - start).max() > 0.05
    return path.get_positions(), [image.get_potential_energy() for image in band]


@scenario
def sum_of_calculators(make, world):
    atoms = warm(STRUCTURES["crystal"](), world)
    atoms.calc = SumCalculator([make(), LennardJones(sigma=2.2, epsilon=0.02, rc=4.0, smooth=True)])
    results = recorded(atoms, VelocityVerlet(atoms, 2 * FS, comm=world), 25)
    return [*results, atoms.get_stress(), atoms.get_forces()]


@pytest.mark.parametrize("comm", [3], indirect=True)
def test_a_band_divided_over_the_same_ranks_is_refused(comm):
    """ASE would evaluate another image on each rank; all ranks are told, and none hangs."""
    band = images(lambda: DistributedCalculator(TwoHop(), comm, device="cpu"))
    for image in band[1:-1]:
        image.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
    path = NEB(band, parallel=True, method="improvedtangent", world=AseWorld(comm))
    path.interpolate()
    with pytest.raises(DisagreementError, match=r"submitted different systems(?s:.*)NEB\(parallel"):
        path.get_forces()


# -- Files


def test_trajectory_and_log(comm, shared_tmp_path):
    atoms = warm(STRUCTURES["crystal"](), AseWorld(comm))
    atoms.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
    atoms.get_stress()
    path, log = shared_tmp_path / "run.traj", shared_tmp_path / "run.log"
    frames = []
    with VelocityVerlet(
        atoms, 2 * FS, trajectory=path, logfile=log, loginterval=3, comm=AseWorld(comm)
    ) as dynamics:
        for step, _ in enumerate(dynamics.irun(9)):
            if step % 3 == 0:
                results = [atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()]
                frames.append((atoms.positions.copy(), atoms.get_momenta(), results))
    comm.barrier()

    assert len(log.read_text().splitlines()) == 1 + len(frames)
    with Trajectory(path) as trajectory:
        assert len(trajectory) == len(frames) == 4
        for stored, (positions, momenta, results) in zip(trajectory, frames, strict=True):
            assert np.array_equal(stored.positions, positions)
            assert np.array_equal(stored.get_momenta(), momenta)
            assert stored.calc.name == "distributedcalculator"
            again = [stored.get_potential_energy(), stored.get_forces(), stored.get_stress()]
            for one, other in zip(again, results, strict=True):
                assert np.array_equal(one, other)
            # What was stored can be evaluated again.
            stored.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
            assert_near(stored.get_forces(), results[1], 1e-11)


def test_one_rank_writes_what_all_have(comm, shared_tmp_path):
    atoms = STRUCTURES["alloy"]()
    atoms.calc = DistributedCalculator(TwoHop(), comm, device="cpu")
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    before = comm.traffic.snapshot()
    path = shared_tmp_path / "final.extxyz"
    if comm.rank == 0:
        atoms.write(path, parallel=False)
    assert comm.traffic == before
    comm.barrier()
    stored = read(path, parallel=False)
    assert abs(stored.get_potential_energy() - energy) < 1e-7
    assert_near(stored.get_forces(), forces, 1e-7)
    assert_near(stored.get_stress(), stress, 1e-7)
