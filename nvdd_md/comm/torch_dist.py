"""The communicator over torch.distributed: NCCL for CUDA tensors, gloo for the rest.

**The NCCL paths have not yet been run on hardware.**
"""

import atexit
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from nvdd_md.comm.byte_communicator import Block, ByteCommunicator
from nvdd_md.comm.communicator import FORWARD_S, GroupState, usual_device
from nvdd_md.comm.errors import CommError, CommTimeoutError

__all__ = ["TorchCommunicator"]

_log = logging.getLogger(__name__)

TAG = 32002
POLL_S = 1e-3
WATCH_EVERY_S = 0.25

# Newer versions of torch rename it and warn about the old name.
_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class TorchCommunicator(ByteCommunicator):
    """A group of ranks of torch.distributed.

    Parameters
    ----------
    group : ProcessGroup, optional
        The ranks; None is the default group. **Collective** over the group the first time.

    Notes
    -----
    CUDA tensors are sent by NCCL, CPU tensors by gloo; a group that has only one of the two
    gets copies on the other device. A group made by :meth:`split` sends its messages over the
    group it was split from: torch.distributed can make a new gloo group only when all
    processes have made the same number of them before, which some ranks alone cannot know.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        members = _members_of(group)
        self._attach(members, members.global_ranks)

    def _attach(self, members: "_Members", global_ranks: list[int]) -> None:
        """Take over some ranks of a group, in this order."""
        self._members = members
        self._global_ranks = global_ranks
        self._is_whole_group = global_ranks == members.global_ranks
        nodes = [members.nodes[member] for member in global_ranks]
        rank = global_ranks.index(dist.get_rank())
        local = [r for r, node in enumerate(nodes) if node == nodes[rank]]
        super().__init__(
            rank, len(global_ranks), local.index(rank), len(local), dist.get_world_size()
        )
        self.device = members.device
        self.state = members.states.setdefault(tuple(global_ranks), GroupState())

    # -------------------------------------------------------------------------------- moving

    def _exchange(
        self, send: Tensor, outgoing: Sequence[Block], recv: Tensor, incoming: Sequence[Block]
    ) -> None:
        group, peers = self._members.group, self._global_ranks
        source, target = self._stage(send), self._stage(recv)
        operations = [
            dist.P2POp(dist.irecv, target[start:stop], peers[rank], group, TAG)
            for rank, start, stop in incoming
        ]
        operations += [
            dist.P2POp(dist.isend, source[start:stop], peers[rank], group, TAG)
            for rank, start, stop in outgoing
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _unstage(target, recv)

    def _allgather(self, send: Tensor, recv: Tensor) -> None:
        if not self._is_whole_group:
            self._allgatherv(send, recv, [send.numel()] * self.size)
        elif send.numel():
            source, target = self._stage(send), self._stage(recv)
            _all_gather(target, source, group=self._members.group)
            _unstage(target, recv)

    def _allgatherv(self, send: Tensor, recv: Tensor, recv_bytes: Sequence[int]) -> None:
        incoming, own = self._blocks(recv_bytes, 1)
        recv[own.start : own.stop] = send
        everything = [send.numel() if rank != self.rank else 0 for rank in range(self.size)]
        outgoing = [Block(rank, 0, n) for rank, n in enumerate(everything) if n]
        if outgoing or incoming:
            self._exchange(send, outgoing, recv, incoming)

    def _alltoall(self, send: Tensor, recv: Tensor) -> None:
        if send.numel() == 0:
            return
        if self._is_whole_group:
            source, target = self._stage(send), self._stage(recv)
            dist.all_to_all_single(target, source, group=self._members.group)
            _unstage(target, recv)
            return
        blocks, own = self._blocks([send.numel() // self.size] * self.size, 1)
        recv[own.start : own.stop] = send[own.start : own.stop]
        if blocks:
            self._exchange(send, blocks, recv, blocks)

    def _broadcast(self, buffer: Tensor, root: int) -> None:
        if buffer.numel() == 0 or self.size == 1:
            return
        if self._is_whole_group:
            staged = self._stage(buffer)
            dist.broadcast(staged, self._global_ranks[root], self._members.group)
            _unstage(staged, buffer)
        elif self.rank == root:
            others = [rank for rank in range(self.size) if rank != root]
            self._exchange(buffer, [Block(r, 0, buffer.numel()) for r in others], buffer, [])
        else:
            self._exchange(buffer, [], buffer, [Block(root, 0, buffer.numel())])

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy on the device that the group can send from."""
        if tensor.is_cuda:
            return tensor if self._members.sends_cuda else tensor.cpu()
        return tensor if self._members.sends_cpu else tensor.to(self._members.device)

    # ------------------------------------------------------------------------------- waiting

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Count the seconds inside the ``with`` block, and have them watched."""
        with super()._moving(), _lookout.watch("message", self.on_wait):
            yield

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. **Collective**."""
        self.check_usable()
        self._count_collective(0)
        if timeout_s is None:
            # Not dist.barrier(): with NCCL that is a kernel on some device.
            self._allgather(
                *(torch.zeros(n, dtype=torch.uint8, device="cpu") for n in (1, self.size))
            )
            return
        # Through the store, because a timeout inside gloo breaks all its connections.
        store = _get_default_store()
        keys = self._keys("barrier", self._members.next_epoch(("barrier", *self._global_ranks)))
        store.set(keys[self.rank], "here")
        started = time.perf_counter()
        while not store.check(keys):
            waited = time.perf_counter() - started
            if waited > timeout_s:
                missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
                raise CommTimeoutError(
                    f"{self._who()} waited {timeout_s:g} s in a barrier for rank(s) "
                    f"{', '.join(missing)} of this group; are they in a call that all ranks "
                    "must make, or did they stop?"
                )
            if self.on_wait is not None:
                self.on_wait("barrier", waited)
            time.sleep(POLL_S)

    def roll_call(self) -> "_RollCall":
        """Begin a call that all ranks must arrive at."""
        epoch = self._members.next_epoch(("roll", *self._global_ranks))
        return _RollCall(self.rank, lambda: self._keys("roll", epoch))

    @property
    def is_open(self) -> bool:
        """Whether torch.distributed still runs, with the same group, and can send CPU tensors.

        A group of NCCL alone cannot wait at the end of a program without its own time limit.
        """
        members = self._members
        return dist.is_initialized() and members.sends_cpu and members in _known.values()

    def _keys(self, purpose: str, epoch: int) -> list[str]:
        """Return names in the store, one per rank, for a purpose that has come up before."""
        ranks = ",".join(map(str, self._global_ranks))
        prefix = f"nvdd_md/{purpose}/{self._members.group.group_name}/{ranks}/{epoch}"
        return [f"{prefix}/{rank}" for rank in range(self.size)]

    # -------------------------------------------------------------------------------- groups

    def split(self, color: int | None, key: int = 0) -> "TorchCommunicator | None":
        """Divide the group. **Collective**."""
        wishes: list[tuple[int | None, int]] = self._gather_pickled(pickle.dumps((color, key)))
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (c, k) in enumerate(wishes) if c == color)
        child = TorchCommunicator.__new__(TorchCommunicator)
        child._attach(self._members, [self._global_ranks[rank] for _, rank in chosen])
        return child

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job, all ranks of the world, at once; standard output is flushed.

        Under an MPI launcher MPI ends it. Under torchrun this process ends with ``code`` and
        the launcher ends the others.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            time.sleep(FORWARD_S)
            mpi.COMM_WORLD.Abort(code)
        os._exit(code)


