"""Simulations that the tests of dynamics share: systems, thermostats, and how runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.md.verlet import VelocityVerlet as AseVelocityVerlet
from oracle import TwoHop as Reference

from nvdd_md.calculators import TwoHop
from nvdd_md.comm import Communicator
from nvdd_md.integrators import (
    Langevin,
    NoseHooverChain,
    Simulation,
    SimulationState,
    Thermo,
    Thermostat,
    VelocityRescaling,
    VelocityVerlet,
)

PER_FS = 1.0 / units.fs
"""Å/fs in ASE's units."""

TEMPERATURE_K = 700.0


@dataclass(frozen=True)
class Kind:
    """A thermostat, and what it costs.

    Attributes
    ----------
    make : callable
        Returns a new one, or None for constant energy.
    collectives : int
        Of a step within the life of a neighbour list.
    """

    make: Callable[[], Thermostat | None]
    collectives: int


THERMOSTATS = {
    "NVE": Kind(lambda: None, 1),
    "Langevin": Kind(lambda: Langevin(TEMPERATURE_K, 5.0, 3), 1),
    "rescaling": Kind(lambda: VelocityRescaling(TEMPERATURE_K, 50.0, 3), 2),
    "chain": Kind(lambda: NoseHooverChain(TEMPERATURE_K, 50.0), 3),
}
"""Every thermostat; a new one is one line and inherits the tests of parity, restart and counts."""


def integrator(name: str, timestep_fs: float = 2.0) -> VelocityVerlet:
    return VelocityVerlet(timestep_fs, THERMOSTATS[name].make())


def simulate(
    comm: Communicator, atoms: Atoms, name: str = "NVE", timestep_fs: float = 2.0, **options: object
) -> Simulation:
    """Begin a simulation of the two-hop potential, or of ``potential``, on the CPU."""
    given = {"potential": TwoHop(), "device": "cpu", "skin": 0.3} | options
    potential = given.pop("potential")
    return Simulation(atoms, potential, integrator(name, timestep_fs), comm, **given)


def hot_crystal() -> Atoms:
    """Return 48 atoms so fast that a list of 0.3 Å lives for about ten steps."""
    atoms = bulk("Cu", cubic=True, a=3.7) * (3, 2, 2)
    rng = np.random.default_rng(5)
    atoms.set_velocities(rng.normal(0, 0.006, (len(atoms), 3)) * PER_FS)
    return atoms


def free_particles(n: int = 24, speed: float = 0.05) -> Atoms:
    """Return particles of several masses, far apart, with typical speeds in Å/fs."""
    rng = np.random.default_rng(8)
    grid = np.indices((4, 4, 4)).reshape(3, -1).T[rng.permutation(64)[:n]]
    atoms = Atoms("Ar" * n, 6.0 * grid + rng.uniform(0.0, 2.0, (n, 3)), pbc=True)
    atoms.set_cell([24.0, 25.0, 26.0])
    atoms.set_masses(rng.uniform(1.0, 40.0, n))
    atoms.set_velocities(rng.normal(0.0, speed, (n, 3)) * PER_FS)
    return atoms


def no_forces() -> TwoHop:
    """Return a potential of so short a range that free particles never meet."""
    return TwoHop(rc=0.02)


def numbers(thermo: Thermo) -> np.ndarray:
    """Return all numbers of a thermo record, (14,), those that are None as 0."""
    scalars = (
        thermo.potential_eV,
        thermo.kinetic_eV,
        thermo.total_eV,
        thermo.conserved_eV,
        thermo.temperature_K,
        thermo.target_temperature_K or 0.0,
        thermo.pressure_GPa or 0.0,
        thermo.volume_A3 or 0.0,
    )
    return np.array([*scalars, *(thermo.stress or [0.0] * 6)])


@dataclass(frozen=True)
class Path:
    """What a run went through.

    Attributes
    ----------
    steps : (k,) int
    thermo : (k, 14)
        :func:`numbers` of each.
    positions, momenta : (k, n_atoms, 3)
    rebuilds : (k,) int
        Lists built up to each step.
    """

    steps: np.ndarray
    thermo: np.ndarray
    positions: np.ndarray
    momenta: np.ndarray
    rebuilds: np.ndarray

    def from_step(self, step: int) -> Path:
        """Return the part after a step."""
        later = self.steps > step
        return Path(*(getattr(self, name)[later] for name in self.__dataclass_fields__))


def record(simulation: Simulation, n_steps: int, every: int = 1) -> Path:
    """Run, and look at the state every few steps; from the first one on, if it is new. Collective.

    The same on all ranks.
    """
    seen: list[tuple[object, ...]] = []

    def look(simulation: Simulation) -> None:
        atoms = simulation.gather()
        thermo = numbers(simulation.thermo())
        momenta = atoms.get_momenta()
        seen.append((simulation.step, thermo, atoms.positions, momenta, simulation.n_rebuilds))

    simulation.attach(look, every)
    simulation.run(n_steps)
    return Path(*(np.array(column) for column in zip(*seen, strict=True)))


def assert_same_state(
    comm: Communicator, got: SimulationState | None, wanted: SimulationState | None, but: str = ""
) -> None:
    """Compare two states bit by bit, but for one of the scalars. Collective."""
    different: list[str] = []
    if got is not None and wanted is not None:
        assert got.scalars.keys() == wanted.scalars.keys()
        assert got.arrays.keys() == wanted.arrays.keys()
        scalars = [key for key in got.scalars if got.scalars[key] != wanted.scalars[key]]
        arrays = [k for k in got.arrays if got.arrays[k].tobytes() != wanted.arrays[k].tobytes()]
        different = [key for key in scalars + arrays if key != but]
    assert not comm.broadcast_object(different)


def owned_ids(simulation: Simulation) -> np.ndarray:
    """Return the ids of the atoms that live on this rank."""
    return simulation._engine.domain.owned


def owner_of(simulation: Simulation, atom: int) -> int:
    """Return the rank that an atom lives on. Collective."""
    everything = simulation.comm.gather_objects(owned_ids(simulation))
    (owner,) = (rank for rank, ids in enumerate(everything) if atom in ids)
    return owner


def ase_path(atoms: Atoms, timestep_fs: float, n_steps: int) -> Atoms:
    """Return what ASE makes of ``atoms``, with the reference potential in one process."""
    atoms = atoms.copy()
    atoms.calc = Reference()
    AseVelocityVerlet(atoms, timestep_fs * units.fs).run(n_steps)
    return atoms


@contextmanager
def first_ranks(comm: Communicator, n: int) -> Iterator[Communicator | None]:
    """Give the first ``n`` ranks a communicator of their own, the others None. Collective."""
    part = comm.split(0 if comm.rank < n else None, comm.rank)
    yield part
    if part is not None:
        part.close()
