"""One decomposition of a system: owners, ghosts, edges, routing; valid while no pair is missed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.lattice import FloatArray, IntArray, Lattice
from nvdd_md.domain.neighbors import Edges, candidates, find_edges
from nvdd_md.domain.partition import bisect
from nvdd_md.domain.routing import HaloRouting, build_routing
from nvdd_md.phase_times import PhaseTimes

BALANCE_TOLERANCE = 1.03
"""Max/mean weight per rank above which a first decomposition is cut again with counted edges."""


@dataclass(frozen=True)
class Decomposition:
    """Who owns what, the edges of this rank, and what they were built from.

    Local rows are ``[own | ghost]``: owned atoms by id (or one dummy row), ghosts by (owner, id).

    Attributes
    ----------
    owners : (n_atoms,) int64
        Owning rank by atom id; the same on every rank.
    owned, ghosts : (n_owned,), (n_ghost,) int64
        Atom ids of this rank's rows.
    edge_centre, edge_neighbour : (n_edges,) int64 tensors
        Local rows.
    edge_shift : (n_edges, 3) float64 tensor
        Lattice translations.
    routing : HaloRouting
    weights : (n_atoms,) float64
        One plus the number of edges of each centre, counted; the same on every rank.
    edges_per_rank : (n_ranks,) int64
    reference_positions : (n_atoms, 3) float64, Å
    lattice : Lattice
        The lattice the list was built with.
    cutoff, skin : float, Å
    """

    owners: IntArray
    owned: IntArray
    ghosts: IntArray
    edge_centre: Tensor
    edge_neighbour: Tensor
    edge_shift: Tensor
    routing: HaloRouting
    weights: FloatArray
    edges_per_rank: IntArray
    reference_positions: FloatArray
    lattice: Lattice
    cutoff: float
    skin: float

    @cached_property
    def owned_counts(self) -> IntArray:
        """Atoms of each rank, (n_ranks,)."""
        return np.bincount(self.owners, minlength=len(self.edges_per_rank))

    @cached_property
    def ids_by_owner(self) -> IntArray:
        """Atom ids by (owner, id), (n_atoms,): the order of rows gathered from all ranks."""
        return np.argsort(self.owners, kind="stable")

    @property
    def local_ids(self) -> IntArray:
        """Atom ids of the local rows without the dummy, (n_owned + n_ghost,)."""
        return np.concatenate((self.owned, self.ghosts))

    def covers(self, positions: FloatArray, lattice: Lattice) -> bool:
        """Tell whether the list still has every pair below the cutoff.

        With M the strain from the reference lattice and d the displacements left after it, a
        pair that is now closer than the cutoff was listed if
        ``sigma_min(M)·(cutoff + skin) - (d_1st + d_2nd) >= cutoff``.

        Parameters
        ----------
        positions : (n_atoms, 3) float64, Å
        lattice : Lattice
        """
        reference = self.lattice
        if len(positions) != len(self.owners) or (lattice.pbc != reference.pbc).any():
            return False
        moved_from = self.reference_positions
        shrink = 1.0
        if (lattice.vectors != reference.vectors).any():
            strain = np.linalg.inv(reference.vectors) @ lattice.vectors
            moved_from = moved_from @ strain
            shrink = float(np.linalg.svd(strain, compute_uv=False)[-1])
        two_largest = _two_largest(np.linalg.norm(positions - moved_from, axis=1))
        return shrink * (self.cutoff + self.skin) - two_largest >= self.cutoff


def _two_largest(distances: FloatArray) -> float:
    """Return the sum of the two largest of ``distances`` (n,)."""
    if len(distances) < 2:
        return float(distances.sum())
    return float(np.partition(distances, len(distances) - 2)[-2:].sum())


def decompose(
    positions: FloatArray,
    lattice: Lattice,
    comm: Communicator,
    *,
    cutoff: float,
    skin: float,
    weights: FloatArray | None,
    cut_axes: tuple[int, ...],
    device: torch.device,
    times: PhaseTimes,
) -> Decomposition:
    """Cut the system into domains and build this rank's edges and routing. Collective.

    Every rank gives the same arguments (and gets the same owners); only edges of owned centres
    are built.

    Parameters
    ----------
    positions : (n_atoms, 3) float64, Å
    lattice : Lattice
    comm : Communicator
    cutoff, skin : float, Å
        Edges shorter than ``cutoff + skin`` are listed.
    weights : (n_atoms,) float64 or None
        Counted weights of an earlier decomposition. None: equal weights, and where these turn
        out unbalanced a second cut with the counted ones.
    cut_axes : tuple of int
        Axes that may be cut.
    device : torch.device
        For the index tensors.
    times : PhaseTimes
        Gets the seconds of ``neighbours`` and ``routing``.
    """
    ids = np.arange(len(positions), dtype=np.int64)
    trial = weights if weights is not None else np.ones(len(positions))
    with times.measure("neighbours"):
        owners, edges = _cut(positions, ids, trial, lattice, comm, cutoff + skin, cut_axes)
        counted, per_rank = _count_weights(owners, edges, comm)
        if weights is None and per_rank.max() > BALANCE_TOLERANCE * per_rank.mean():
            owners, edges = _cut(positions, ids, counted, lattice, comm, cutoff + skin, cut_axes)
            counted, per_rank = _count_weights(owners, edges, comm)

    with times.measure("routing"):
        owned = ids[owners == comm.rank]
        used = np.unique(edges.neighbour)
        ghosts = used[owners[used] != comm.rank]
        ghosts = ghosts[np.lexsort((ghosts, owners[ghosts]))]
        routing = build_routing(comm, owned, ghosts, owners[ghosts], device)
        rows = np.full(len(positions), -1, dtype=np.int64)
        rows[owned] = np.arange(len(owned))
        rows[ghosts] = routing.n_own_rows + np.arange(len(ghosts))
    return Decomposition(
        owners=owners,
        owned=owned,
        ghosts=ghosts,
        edge_centre=torch.from_numpy(rows[edges.centre]).to(device),
        edge_neighbour=torch.from_numpy(rows[edges.neighbour]).to(device),
        edge_shift=torch.from_numpy(edges.shift.astype(np.float64)).to(device),
        routing=routing,
        weights=counted,
        edges_per_rank=per_rank,
        reference_positions=positions.copy(),
        lattice=lattice,
        cutoff=cutoff,
        skin=skin,
    )


def _cut(
    positions: FloatArray,
    ids: IntArray,
    weights: FloatArray,
    lattice: Lattice,
    comm: Communicator,
    list_cutoff: float,
    cut_axes: tuple[int, ...],
) -> tuple[IntArray, Edges]:
    """Return owners (n_atoms,) and the edges of this rank's centres."""
    bricks = bisect(positions, ids, weights, lattice, comm.size, cut_axes)
    owners = bricks.owners(positions, ids, lattice)
    owned = ids[owners == comm.rank]
    nearby = candidates(positions, owned, ids[owners != comm.rank], lattice, list_cutoff)
    return owners, find_edges(positions, owned, nearby, lattice, list_cutoff)


def _count_weights(
    owners: IntArray, edges: Edges, comm: Communicator
) -> tuple[FloatArray, IntArray]:
    """Return counted weights (n_atoms,) and edges per rank (n_ranks,). Collective."""
    degree = np.bincount(edges.centre, minlength=len(owners))
    mine = torch.from_numpy(degree[owners == comm.rank])
    counts = np.bincount(owners, minlength=comm.size)
    gathered = comm.gather_rows(mine, counts.tolist()).numpy()
    weights = np.empty(len(owners))
    weights[np.argsort(owners, kind="stable")] = 1.0 + gathered
    per_rank = np.bincount(owners, weights=weights - 1.0, minlength=comm.size)
    return weights, per_rank.astype(np.int64)
