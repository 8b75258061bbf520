"""One frame of a run, as rank 0 hands it to the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from numpy.typing import NDArray

from nvdd_md.integrators.thermo import Thermo

CALCULATED = ("forces", "energies")
"""Per-atom fields that ASE keeps with the calculator, not with the atoms."""


@dataclass(frozen=True)
class Frame:
    """What outputs are made of; exists on rank 0 only.

    Its arrays belong to the outputs from the moment it is handed over: writers work behind the
    run, so nobody may change them any more.

    Attributes
    ----------
    thermo : Thermo
    numbers : (n,) int64
        Atomic numbers.
    cell : (3, 3) float64, Å
    pbc : (3,) bool
    arrays : mapping of str to ndarray
        Per-atom fields in the order of atom ids: ``positions`` (n, 3) Å, unwrapped, whenever a
        trajectory is due; besides them what :meth:`RunOutputs.fields` asked for.
    info : mapping of str to float
        What the potential reads from ``atoms.info``: charge, spin.
    """

    thermo: Thermo
    numbers: NDArray[np.int64]
    cell: NDArray[np.float64]
    pbc: NDArray[np.bool_]
    arrays: Mapping[str, NDArray[Any]]
    info: Mapping[str, float]

    def head(self, n: int) -> Frame:
        """Return the frame with its first ``n`` atoms only; arrays are views."""
        arrays = {name: values[:n] for name, values in self.arrays.items()}
        return Frame(self.thermo, self.numbers[:n], self.cell, self.pbc, arrays, self.info)

    def to_atoms(self) -> Atoms:
        """Return ASE atoms with a :class:`SinglePointCalculator`.

        ``info`` has ``step`` and ``time_fs``. Velocities without momenta become momenta.
        """
        atoms = Atoms(
            numbers=self.numbers,
            positions=self.arrays["positions"],
            cell=self.cell,
            pbc=self.pbc,
            info={"step": self.thermo.step, "time_fs": self.thermo.time_fs, **self.info},
        )
        known = ("positions", "numbers", "masses", "velocities", *CALCULATED)
        if "masses" in self.arrays:
            atoms.set_masses(self.arrays["masses"])
        for name in self.arrays:
            if name not in known:
                atoms.set_array(name, self.arrays[name])
        if "velocities" in self.arrays and "momenta" not in self.arrays:
            atoms.set_velocities(self.arrays["velocities"] / units.fs)
        results = {name: self.arrays[name] for name in CALCULATED if name in self.arrays}
        atoms.calc = SinglePointCalculator(
            atoms, energy=self.thermo.potential_eV, stress=self.thermo.stress, **results
        )
        return atoms
