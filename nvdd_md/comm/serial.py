"""The communicator of one process."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from torch import Tensor

from nvdd_md.comm.communicator import Communicator

__all__ = ["SerialCommunicator"]

T = TypeVar("T")


class SerialCommunicator(Communicator):
    """One rank that is the whole group. Needs no message-passing library."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, job_size=1)

    def exchange_rows(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Return a copy of the rows."""
        n_rows = rows.shape[0]
        if list(send_counts) != [n_rows] or list(recv_counts) != [n_rows]:
            raise ValueError(
                f"one rank exchanges its {n_rows} rows with itself: both counts must be "
                f"[{n_rows}], got {list(send_counts)} and {list(recv_counts)}"
            )
        return rows.detach().clone()

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the one count."""
        if len(counts) != 1:
            raise ValueError(f"one rank needs one count, got {len(counts)}")
        return [int(counts[0])]

    def sum(self, x: Tensor) -> Tensor:
        """Return a copy."""
        return x.detach().clone()

    def gather_rows(self, rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return a copy."""
        if counts is not None and list(counts) != [rows.shape[0]]:
            raise ValueError(f"rank 0 has {rows.shape[0]} rows, counts say {list(counts)}")
        return rows.detach().clone()

    def gather_objects(self, obj: T) -> list[T]:
        """Return the object in a list."""
        return [obj]

    def broadcast_object(self, obj: T | None, root: int = 0) -> T:
        """Return the object."""
        if root != 0:
            raise ValueError(f"root {root} is not a rank of a group of 1")
        return obj  # type: ignore[return-value]  # the root's object is a T by contract

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def roll_call(self) -> "SerialCommunicator":
        """Return this communicator, at which everybody is present."""
        return self

    def missing(self) -> list[int]:
        """Return no rank."""
        return []

    @property
    def is_open(self) -> bool:
        """True."""
        return True

    def split(self, color: int | None, key: int = 0) -> "SerialCommunicator | None":
        """Return a new group of one, or None for no colour."""
        return None if color is None else SerialCommunicator()

    def abort(self, code: int = 1) -> NoReturn:
        """End this process at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
