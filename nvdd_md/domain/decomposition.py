"""One decomposition of a system: owners, ghosts, edges, routing; valid while no pair is missed.

Two forms. A :class:`Domain` is what one rank knows when atoms stay on their ranks; nothing in it is
larger than its own atoms and their ghosts. A :class:`Decomposition` is a domain of ranks that all
hold the whole system.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.lattice import FloatArray, IntArray, Lattice
from nvdd_md.domain.neighbors import Box, find_edges
from nvdd_md.domain.partition import Bricks, bisect
from nvdd_md.domain.routing import HaloRouting, build_routing
from nvdd_md.phase_times import PhaseTimes

BALANCE_TOLERANCE = 1.03
"""Max/mean weight per rank above which the system is cut again with counted edges."""


@dataclass(frozen=True)
class ListRange:
    """How far atoms and cell may move until a neighbour list may miss a pair.

    With M the strain from the list's lattice and d the displacements left after it, a pair that is
    now closer than the cutoff was listed if
    ``sigma_min(M)·(cutoff + skin) - (d_1st + d_2nd) >= cutoff``.

    Attributes
    ----------
    lattice : Lattice
        The list was built with it.
    cutoff, skin : float, Å
    """

    lattice: Lattice
    cutoff: float
    skin: float

    def strain(self, lattice: Lattice) -> FloatArray | None:
        """Return M (3, 3), rows of positions times M, or None where the cell has not changed."""
        if (lattice.vectors == self.lattice.vectors).all():
            return None
        return np.asarray(np.linalg.inv(self.lattice.vectors) @ lattice.vectors)

    def allows(self, moves: float, lattice: Lattice) -> bool:
        """Tell whether the list has every pair below the cutoff.

        Parameters
        ----------
        moves : float, Å
            Sum of the two largest displacements in the whole system.
        lattice : Lattice
        """
        if (lattice.pbc != self.lattice.pbc).any():
            return False
        strain = self.strain(lattice)
        shrink = 1.0 if strain is None else float(np.linalg.svd(strain, compute_uv=False)[-1])
        return shrink * (self.cutoff + self.skin) - moves >= self.cutoff


@dataclass(frozen=True)
class Domain:
    """One rank's atoms, ghosts and edges.

    Local rows are ``[own | ghost]``: owned atoms by id (or one dummy row), ghosts by (owner, id).

    Attributes
    ----------
    bricks : Bricks
        The parts of space of all ranks.
    owned, ghosts : (n_owned,), (n_ghost,) int64
        Atom ids of this rank's rows.
    edge_centre, edge_neighbour : (n_edges,) int64 tensors
        Local rows.
    edge_shift : (n_edges, 3) float64 tensor
        Lattice translations.
    routing : HaloRouting
    weights : (n_owned,) float64
        One plus the number of edges of each owned atom.
    owned_counts, edges_per_rank : (n_ranks,) int64
    """

    bricks: Bricks
    owned: IntArray
    ghosts: IntArray
    edge_centre: Tensor
    edge_neighbour: Tensor
    edge_shift: Tensor
    routing: HaloRouting
    weights: FloatArray
    owned_counts: IntArray
    edges_per_rank: IntArray

    @property
    def local_ids(self) -> IntArray:
        """Atom ids of the local rows without the dummy, (n_owned + n_ghost,)."""
        return np.concatenate((self.owned, self.ghosts))

    @property
    def is_uneven(self) -> bool:
        """Whether the counted work differs by more than the tolerance; the same on all ranks."""
        work = self.edges_per_rank + self.owned_counts
        return bool(work.max() > BALANCE_TOLERANCE * work.mean())

    def __str__(self) -> str:
        return f"owned {len(self.owned)}, ghosts {len(self.ghosts)}, edges {len(self.edge_centre)}"


@dataclass(frozen=True)
class Decomposition(Domain):
    """A domain of ranks that all hold the whole system.

    Attributes
    ----------
    owners : (n_atoms,) int64
        Owning rank by atom id; the same on every rank.
    reference_positions : (n_atoms, 3) float64, Å
        The list was built from them.
    list_range : ListRange
    """

    owners: IntArray
    reference_positions: FloatArray
    list_range: ListRange

    @cached_property
    def ids_by_owner(self) -> IntArray:
        """Atom ids by (owner, id), (n_atoms,): the order of rows gathered from all ranks."""
        return np.argsort(self.owners, kind="stable")

    def covers(self, positions: FloatArray, lattice: Lattice) -> bool:
        """Tell whether the list still has every pair below the cutoff.

        Parameters
        ----------
        positions : (n_atoms, 3) float64, Å
        lattice : Lattice
        """
        if len(positions) != len(self.owners):
            return False
        strain, moved_from = self.list_range.strain(lattice), self.reference_positions
        if strain is not None:
            moved_from = moved_from @ strain
        moves = _two_largest(np.linalg.norm(positions - moved_from, axis=1))
        return self.list_range.allows(moves, lattice)


def _two_largest(distances: FloatArray) -> float:
    """Return the sum of the two largest of ``distances`` (n,)."""
    if len(distances) < 2:
        return float(distances.sum())
    return float(np.partition(distances, len(distances) - 2)[-2:].sum())


def build_domain(
    bricks: Bricks,
    owned: IntArray,
    positions: FloatArray,
    lattice: Lattice,
    comm: Communicator,
    *,
    list_cutoff: float,
    device: torch.device,
    times: PhaseTimes,
) -> Domain:
    """Build this rank's edges and routing from its own atoms. Collective.

    Parameters
    ----------
    bricks : Bricks
    owned : (n_owned,) int64
        Ids of this rank's atoms, ascending.
    positions : (n_owned, 3) float64, Å
    lattice : Lattice
    comm : Communicator
    list_cutoff : float, Å
        Edges shorter than this are listed.
    device : torch.device
        For the index tensors.
    times : PhaseTimes
        Gets the seconds of ``neighbours`` and ``routing``.
    """
    with times.measure("neighbours"):
        nearby, points, owners = _candidates(owned, positions, lattice, comm, list_cutoff)
        ids = np.concatenate((owned, nearby))
        points = np.concatenate((positions, points))
        edges = find_edges(points, ids, len(owned), lattice, list_cutoff)
        degree = np.bincount(edges.centre_row, minlength=len(owned))
        load = torch.tensor([[len(owned), len(edges)]], dtype=torch.int64, device="cpu")
        loads = comm.gather_rows(load).numpy()
    with times.measure("routing"):
        used = np.zeros(len(nearby), dtype=bool)
        used[edges.neighbour_row[edges.neighbour_row >= len(owned)] - len(owned)] = True
        ghosts = nearby[used]
        routing = build_routing(comm, owned, ghosts, owners[used], device)
        ghost_rows = routing.n_own_rows + np.cumsum(used) - 1
        rows = np.concatenate((np.arange(len(owned)), ghost_rows))
    return Domain(
        bricks=bricks,
        owned=owned,
        ghosts=ghosts,
        edge_centre=torch.from_numpy(edges.centre_row).to(device),
        edge_neighbour=torch.from_numpy(rows[edges.neighbour_row]).to(device),
        edge_shift=torch.from_numpy(edges.shift.astype(np.float64)).to(device),
        routing=routing,
        weights=1.0 + degree.astype(np.float64),
        owned_counts=loads[:, 0].copy(),
        edges_per_rank=loads[:, 1].copy(),
    )


def _candidates(
    owned: IntArray, positions: FloatArray, lattice: Lattice, comm: Communicator, reach: float
) -> tuple[IntArray, FloatArray, IntArray]:
    """Return ids, positions and owners of the others' atoms that may be near. Collective.

    Ordered by (owner, id).
    """
    box = Box.around(positions, lattice)
    mine = torch.from_numpy(np.stack((box.start, box.width))[None])
    boxes = [Box(start, width) for start, width in comm.gather_rows(mine).numpy()]
    near = [
        np.flatnonzero(other.near(positions, lattice, reach))
        if rank != comm.rank
        else np.zeros(0, dtype=np.int64)
        for rank, other in enumerate(boxes)
    ]
    rows = np.concatenate(near)
    # One message: an id is exact as a float64.
    sent = np.column_stack((owned[rows].astype(np.float64), positions[rows]))
    counts = [len(some) for some in near]
    arriving = comm.exchange_counts(counts)
    packed = comm.exchange_rows(torch.from_numpy(sent), counts, arriving).numpy()
    owners = np.repeat(np.arange(comm.size), arriving)
    return packed[:, 0].astype(np.int64), np.ascontiguousarray(packed[:, 1:]), owners


def decompose(
    positions: FloatArray,
    lattice: Lattice,
    comm: Communicator,
    *,
    cutoff: float,
    skin: float,
    previous: Domain | None,
    cut_axes: tuple[int, ...],
    device: torch.device,
    times: PhaseTimes,
) -> Decomposition:
    """Cut a system that every rank holds into domains. Collective.

    Every rank gives the same positions (and gets the same owners); only edges of owned centres
    are built.

    Parameters
    ----------
    positions : (n_atoms, 3) float64, Å
    lattice : Lattice
    comm : Communicator
    cutoff, skin : float, Å
        Edges shorter than ``cutoff + skin`` are listed.
    previous : Domain or None
        An earlier one of the same atoms, for its counted weights. None: equal weights, and where
        these turn out unbalanced a second cut with the counted ones.
    cut_axes : tuple of int
        Axes that may be cut.
    device : torch.device
        For the index tensors.
    times : PhaseTimes
        Gets the seconds of ``neighbours`` and ``routing``.
    """
    everybody = np.arange(len(positions), dtype=np.int64)
    ids = everybody[comm.rank :: comm.size] if previous is None else previous.owned
    weights = np.ones(len(ids)) if previous is None else previous.weights
    for attempt in range(2):
        with times.measure("neighbours"):
            bricks = bisect(positions[ids], ids, weights, lattice, comm, cut_axes=cut_axes)
            owners = bricks.owners(positions, everybody, lattice)
            owned = everybody[owners == comm.rank]
        domain = build_domain(
            bricks,
            owned,
            positions[owned],
            lattice,
            comm,
            list_cutoff=cutoff + skin,
            device=device,
            times=times,
        )
        if previous is not None or attempt or not domain.is_uneven:
            break
        ids, weights = domain.owned, domain.weights
    parts = {field.name: getattr(domain, field.name) for field in fields(domain)}
    return Decomposition(
        **parts,
        owners=owners,
        reference_positions=positions.copy(),
        list_range=ListRange(lattice, cutoff, skin),
    )
