"""The communicator's promises, written once for all backends on top of moving bytes.

A backend only moves contiguous one-dimensional ``uint8`` tensors. Shapes, dtypes, checks,
counting and the order of additions are here, so that they are the same under every backend.
"""

import pickle
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from nvdd_md.comm.communicator import Communicator

__all__ = ["Block", "ByteCommunicator"]

T = TypeVar("T")

# Up to here a sum is one gather of everything (one latency); above it, each rank adds one
# slice, so that memory and traffic stay proportional to the tensor, not to ranks x tensor.
SMALL_SUM_BYTES = 64 * 1024


class Block(NamedTuple):
    """The bytes ``start:stop`` of a buffer, for or from one other rank."""

    rank: int
    start: int
    stop: int


class ByteCommunicator(Communicator):
    """A communicator whose backend moves bytes.

    Backends implement ``_exchange``, ``_allgather``, ``_allgatherv``, ``_alltoall`` and
    ``_broadcast``; each has filled its receive tensor when it returns. Tensors are
    contiguous, one-dimensional, ``uint8``, on the CPU or a CUDA device.
    """

    # ---------------------------------------------------------------- what a backend provides

    @abstractmethod
    def _exchange(
        self, send: Tensor, outgoing: Sequence[Block], recv: Tensor, incoming: Sequence[Block]
    ) -> None:
        """Exchange blocks with other ranks; all of them are non-empty."""

    @abstractmethod
    def _allgather(self, send: Tensor, recv: Tensor) -> None:
        """Gather equal blocks: ``recv`` is ``size`` times as long as ``send``."""

    @abstractmethod
    def _allgatherv(self, send: Tensor, recv: Tensor, recv_bytes: Sequence[int]) -> None:
        """Gather blocks of known lengths."""

    @abstractmethod
    def _alltoall(self, send: Tensor, recv: Tensor) -> None:
        """Exchange equal blocks between all ranks."""

    @abstractmethod
    def _broadcast(self, buffer: Tensor, root: int) -> None:
        """Overwrite ``buffer``, a CPU tensor, with the root's."""

    # ----------------------------------------------------------------------------------- rows

    def exchange_rows(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Send groups of rows to the ranks they are for. **Collective** among partners."""
        self._check_exchange(rows, send_counts, recv_counts)
        received = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        row_bytes = _row_bytes(rows)
        if row_bytes == 0:
            return received
        send, recv = as_bytes(rows), as_bytes(received)
        outgoing, own_out = self._blocks(send_counts, row_bytes)
        incoming, own_in = self._blocks(recv_counts, row_bytes)
        if own_in.stop > own_in.start:
            recv[own_in.start : own_in.stop] = send[own_out.start : own_out.stop]
        self.traffic.messages += len(outgoing)
        self.traffic.message_bytes += sum(block.stop - block.start for block in outgoing)
        if outgoing or incoming:
            with self._moving():
                self._exchange(send, outgoing, recv, incoming)
        return received

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send ``counts[r]`` to each rank r; return what each rank sent here. **Collective**."""
        if len(counts) != self.size:
            raise ValueError(f"{self._who()}: {self.size} counts expected, got {len(counts)}")
        send = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
        recv = torch.empty_like(send)
        self._count_collective(8 * self.size)
        with self._moving():
            self._alltoall(as_bytes(send), as_bytes(recv))
        return [int(n) for n in recv.tolist()]

    def gather_rows(self, rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' rows, in the order of the ranks. **Collective**."""
        n_rows = rows.shape[0]
        if counts is None:
            counts = [n_rows] * self.size
        elif len(counts) != self.size or counts[self.rank] != n_rows:
            raise ValueError(
                f"{self._who()} has {n_rows} rows of {self.size} ranks; counts say {list(counts)}"
            )
        gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
        send, recv = as_bytes(rows), as_bytes(gathered)
        self._count_collective(send.numel())
        with self._moving():
            if all(n == n_rows for n in counts):
                self._allgather(send, recv)
            else:
                row_bytes = _row_bytes(rows)
                self._allgatherv(send, recv, [n * row_bytes for n in counts])
        return gathered

    # ------------------------------------------------------------------------------------ sum

    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor over the ranks, with the same bits everywhere. **Collective**."""
        flat = x.detach().reshape(-1)
        if self.size == 1 or flat.numel() == 0:
            return flat.clone().reshape(x.shape)
        small = flat.numel() * flat.element_size() <= SMALL_SUM_BYTES
        total = self._sum_gathered(flat) if small else self._sum_by_slices(flat)
        return total.reshape(x.shape)

    def _sum_gathered(self, flat: Tensor) -> Tensor:
        """Gather all partial vectors and add them here."""
        return _add_in_order(self.gather_rows(flat).reshape(self.size, -1))

    def _sum_by_slices(self, flat: Tensor) -> Tensor:
        """Let each rank add one slice of the vector, then gather the slices."""
        slice_length = -(-flat.numel() // self.size)
        padded = flat.new_zeros(self.size * slice_length)
        padded[: flat.numel()] = flat
        partials = torch.empty_like(padded)
        self._count_collective(padded.numel() * padded.element_size())
        with self._moving():
            self._alltoall(as_bytes(padded), as_bytes(partials))
        own_slice = _add_in_order(partials.reshape(self.size, slice_length))
        return self.gather_rows(own_slice)[: flat.numel()]

    # -------------------------------------------------------------------------------- objects

    def gather_objects(self, obj: T) -> list[T]:
        """Return every rank's object, in the order of the ranks. Pickled. **Collective**."""
        payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        self._count_collective(8)
        self._count_collective(len(payload))
        with self._moving():
            return self._gather_pickled(payload)

    def _gather_pickled(self, payload: bytes) -> list[T]:
        """Gather byte strings and unpickle them, uncounted."""
        length = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        lengths = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._allgather(as_bytes(length), as_bytes(lengths))
        sizes = [int(n) for n in lengths.tolist()]
        gathered = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        self._allgatherv(_from_buffer(payload), gathered, sizes)
        joined = gathered.numpy().tobytes()
        ends = list(accumulate(sizes))
        return [pickle.loads(joined[end - n : end]) for n, end in zip(sizes, ends, strict=True)]

    def broadcast_object(self, obj: T | None, root: int = 0) -> T:
        """Return the object that ``root`` passed (others may pass None). **Collective**."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not a rank of a group of {self.size}")
        payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) if self.rank == root else b""
        self._count_collective(8 if self.rank == root else 0)
        self._count_collective(len(payload))
        length = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        with self._moving():
            self._broadcast(as_bytes(length), root)
            buffer = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            if self.rank == root:
                buffer = _from_buffer(payload)
            self._broadcast(buffer, root)
        received: T = pickle.loads(buffer.numpy().tobytes())
        return received

    # -------------------------------------------------------------------------------- helpers

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Count the seconds inside the ``with`` block as spent in messages."""
        self.check_usable()
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.give_up(f"a message was broken off ({type(error).__name__}: {error})")
            raise
        finally:
            self.traffic.seconds += time.perf_counter() - start

    def _count_collective(self, n_bytes: int) -> None:
        """Count one collective operation, unless this rank is alone."""
        if self.size > 1:
            self.traffic.collectives += 1
            self.traffic.collective_bytes += n_bytes

    def _blocks(self, counts: Sequence[int], row_bytes: int) -> tuple[list[Block], Block]:
        """Return the non-empty blocks of the other ranks, and this rank's own."""
        others: list[Block] = []
        own = Block(self.rank, 0, 0)
        start = 0
        for rank, count in enumerate(counts):
            block = Block(rank, start, start + count * row_bytes)
            start = block.stop
            if rank == self.rank:
                own = block
            elif count:
                others.append(block)
        return others, own

    def _check_exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> None:
        """Raise ValueError when counts and rows do not fit together."""
        if len(send_counts) != self.size or len(recv_counts) != self.size:
            raise ValueError(
                f"{self._who()}: one count per rank expected, got {len(send_counts)} to send "
                f"and {len(recv_counts)} to receive"
            )
        if min(send_counts) < 0 or min(recv_counts) < 0:
            raise ValueError(f"{self._who()}: negative counts in {send_counts} or {recv_counts}")
        if sum(send_counts) != rows.shape[0]:
            raise ValueError(
                f"{self._who()}: {rows.shape[0]} rows, but the send counts {list(send_counts)} "
                f"add up to {sum(send_counts)}"
            )
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise ValueError(
                f"{self._who()} sends itself {send_counts[self.rank]} rows and expects "
                f"{recv_counts[self.rank]}"
            )

    def _who(self) -> str:
        """Return this rank's name in messages."""
        return f"rank {self.rank} of {self.size}"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, ``(n_bytes,) uint8``: a view when it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # A tensor of one element may keep any stride; a byte view needs stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _row_bytes(rows: Tensor) -> int:
    """Return the bytes of one row."""
    return rows.shape[1:].numel() * rows.element_size()


def _from_buffer(payload: bytes) -> Tensor:
    """Return the bytes as a tensor (a copy: bytes are read-only, tensors are not)."""
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _add_in_order(partials: Tensor) -> Tensor:
    """Add ``(size, n)`` over its first axis, first rank first, in a wide dtype."""
    wide = torch.int64
    if partials.dtype.is_complex:
        wide = torch.complex128
    elif partials.dtype.is_floating_point:
        wide = torch.float64
    total = partials[0].to(wide, copy=True)
    for partial in partials[1:]:
        total += partial.to(wide)
    return total.to(partials.dtype)