@dataclass
class _Members:
    """A process group and what was found out about it once.

    Communicators hold the group only through this, so that it can be taken from them.
    """

    group: dist.ProcessGroup
    sends_cpu: bool
    sends_cuda: bool
    global_ranks: list[int]
    nodes: dict[int, str]
    device: torch.device
    epochs: Counter[tuple[str | int, ...]] = field(default_factory=Counter)
    states: dict[tuple[int, ...], GroupState] = field(default_factory=dict)

    def next_epoch(self, use: tuple[str | int, ...]) -> int:
        """Return how often this has been called for a purpose and some ranks."""
        self.epochs[use] += 1
        return self.epochs[use]


class _RollCall:
    """One roll call, through the store: messages cannot be sent while a collective waits."""

    def __init__(self, rank: int, make_keys: Callable[[], list[str]]) -> None:
        self._rank, self._make_keys = rank, make_keys
        self._absent: dict[int, str] | None = None

    def missing(self) -> list[int]:
        """Let the other ranks know of this one; return those that have not done so yet."""
        store = _get_default_store()
        if self._absent is None:
            self._absent = dict(enumerate(self._make_keys()))
            store.set(self._absent[self._rank], "here")
        self._absent = {rank: key for rank, key in self._absent.items() if not store.check([key])}
        return list(self._absent)


