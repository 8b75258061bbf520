"""The atoms that live on one rank: one declared list of per-atom fields, and how they move.

Whatever belongs to an atom is a field. Migration, checkpoints and gathering loop over the fields
and know nothing else about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.lattice import IntArray


@dataclass(frozen=True)
class Field:
    """One quantity of every atom.

    Attributes
    ----------
    name : str
    dtype : torch.dtype
    shape : tuple of int
        Of one atom's value.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Bytes of one atom."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


FIELDS = (
    Field("ids", torch.int64),
    Field("numbers", torch.int64),
    Field("masses", torch.float64),
    Field("positions", torch.float64, (3,)),
    Field("images", torch.int64, (3,)),
    Field("momenta", torch.float64, (3,)),
    Field("reference", torch.float64, (3,)),
    Field("weights", torch.float64),
)
"""What every simulation carries: ``masses`` in u, ``positions`` in Å inside the cell, ``images``
the lattice translations taken off them, ``momenta`` in ASE's units (sqrt(u·eV)), ``reference`` the
positions that the neighbour list was built from, ``weights`` the work of an atom."""

ARRAY_PREFIX = "array:"
"""In front of the names of fields that came as ``atoms.arrays``."""


@dataclass
class Particles:
    """The fields of this rank's atoms, in ascending order of ids.

    Attributes
    ----------
    columns : dict of str to (n_owned, *shape) tensor
        By the names of the fields.
    fields : tuple of Field
    """

    columns: dict[str, Tensor]
    fields: tuple[Field, ...] = field(default=FIELDS)

    def __len__(self) -> int:
        return len(self.columns["ids"])

    @property
    def ids(self) -> Tensor:
        """Atom ids, (n_owned,) int64, ascending."""
        return self.columns["ids"]

    @property
    def masses(self) -> Tensor:
        """Masses, (n_owned,) float64, u."""
        return self.columns["masses"]

    @property
    def positions(self) -> Tensor:
        """Positions, (n_owned, 3) float64, Å."""
        return self.columns["positions"]

    @property
    def momenta(self) -> Tensor:
        """Momenta, (n_owned, 3) float64, ASE's units."""
        return self.columns["momenta"]

    def moved(self, owners: IntArray, comm: Communicator) -> Particles:
        """Return the atoms that this rank owns from now on. Collective.

        Parameters
        ----------
        owners : (n_owned,) int64
            The new owner of each present atom.
        comm : Communicator
        """
        if comm.size == 1:
            return self
        leaving = torch.from_numpy(np.argsort(owners, kind="stable")).to(self.ids.device)
        counts = np.bincount(owners, minlength=comm.size).tolist()
        rows = pack([self.columns[item.name] for item in self.fields])[leaving]
        arrived = comm.exchange_rows(rows, counts, comm.exchange_counts(counts))
        ids = unpack(arrived, self.fields)["ids"]
        return Particles(unpack(arrived[torch.argsort(ids)], self.fields), self.fields)


def pack(columns: Sequence[Tensor]) -> Tensor:
    """Return columns (n, ...) side by side as bytes, (n, width) uint8."""
    n = len(columns[0])
    parts = []
    for column in columns:
        width = int(np.prod(column.shape[1:], dtype=np.int64)) * column.dtype.itemsize
        flat = column.contiguous().reshape(-1)
        flat = flat.as_strided(flat.shape, (1,))  # one element may keep any stride
        parts.append(flat.view(torch.uint8).reshape(n, width))
    return torch.cat(parts, 1)


def unpack(rows: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Return the columns of packed rows (n, width), by name."""
    columns: dict[str, Tensor] = {}
    start = 0
    for item in fields:
        part = rows[:, start : start + item.width].contiguous().reshape(-1)
        columns[item.name] = part.view(item.dtype).reshape(len(rows), *item.shape)
        start += item.width
    return columns


def scatter(
    columns: Mapping[str, Tensor] | None,
    fields: tuple[Field, ...],
    n_atoms: int,
    comm: Communicator,
) -> Particles:
    """Divide rank 0's columns (n_atoms, ...) evenly, in the order of ids. Collective.

    Parameters
    ----------
    columns : mapping of str to Tensor, or None on ranks above 0
    fields : tuple of Field
    n_atoms : int
    comm : Communicator
    """
    ends = [n_atoms * (rank + 1) // comm.size for rank in range(comm.size)]
    counts = np.diff([0, *ends]).tolist()
    nothing = [0] * comm.size
    incoming = [counts[comm.rank], *nothing[1:]]
    own: dict[str, Tensor] = {}
    for item in fields:  # one by one: rank 0 needs no second copy of everything
        full = (
            torch.zeros((0, *item.shape), dtype=item.dtype, device="cpu")
            if columns is None
            else columns[item.name]
        )
        own[item.name] = comm.exchange_rows(
            full.contiguous(), counts if comm.rank == 0 else nothing, incoming
        )
    return Particles(own, fields)


def gather_to_all(
    columns: Mapping[str, Tensor], ids: Tensor, counts: IntArray, comm: Communicator
) -> dict[str, Tensor]:
    """Return all ranks' columns by atom id, on every rank. Collective."""
    rows = pack([ids, *columns.values()]).cpu()
    return _by_id(comm.gather_rows(rows, counts.tolist()), columns)


def gather_to_root(
    columns: Mapping[str, Tensor], ids: Tensor, counts: IntArray, comm: Communicator
) -> dict[str, Tensor] | None:
    """Return all ranks' columns by atom id on rank 0, None elsewhere. Collective.

    Parameters
    ----------
    columns : mapping of str to (n_owned, ...) tensor
    ids : (n_owned,) int64
        The ids of all ranks together are 0 to n_atoms - 1.
    counts : (n_ranks,) int64
        Atoms of each rank.
    comm : Communicator
    """
    rows = pack([ids, *columns.values()]).cpu()
    to_root = [len(ids)] + [0] * (comm.size - 1)
    incoming = counts.tolist() if comm.rank == 0 else [0] * comm.size
    arrived = comm.exchange_rows(rows, to_root, incoming)
    return None if comm.rank else _by_id(arrived, columns)


def _by_id(rows: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unpack ids and columns such as those of ``like``, and sort them by id."""
    fields = [Field("ids", torch.int64)]
    fields += [Field(name, c.dtype, tuple(c.shape[1:])) for name, c in like.items()]
    by_id = torch.empty_like(rows)  # bytes, because torch indexes no unsigned integers
    by_id[unpack(rows, fields)["ids"]] = rows
    columns = unpack(by_id, fields)
    del columns["ids"]
    return columns
