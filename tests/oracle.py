"""The serial two-hop reference, and how results are compared with it.

The reference is written apart from the package: numpy, ASE's neighbour list, derivatives by
hand. It is checked against finite differences (forces 2e-10 eV/Å, stress 4e-11 eV/Å³).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.neighborlist import primitive_neighbor_list

from nvdd_md.comm import Communicator

T = TypeVar("T")

VOIGT = ([0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1])
"""Rows and columns of xx, yy, zz, yz, xz, xy."""


class TwoHop(Calculator):
    """Serial two-hop potential (receptive field 2 rc) for any species, any cell, any pbc.

    The equations stand in `nvdd_md.calculators.TwoHop`. ``ncalls`` counts evaluations.
    """

    implemented_properties = [  # noqa: RUF012 - as ASE declares it
        "energy",
        "free_energy",
        "energies",
        "forces",
        "stress",
        "stresses",
    ]
    nolabel = True

    def __init__(self, rc=4.0, k=0.05, A=0.5):
        super().__init__()
        self.rc, self.k, self.A = rc, k, A
        self.ncalls = 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.ncalls += 1
        atoms, n, rc, k = self.atoms, len(self.atoms), self.rc, self.k
        z, charge = atoms.numbers, float(atoms.info.get("charge", 0))
        i, j, d, vector = edges(atoms, rc)

        x = d / rc
        f = (1 - x**2) ** 3
        df = -6 * x * (1 - x**2) ** 2 / rc
        weight = 0.5 + 0.02 * z[j]
        rho = np.bincount(i, weight * f, n)
        t = np.tanh(0.3 * rho)
        m = np.bincount(i, t[j] * f, n)
        u = self.A * np.exp(-3.0 * (d - 2.2))
        energies = (
            -np.sqrt(1 + rho)
            - 0.01 * z
            + 0.5 * k * m**2
            + 0.1 * charge * t
            + 0.5 * np.bincount(i, u * f, n)
        )

        dt = 0.3 * (1 - t**2)
        g_rho = -0.5 / np.sqrt(1 + rho) + (0.1 * charge + np.bincount(j, k * m[i] * f, n)) * dt
        slope = g_rho[i] * weight * df + k * m[i] * t[j] * df + 0.5 * (-3.0 * u * f + u * df)
        g = (slope / np.where(d > 0, d, 1))[:, None] * vector  # dE/d(edge vector)
        forces = np.zeros((n, 3))
        np.add.at(forces, i, g)
        np.add.at(forces, j, -g)
        energy = float(energies.sum())
        self.results = {
            "energy": energy,
            "free_energy": energy,
            "energies": energies,
            "forces": forces,
        }
        if atoms.cell.rank == 3 and atoms.pbc.any():
            outer = vector[:, :, None] * g[:, None, :]
            virials = 0.5 * (outer + outer.transpose(0, 2, 1))[:, VOIGT[0], VOIGT[1]]
            stresses = np.zeros((n, 6))
            np.add.at(stresses, i, 0.5 * virials)
            np.add.at(stresses, j, 0.5 * virials)
            self.results["stress"] = virials.sum(0) / atoms.cell.volume
            self.results["stresses"] = stresses / atoms.cell.volume


def edges(atoms: Atoms, cutoff: float) -> tuple[np.ndarray, ...]:
    """Return centre i, neighbour j, distance and vector from i to j of all pairs."""
    if not len(atoms):
        return np.zeros(0, int), np.zeros(0, int), np.zeros(0), np.zeros((0, 3))
    cell = atoms.cell.complete()
    return primitive_neighbor_list("ijdD", atoms.pbc, cell, atoms.positions, cutoff)


@dataclass(frozen=True)
class Outcome:
    """All that a calculator says about one structure.

    Attributes
    ----------
    energy : float, eV
    energies : (n,) eV
    forces : (n, 3) eV/Å
    stress, stresses : (6,), (n, 6) eV/Å³, or None where a stress is not defined
    """

    energy: float
    energies: np.ndarray
    forces: np.ndarray
    stress: np.ndarray | None
    stresses: np.ndarray | None

    def arrays(self) -> list[np.ndarray]:
        """Return all of it that there is."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [np.asarray(value) for value in values if value is not None]


def outcome(atoms: Atoms, calculator: Calculator) -> Outcome:
    """Give `atoms` this calculator and ask it for everything. Collective if `calculator` is."""
    atoms.calc = calculator
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    energies = atoms.get_potential_energies()
    try:
        stress, stresses = atoms.get_stress(), atoms.get_stresses()
    except PropertyNotImplementedError:
        stress = stresses = None
    return Outcome(energy, energies, forces, stress, stresses)


def assert_agree(
    got: Outcome, wanted: Outcome, energy: float, forces: float, stress: float, name: str = ""
) -> None:
    """Compare two outcomes, with the measures of requirement R11.

    Parameters
    ----------
    energy : float
        Of the sum of |e_i|, and for each e_i of max(1, max|e_i|).
    forces, stress : float
        Of max(1, max|F|) and max(1, max|σ|); per-atom stresses as the stress.
    """
    allowed = energy * np.abs(wanted.energies).sum()
    assert abs(got.energy - wanted.energy) <= allowed, (name, got.energy, wanted.energy, allowed)
    assert_near(got.energies, wanted.energies, energy, f"{name} energies")
    assert_near(got.forces, wanted.forces, forces, f"{name} forces")
    assert (got.stress is None) == (wanted.stress is None), name
    if wanted.stress is not None:
        assert_near(got.stress, wanted.stress, stress, f"{name} stress")
        assert_near(got.stresses, wanted.stresses, stress, f"{name} stresses")


def assert_near(got: np.ndarray, wanted: np.ndarray, tolerance: float, what: str = "") -> None:
    """Compare element by element: absolute, and relative to the largest where that is above 1."""
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    allowed = tolerance * max(1.0, np.abs(wanted).max(initial=0.0))
    deviation = np.abs(got - wanted).max(initial=0.0)
    assert deviation <= allowed, (what, deviation, allowed)


def assert_same_bits(comm: Communicator, *values: object) -> None:
    """Compare arrays over the ranks, bit by bit. Collective."""
    mine = [np.asarray(value).tobytes() for value in values]
    assert all(other == mine for other in comm.gather_objects(mine))


def on_rank_0(comm: Communicator, compute: Callable[[], T]) -> T:
    """Compute something serial on one rank, and give it to all. Collective.

    An error on rank 0 is an error on all: nobody is left waiting.
    """
    value, error = None, None
    if comm.rank == 0:
        try:
            value = compute()
        except Exception as raised:
            error = raised
    value, error = comm.broadcast_object((value, error))
    if error is not None:
        raise error
    return value