class _Lookout:
    """A thread that calls ``on_wait`` while this rank waits inside torch.distributed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: tuple[str, float, Callable[[str, float], None]] | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, what: str, on_wait: Callable[[str, float], None] | None) -> Iterator[None]:
        """Have ``on_wait`` called for as long as the ``with`` block lasts."""
        if on_wait is None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvdd_md lookout", daemon=True)
            self._thread.start()
        with self._changed:
            self._watched = (what, time.perf_counter(), on_wait)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched = None

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._watched is None:
                    self._changed.wait()
                what, started, on_wait = self._watched
            try:
                on_wait(what, time.perf_counter() - started)
            except Exception:  # the thread must live on for later waits
                _log.exception("watching a wait failed")
            time.sleep(WATCH_EVERY_S)


_lookout = _Lookout()


# By name, for as long as torch.distributed runs.
_known: dict[str, _Members] = {}


def forget_groups() -> None:
    """Drop all references to process groups, before torch.distributed is shut down.

    A group that outlives the shutdown, in some variable of the program, can crash the
    interpreter at its end: gloo's threads must be joined while Python is still there.
    """
    for members in _known.values():
        del members.group
    _known.clear()


def _members_of(group: dist.ProcessGroup | None) -> _Members:
    """Return what is known of a group, found out at its first use. **Collective** then."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise CommError("torch.distributed is not initialised: call init_process_group first")
    known = _known.get(group.group_name)
    if known is not None and known.group is group:
        return known
    ranks = list(dist.get_process_group_ranks(group))
    config = dist.get_backend_config(group)
    has_nccl = "nccl" in config and torch.cuda.is_available()
    names = [""] * len(ranks)
    dist.all_gather_object(names, socket.gethostname(), group)
    nodes = dict(zip(ranks, names, strict=True))
    device = _device_in(group, nodes)
    if has_nccl:
        # NCCL's first operation connects the ranks: it must not be between a few of them.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    members = _Members(group, "cpu:" in config, has_nccl, ranks, nodes, device)
    if not _known:
        atexit.register(forget_groups)
    _known[group.group_name] = members
    return members


def _device_in(group: dist.ProcessGroup, nodes: dict[int, str]) -> torch.device:
    """Return the device the group is bound to, else the usual one of this local rank."""
    if group.bound_device_id is not None:
        return torch.device(group.bound_device_id)
    me = dist.get_rank()
    local = [rank for rank, node in nodes.items() if node == nodes[me]]
    return usual_device(local.index(me), len(local))


def _unstage(staged: Tensor, tensor: Tensor) -> None:
    """Copy what arrived to where it belongs, when it is not there already."""
    if staged is not tensor:
        tensor.copy_(staged)
