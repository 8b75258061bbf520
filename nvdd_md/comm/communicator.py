"""What the package asks of a message-passing library, and what it counts.

Everything above this package sees ranks only through :class:`Communicator`. Rows travel as
bytes, so every dtype works on every backend and arrives bit by bit as it was sent. Nothing
here records autograd history: the differentiable exchanges are built on top.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import NoReturn, Protocol, Self, TypeVar

import torch
from torch import Tensor

from nvdd_md.comm.errors import CommError

__all__ = ["Communicator", "GroupState", "RollCall", "Traffic", "usual_device"]

T = TypeVar("T")

FORWARD_S = 0.2
"""Seconds before an abort: MPICH's launcher drops output that it has not forwarded by then."""


@dataclass
class Traffic:
    """What this rank has sent. One rank alone sends nothing and counts nothing.

    Attributes
    ----------
    messages : int
        Point-to-point messages to *other* ranks.
    message_bytes : int
        Bytes in those messages.
    collectives : int
        Collective operations joined (a large :meth:`Communicator.sum` is two, an object
        gather or broadcast is two: lengths, then bytes).
    collective_bytes : int
        Bytes this rank put into them (the size of its send buffers).
    seconds : float
        Time inside calls that move rows, waiting for other ranks included. Two counts are equal
        whatever this is.
    """

    messages: int = 0
    message_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)

    def reset(self) -> None:
        """Set every counter to zero."""
        for counter in fields(self):
            setattr(self, counter.name, counter.default)

    def snapshot(self) -> "Traffic":
        """Return a copy that later traffic does not change."""
        return replace(self)

    def __add__(self, other: "Traffic") -> "Traffic":
        """Return the traffic of both."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Traffic(*(mine + theirs for mine, theirs in pairs))

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """Return the traffic between two snapshots."""
        pairs = ((getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self))
        return Traffic(*(now - then for now, then in pairs))


@dataclass
class GroupState:
    """What all communicators of one process that stand for the same ranks share.

    Attributes
    ----------
    once : set of str
        What has been done for this group.
    given_up : str or None
        Why this rank can no longer communicate in the group.
    """

    once: set[str] = field(default_factory=set)
    given_up: str | None = None


class RollCall(Protocol):
    """Who has arrived at one call that all ranks must make."""

    def missing(self) -> list[int]:
        """Let the other ranks know of this one; return those that have not done so yet.

        Waits for nobody and may be called again. Safe in the thread that calls ``on_wait``.
        """


class Communicator(ABC):
    """A group of ranks that compute one system together.

    Tensors may live on the CPU or on a CUDA device; results come back on the device of the
    input. All methods marked **Collective** must be called by all ranks, in the same order.

    Attributes
    ----------
    rank, size : int
        This process's number in the group, and how many there are.
    local_rank, local_size : int
        The same among the group's ranks on this node.
    device : torch.device
        Where tensors for exchange normally live. Informational.
    job_size : int
        Ranks of the whole job, those outside of this group included.
    traffic : Traffic
        Counters of what this rank has sent.
    state : GroupState
        Shared by all objects of this process that stand for the same group.
    on_wait : callable or None
        Called now and then with ``(what, waited_s)`` while a call waits for other ranks, for
        watchdogs. Over MPI it may raise: the wait is then given up, and the communicator with it,
        except in a timed :meth:`barrier`, after which it can still be used. Over
        torch.distributed it is called in another thread, and must not raise.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job_size: int
    device: torch.device
    traffic: Traffic
    state: GroupState
    on_wait: Callable[[str, float], None] | None

    def __init__(
        self, rank: int, size: int, local_rank: int, local_size: int, job_size: int
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.job_size = job_size
        self.device = usual_device(local_rank, local_size)
        self.traffic = Traffic()
        self.state = GroupState()
        self.on_wait = None

    @property
    def given_up(self) -> str | None:
        """Why this rank can no longer communicate in this group, or None.

        It has left a call that other ranks may still be in, so that messages would reach the wrong
        one.
        """
        return self.state.given_up

    def give_up(self, reason: str) -> None:
        """Refuse later calls in this group, with the first reason given."""
        self.state.given_up = self.state.given_up or reason

    @abstractmethod
    def exchange_rows(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Send groups of rows to the ranks they are for. **Collective** among partners.

        A message passes only between two ranks with a non-zero count, so a rank whose counts
        are all zero sends nothing and waits for nobody. The part for this rank itself is
        copied locally and not counted as traffic.

        Parameters
        ----------
        rows : Tensor, (sum(send_counts), ...)
            Rows ordered by destination rank; any dtype, any trailing shape.
        send_counts, recv_counts : sequence of int, length ``size``
            Rows for each rank, rows from each rank. What one rank sends the other expects.

        Returns
        -------
        Tensor, (sum(recv_counts), ...)
            Rows ordered by source rank.

        Raises
        ------
        ValueError
            When counts and rows do not fit together on this rank.
        """

    @abstractmethod
    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send ``counts[r]`` to each rank r; return what each rank sent here. **Collective**."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor over the ranks, with the same bits everywhere. **Collective**.

        Elements are added in the order of the ranks, in float64 for floating dtypes and in
        int64 for integers, then cast back; ``bool`` gives "any". The result does not depend
        on which algorithm the size selects.

        Parameters
        ----------
        x : Tensor, (...)
            Same shape and dtype on every rank.

        Returns
        -------
        Tensor, (...)
            A new tensor of the same shape and dtype.
        """

    @abstractmethod
    def gather_rows(self, rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' rows, in the order of the ranks. **Collective**, one operation.

        Parameters
        ----------
        rows : Tensor, (counts[rank], ...)
            This rank's rows.
        counts : sequence of int, length ``size``, optional
            Rows of each rank. None: every rank has as many as this one.

        Returns
        -------
        Tensor, (sum(counts), ...)
        """

    @abstractmethod
    def gather_objects(self, obj: T) -> list[T]:
        """Return every rank's object, in the order of the ranks. Pickled. **Collective**."""

    @abstractmethod
    def broadcast_object(self, obj: T | None, root: int = 0) -> T:
        """Return the object that ``root`` passed (others may pass None). **Collective**."""

    @abstractmethod
    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. **Collective**.

        All ranks pass a limit or none does; the limits may differ. After a timeout the
        communicator can still be used, also by the late rank, which finds the others' notices.

        Raises
        ------
        CommTimeoutError
            After ``timeout_s`` seconds, with the ranks that have not arrived.
        """

    @abstractmethod
    def roll_call(self) -> RollCall:
        """Begin a call that all ranks must arrive at. Every rank does so in the same order."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the message-passing library still runs and has this group."""

    def check_usable(self) -> None:
        """Check that this rank has not given up the communicator.

        Raises
        ------
        CommError
            If it has.
        """
        if self.given_up is not None:
            raise CommError(
                f"rank {self.rank} of {self.size} can no longer communicate: {self.given_up}"
            )

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Divide the group. **Collective**.

        Parameters
        ----------
        color : int >= 0 or None
            Ranks with the same colour form a new group. None: in no group.
        key : int
            Order in the new group; equal keys keep the order they have here.
        """

    @abstractmethod
    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job, all ranks of the world, at once; standard output is flushed."""

    def close(self) -> None:  # noqa: B027 - most backends hold nothing that needs closing
        """Release what this object holds. **Collective** for groups made by :meth:`split`."""

    def __enter__(self) -> Self:
        """Return the communicator itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, unless an error is on its way: other ranks may not come to close then."""
        if error is None:
            self.close()

    def __repr__(self) -> str:
        """Return class, rank and size."""
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, {self.device}>"


def usual_device(local_rank: int, local_size: int) -> torch.device:
    """Return the GPU with the number of the local rank where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible >= local_size:
        return torch.device("cuda", local_rank)
    return torch.device("cuda", 0) if visible == 1 else torch.device("cpu")
