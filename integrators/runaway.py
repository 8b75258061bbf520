"""When a run has to be stopped because its atoms have run away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd_md.integrators.meeting import Minutes
from nvdd_md.integrators.motion import Motion
from nvdd_md.system import symbol


class RunawayError(ArithmeticError):
    """Atoms moved too far in one step, or the energy left its range; the same on all ranks."""


@dataclass(frozen=True)
class Limits:
    """Beyond these a run is stopped.

    Attributes
    ----------
    max_move_A : float or None
        Longest move of an atom in one step, Å. A hydrogen atom of 10 000 K moves 0.16 Å/fs.
    max_drift_eV_per_atom : float or None
        Largest change of the conserved energy since the start, eV per atom.

    Raises
    ------
    ValueError
        If one is not above 0.
    """

    max_move_A: float | None = 1.0
    max_drift_eV_per_atom: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("max_move_A", "max_drift_eV_per_atom"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be above 0 or None, got {value!r}")


@dataclass(frozen=True, order=True)
class Suspect:
    """An atom to name in a message; the most suspect one comes first in order.

    Attributes
    ----------
    rating : float
    atom, number, rank : int
        Id, atomic number and owner.
    """

    rating: float
    atom: int
    number: int
    rank: int

    def describe(self) -> str:
        """Return «atom 12 (Cu), owned by rank 1,»."""
        return f"atom {self.atom} ({symbol(self.number)}), owned by rank {self.rank},"


def first_bad_atom(forces: Tensor, columns: Mapping[str, Tensor], rank: int) -> Suspect | None:
    """Return this rank's first atom whose forces (n_owned, 3) are not finite, if there is one."""
    bad = torch.nonzero(~torch.isfinite(forces).all(dim=1))[:, 0]
    return _suspect(columns, int(bad[0]), 0.0, rank) if len(bad) else None


def judge(
    limits: Limits, minutes: Minutes, drift: float, motion: Motion, before: Mapping[str, Tensor]
) -> None:
    """Raise if a limit is passed. Collective then; all ranks come to the same verdict.

    Parameters
    ----------
    limits : Limits
    minutes : Minutes
        Of the step that is being made.
    drift : float, eV per atom
        Change of the conserved energy up to the step before.
    motion : Motion
    before : mapping of str to Tensor
        The columns before the step.

    Raises
    ------
    RunawayError
    """
    move = float(minutes.longest_steps.max())
    if limits.max_move_A is not None and not move <= limits.max_move_A:
        lengths = torch.linalg.vector_norm(motion.particles.positions - before["positions"], dim=1)
        suspect = _worst(lengths, before, motion)
        raise RunawayError(
            f"step {motion.step}: {suspect.describe()} would move {move:.3g} Å in one step, more "
            f"than max_move_A = {limits.max_move_A:g}: the timestep is too long, or the model is "
            "outside of what it knows"
        )
    allowed = limits.max_drift_eV_per_atom
    if allowed is not None and not abs(drift) <= allowed:
        momenta, masses = before["momenta"], before["masses"]
        suspect = _worst(0.5 * (momenta * momenta).sum(1) / masses, before, motion)
        raise RunawayError(
            f"step {motion.step - 1}: the conserved energy has changed by {drift:.3g} eV per atom "
            f"since the start, more than max_drift_eV_per_atom = {allowed:g}; the fastest is "
            f"{suspect.describe()} with {-suspect.rating:.3g} eV. The timestep is too long, or the "
            "model is outside of what it knows"
        )


def _worst(ratings: Tensor, columns: Mapping[str, Tensor], motion: Motion) -> Suspect:
    """Return the atom with the largest rating of all ranks. Collective."""
    mine = None
    if len(ratings):
        row = int(torch.nan_to_num(ratings, nan=math.inf).argmax())
        mine = _suspect(columns, row, -float(ratings[row]), motion.comm.rank)
    found = [suspect for suspect in motion.comm.gather_objects(mine) if suspect is not None]
    return min(found)


def _suspect(columns: Mapping[str, Tensor], row: int, rating: float, rank: int) -> Suspect:
    return Suspect(rating, int(columns["ids"][row]), int(columns["numbers"][row]), rank)
