"""The communicator over MPI, through mpi4py. Importing this module initialises MPI.

Tensors on the CPU are sent and received in place. Tensors on a CUDA device are staged
through pinned host memory, or handed to MPI directly when the environment variable
``NVDD_MD_CUDA_AWARE_MPI=1`` says that the MPI library can take device pointers.
**The CUDA paths have not yet been run on hardware.**

Note [Waiting]: MPI libraries wait by spinning, which ruins a machine with more ranks than
cores and keeps Ctrl-C from being seen. All waiting is therefore done here, in one place,
:meth:`MpiCommunicator._wait`: it tests non-blocking operations, spins shortly for the sake of
latency, then gives the core away between tests, and sleeps between them when the wait is long.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nvdd_md.comm.byte_communicator import Block, ByteCommunicator
from nvdd_md.comm.communicator import FORWARD_S, GroupState
from nvdd_md.comm.errors import CommError, CommTimeoutError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py wheels raise RuntimeError without libmpi
    raise ImportError(
        f"nvdd_md.comm.mpi needs mpi4py and an MPI library it can load ({error}); install "
        "them with 'pip install mpi4py mpich', or build mpi4py with the cluster's own MPI"
    ) from error

__all__ = ["MpiCommunicator"]

_log = logging.getLogger(__name__)

BARRIER_TAG = 32001  # MPI guarantees tags up to 32767
ROWS_TAG = 32002
ROLL_TAG = 32003

SPIN_TESTS = 5  # more only keeps a core from a rank that needs it, when ranks share cores
YIELD_S = 2e-3  # after that long the others are computing, not communicating
SLEEP_S = 50e-6
LONG_SLEEP_S = 1e-3
LONG_WAIT_S = 1.0
WATCH_EVERY_S = 0.05

# Operations that were given up. Their buffers live as long as these objects.
_unfinished: list[MPI.Request] = []

HostBuffer = npt.NDArray[np.uint8]


class MpiCommunicator(ByteCommunicator):
    """A group of MPI ranks, with messages that no other user of MPI can receive.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The caller's communicator. It is duplicated once, on first use, and the duplicate is
        kept with it: any number of these objects cost one MPI context. **Collective**.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._attach(_private_copy(comm), owned=False)

    def _attach(self, private: "_PrivateCopy", *, owned: bool) -> None:
        """Take over a private MPI communicator."""
        self._private = private
        self._mpi = private.comm
        self._owned = owned
        self._cuda_aware = os.environ.get("NVDD_MD_CUDA_AWARE_MPI") == "1"
        super().__init__(
            private.comm.rank,
            private.comm.size,
            private.local_rank,
            private.local_size,
            MPI.COMM_WORLD.size,
        )
        self.state = private.state

    # -------------------------------------------------------------------------------- moving

    def _exchange(
        self, send: Tensor, outgoing: Sequence[Block], recv: Tensor, incoming: Sequence[Block]
    ) -> None:
        source, target, finish = self._buffers(send, recv)
        comm = self._mpi
        # Receives first: messages that arrive then go straight to their place.
        requests = [
            comm.Irecv([target[start:stop], MPI.BYTE], rank, ROWS_TAG)
            for rank, start, stop in incoming
        ]
        requests += [
            comm.Isend([source[start:stop], MPI.BYTE], rank, ROWS_TAG)
            for rank, start, stop in outgoing
        ]
        self._wait(requests, "row exchange")
        finish()

    def _allgather(self, send: Tensor, recv: Tensor) -> None:
        source, target, finish = self._buffers(send, recv)
        request = self._mpi.Iallgather([source, MPI.BYTE], [target, MPI.BYTE])
        self._wait([request], "gather")
        finish()

    def _allgatherv(self, send: Tensor, recv: Tensor, recv_bytes: Sequence[int]) -> None:
        source, target, finish = self._buffers(send, recv)
        request = self._mpi.Iallgatherv([source, MPI.BYTE], [target, list(recv_bytes), MPI.BYTE])
        self._wait([request], "gather")
        finish()

    def _alltoall(self, send: Tensor, recv: Tensor) -> None:
        source, target, finish = self._buffers(send, recv)
        request = self._mpi.Ialltoall([source, MPI.BYTE], [target, MPI.BYTE])
        self._wait([request], "all-to-all")
        finish()

    def _broadcast(self, buffer: Tensor, root: int) -> None:
        self._wait([self._mpi.Ibcast([buffer.numpy(), MPI.BYTE], root)], "broadcast")

    def _buffers(
        self, send: Tensor, recv: Tensor
    ) -> "tuple[HostBuffer | Tensor, HostBuffer | Tensor, Callable[[], object]]":
        """Return what MPI reads, what it writes, and what to call when it has."""
        if not send.is_cuda:
            return send.numpy(), recv.numpy(), _nothing
        if self._cuda_aware:
            torch.cuda.current_stream(send.device).synchronize()
            return send, recv, _nothing
        staged_send = torch.empty(send.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        staged_send.copy_(send)
        # The receive buffer is staged with its content: this rank's own block is in it.
        staged_recv = torch.empty(recv.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        staged_recv.copy_(recv)
        return staged_send.numpy(), staged_recv.numpy(), lambda: recv.copy_(staged_recv)

    # ------------------------------------------------------------------------------- waiting

    def _wait(
        self, requests: list[MPI.Request], what: str, deadline_s: float | None = None
    ) -> bool:
        """Wait for MPI requests; False when ``deadline_s`` seconds passed. See Note [Waiting]."""
        try:
            for _ in range(SPIN_TESTS):
                if MPI.Request.Testall(requests):
                    return True
            return self._wait_long(requests, what, deadline_s)
        except BaseException as error:  # a watchdog, or Ctrl-C
            # MPI may still write into their buffers, which must not be freed.
            _unfinished.extend(requests)
            if deadline_s is None:
                self.give_up(f"a {what} was given up ({type(error).__name__})")
            raise

    def _wait_long(self, requests: list[MPI.Request], what: str, deadline_s: float | None) -> bool:
        """Wait without keeping the core."""
        started = time.perf_counter()
        watched = started
        while not MPI.Request.Testall(requests):
            now = time.perf_counter()
            waited = now - started
            if deadline_s is not None and waited > deadline_s:
                return False
            if self.on_wait is not None and now - watched > WATCH_EVERY_S:
                watched = now
                self.on_wait(what, waited)
            _pause(waited)
        return True

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. **Collective**."""
        self.check_usable()
        self._count_collective(0)
        if timeout_s is None:
            self._wait([self._mpi.Ibarrier()], "barrier")
            return
        others = [rank for rank in range(self.size) if rank != self.rank]
        nothing = bytearray()
        notices = [self._mpi.Isend([nothing, MPI.BYTE], rank, BARRIER_TAG) for rank in others]
        arrivals = [self._mpi.Irecv([nothing, MPI.BYTE], rank, BARRIER_TAG) for rank in others]
        arrived = self._wait(arrivals, "barrier", timeout_s)
        pairs = zip(others, arrivals, strict=True)
        missing = [] if arrived else [rank for rank, request in pairs if not request.Test()]
        # Receives of late notices stay posted: messages between two ranks keep their order, so
        # a late notice completes the receive it is meant for and no later one.
        _unfinished[:] = [r for r in (*_unfinished, *notices, *arrivals) if not r.Test()]
        if missing:
            raise CommTimeoutError(
                f"{self._who()} waited {timeout_s:g} s in a barrier for rank(s) "
                f"{', '.join(map(str, missing))} of this group; are they in a call that all "
                "ranks must make, or did they stop?"
            )

    def roll_call(self) -> "_RollCall":
        """Begin a call that all ranks must arrive at."""
        self._private.rolls += 1
        return _RollCall(self._private)

    @property
    def is_open(self) -> bool:
        """Whether MPI still runs and has this group."""
        return not MPI.Is_finalized() and self._mpi != MPI.COMM_NULL

    # -------------------------------------------------------------------------------- groups

    def split(self, color: int | None, key: int = 0) -> "MpiCommunicator | None":
        """Divide the group. **Collective**."""
        # MPI's split waits by spinning: let all ranks arrive first.
        self._wait([self._mpi.Ibarrier()], "split")
        group = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        child = MpiCommunicator.__new__(MpiCommunicator)
        child._attach(_PrivateCopy.of(group), owned=True)
        return child

    def close(self) -> None:
        """Free a group made by :meth:`split`; nothing for others. **Collective** then."""
        if self._owned and self.is_open:
            self._mpi.Free()

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job, all ranks of the world, at once; standard output is flushed."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(FORWARD_S)
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)  # MPICH's Abort may return before the launcher has killed this process


@dataclass
class _PrivateCopy:
    """A communicator that only this package uses, and the place of this rank on its node.

    ``rolls`` counts the roll calls begun here, ``announced`` has the last one that each other
    rank is known to have reached.
    """

    comm: MPI.Comm
    local_rank: int
    local_size: int
    rolls: int = 0
    announced: dict[int, int] = field(default_factory=dict)
    state: GroupState = field(default_factory=GroupState)

    @classmethod
    def of(cls, comm: MPI.Comm) -> "_PrivateCopy":
        """Find the place on the node. **Collective**."""
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        copy = cls(comm, node.rank, node.size)
        node.Free()
        return copy


class _RollCall:
    """One roll call: small messages with its number, read only by ranks that wait."""

    def __init__(self, private: _PrivateCopy) -> None:
        self._private = private
        self._number = private.rolls
        self._told = False

    def missing(self) -> list[int]:
        """Let the other ranks know of this one; return those that have not done so yet."""
        comm = self._private.comm
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        if not self._told:
            self._told = True
            notice = np.array([self._number], dtype=np.int64)
            _unfinished.extend(comm.Isend([notice, MPI.INT64_T], r, ROLL_TAG) for r in others)
        status = MPI.Status()
        while comm.Iprobe(MPI.ANY_SOURCE, ROLL_TAG, status):
            number = np.empty(1, dtype=np.int64)
            comm.Recv([number, MPI.INT64_T], status.source, ROLL_TAG)
            self._private.announced[status.source] = int(number[0])
        return [r for r in others if self._private.announced.get(r) != self._number]


def _free_copy(_comm: MPI.Comm, _keyval: int, copy: _PrivateCopy) -> None:
    """Free the duplicate when MPI drops the caller's communicator."""
    if not MPI.Is_finalized() and copy.comm != MPI.COMM_NULL:
        copy.comm.Free()


_COPY_KEY = MPI.Comm.Create_keyval(delete_fn=_free_copy)


def _private_copy(comm: MPI.Comm) -> _PrivateCopy:
    """Return the duplicate kept with a caller's communicator. **Collective** the first time."""
    if comm == MPI.COMM_NULL:
        raise CommError(
            "this rank got MPI.COMM_NULL: it is not a member of the communicator, so it must "
            "not make a calculator on it"
        )
    if comm.Is_inter():
        raise CommError("an MPI intercommunicator was given; merge it first: comm.Merge()")
    kept = comm.Get_attr(_COPY_KEY)
    if isinstance(kept, _PrivateCopy):
        return kept
    _require_threads()
    duplicate, request = comm.Idup()
    started = time.perf_counter()
    while not request.Test():
        _pause(time.perf_counter() - started)
    copy = _PrivateCopy.of(duplicate)
    comm.Set_attr(_COPY_KEY, copy)
    return copy


def _require_threads() -> None:
    """Check that MPI may be called from autograd's thread, where CUDA backward passes run."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise CommError(
            "MPI was initialised without thread support (MPI_Query_thread = "
            f"{MPI.Query_thread()}), but backward passes communicate from another thread; "
            "leave mpi4py.rc.thread_level at 'multiple' before mpi4py.MPI is imported"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        _log.warning("MPI offers only serialised threads: other threads must not call it")


def _pause(waited_s: float) -> None:
    """Give the core away, the longer the wait the longer."""
    if waited_s < YIELD_S:
        os.sched_yield()
    else:
        time.sleep(SLEEP_S if waited_s < LONG_WAIT_S else LONG_SLEEP_S)


def _nothing() -> None:
    """Finish nothing: MPI wrote into the tensor itself."""
