"""Put the parts of all ranks together: sums in rank order, per-atom rows in the caller's order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.decomposition import Decomposition
from nvdd_md.domain.lattice import FloatArray, IntArray
from nvdd_md.evaluation import LocalResults, NonFiniteError, voigt
from nvdd_md.potential import OutputKind, Potential
from nvdd_md.system import System, describe

Results = dict[str, float | NDArray[np.float64]]


def consolidate(
    local: LocalResults,
    potential: Potential,
    system: System,
    decomposition: Decomposition,
    comm: Communicator,
) -> Results:
    """Return the results of the whole system, the same bits on every rank. Collective (one gather).

    Returns
    -------
    dict
        ``energy``, ``free_energy`` (eV), ``forces`` (n_atoms, 3) eV/Å, ``stress`` (6,) eV/Å³ where
        it is defined, and every declared output that is not only an energy term under its name.

    Raises
    ------
    NonFiniteError
        Naming the first atom, its element and the owning rank.
    """
    names = {kind: _names(potential, kind) for kind in OutputKind}
    node_parts = {"forces": local.forces} | {
        name: local.outputs[name] for name in names[OutputKind.PER_NODE]
    }
    head_parts = {"virial": local.virial} | {
        name: local.outputs[name]
        for kind in OutputKind
        if kind is not OutputKind.PER_NODE
        for name in names[kind]
    }
    heads, rows = _gather(head_parts, node_parts, decomposition, comm)
    results: Results = dict(rows)
    for name in names[OutputKind.SYSTEM_PARTIAL]:
        results[name] = _ordered_sum(heads[name])
    for kind in (OutputKind.SYSTEM_TOTAL, OutputKind.GLOBAL):
        results |= {name: heads[name][0] for name in names[kind]}
    energy = float(sum(np.sum(results[name]) for name in potential.energy_terms))
    _check_finite(energy, rows, decomposition.owners, system)
    results["energy"] = results["free_energy"] = energy
    volume = system.volume
    if volume is not None:
        results["stress"] = voigt(_ordered_sum(heads["virial"])) / volume
    return results


def _names(potential: Potential, kind: OutputKind) -> list[str]:
    return [name for name, declared in potential.outputs.items() if declared is kind]


def _ordered_sum(parts: FloatArray) -> FloatArray:
    """Add the parts of all ranks (n_ranks, *F) one after the other."""
    total = np.zeros(parts.shape[1:])
    for part in parts:
        total = total + part
    return total


def _gather(
    heads: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    decomposition: Decomposition,
    comm: Communicator,
) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
    """Gather per-rank values and per-atom rows of all ranks in one collective.

    Returns
    -------
    heads : dict of (n_ranks, *F)
    rows : dict of (n_atoms, *F), in the caller's order
    """
    n_owned = decomposition.routing.n_owned
    head = torch.cat([value.reshape(1, -1).to(torch.float64) for value in heads.values()], 1)
    body = torch.cat(
        [
            value[:n_owned].reshape(n_owned, value[0].numel()).to(torch.float64)
            for value in rows.values()
        ],
        1,
    )
    n_head, n_columns = head.shape[1], body.shape[1]
    counts = n_head + decomposition.owned_counts * n_columns
    packed = comm.gather_rows(torch.cat((head.reshape(-1), body.reshape(-1))), counts.tolist())
    chunks = np.split(packed.cpu().numpy(), np.cumsum(counts)[:-1])

    all_heads = np.stack([chunk[:n_head] for chunk in chunks])
    ordered = np.concatenate([chunk[n_head:] for chunk in chunks]).reshape(-1, n_columns)
    by_id = np.empty_like(ordered)
    by_id[decomposition.ids_by_owner] = ordered
    return _unpack(all_heads, heads, 0), _unpack(by_id, rows, 1)


def _unpack(table: FloatArray, like: Mapping[str, Tensor], skip: int) -> dict[str, FloatArray]:
    """Cut the columns of ``table`` (n, k) into arrays shaped as ``like`` without ``skip`` axes."""
    arrays: dict[str, FloatArray] = {}
    start = 0
    for name, value in like.items():
        shape = tuple(value.shape[skip:])
        width = int(np.prod(shape))
        arrays[name] = np.ascontiguousarray(table[:, start : start + width]).reshape(-1, *shape)
        start += width
    return arrays


def _check_finite(
    energy: float, rows: Mapping[str, FloatArray], owners: IntArray, system: System
) -> None:
    if np.isfinite(energy) and np.isfinite(rows["forces"]).all():
        return
    for name, array in rows.items():
        bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
        if len(bad):
            atom = int(bad[0])
            raise NonFiniteError(
                f"the model returned {name} that are not finite for {len(bad)} atom(s); the first "
                f"is {describe(atom, system.numbers)}, owned by rank {int(owners[atom])}"
            )
    raise NonFiniteError(f"the model returned an energy of {energy}")
