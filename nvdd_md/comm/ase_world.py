"""ASE's own idea of the ranks, ``ase.parallel.world``, made the same as ours."""

import logging
import sys
from contextlib import suppress
from importlib import import_module
from typing import cast

import ase.parallel
import numpy as np
import numpy.typing as npt
import torch

from nvdd_md.comm.communicator import Communicator
from nvdd_md.comm.detect import detect_launch
from nvdd_md.comm.serial import SerialCommunicator

__all__ = ["AseWorld", "announce_mpi_to_ase", "connect_ase_world"]

_log = logging.getLogger(__name__)

Array = npt.NDArray[np.generic]
Value = Array | complex


class AseWorld:
    """ASE's communicator methods over a :class:`Communicator`.

    ASE passes either scalars, which come back as results, or arrays, which are overwritten.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    def sum(self, a: Value, root: int = -1) -> Value | None:
        """Add over the ranks. **Collective**. Arrays in place; on ``root`` only if it is >= 0."""
        return self._reduce(a, root, np.add)

    def sum_scalar(self, a: Value, root: int = -1) -> Value | None:
        """Add a number over the ranks. **Collective**. Other ranks than ``root`` get their own."""
        return self._reduce(a, root, np.add)

    def product(self, a: Value, root: int = -1) -> Value | None:
        """Multiply over the ranks. **Collective**."""
        return self._reduce(a, root, np.multiply)

    def broadcast(self, a: Value, root: int) -> Value | None:
        """Send from ``root`` to all. **Collective**. Arrays are overwritten in place."""
        offered = a if self.rank == root else None
        received = cast(Value, self.comm.broadcast_object(offered, root))
        if not isinstance(a, np.ndarray):
            return received
        if self.rank != root:
            a[...] = received
        return None

    def barrier(self) -> None:
        """Wait for all ranks. **Collective**."""
        self.comm.barrier()

    def split(self, split_size: int | None = None) -> "AseWorld":
        """Divide into ``split_size`` groups of neighbouring ranks. **Collective**."""
        n_groups = split_size or self.size
        part = self.comm.split(int(self.rank // (self.size / n_groups)), self.rank)
        return AseWorld(cast(Communicator, part))  # every rank has a colour

    def abort(self, code: int) -> None:
        """End the job."""
        self.comm.abort(code)

    def _reduce(self, a: Value, root: int, operation: np.ufunc) -> Value | None:
        """Gather and combine in the order of the ranks."""
        parts = self.comm.gather_objects(a)
        if root not in (-1, self.rank):
            return None if isinstance(a, np.ndarray) else a
        total: Value = parts[0]
        for part in parts[1:]:
            total = operation(total, part)
        if not isinstance(a, np.ndarray):
            return total
        a[...] = total
        return None


def announce_mpi_to_ase() -> None:
    """Let ASE find MPI in a job of several ranks that an MPI launcher started.

    ASE takes MPI if ``mpi4py`` has been imported when its world is first used, by
    :func:`ase.io.read` for example. Importing the package does not start MPI; where it is not
    installed, :func:`~nvdd_md.comm.launch.world_communicator` says so later.
    """
    launch = detect_launch()
    if launch is not None and launch.launcher != "torchrun" and launch.size != 1:
        with suppress(ImportError):
            import_module("mpi4py")


def connect_ase_world(comm: Communicator) -> None:
    """Make ``ase.parallel.world`` the world that ``comm`` is part of.

    ASE decides at the first use of its world whether it is parallel: under torchrun, or when
    used before mpi4py is imported, every rank believes that it is alone and writes the same
    files. The world is all ranks of the job, also when ``comm`` has only some of them.
    **Collective** over the job.

    Parameters
    ----------
    comm : Communicator
        Any communicator of the job. A serial one changes nothing.
    """
    world = _ase_world_of(comm)
    if world is None:
        return
    earlier = ase.parallel.world.comm
    if earlier is not None:
        if earlier.size == world.size and earlier.rank == world.rank:
            return
        _log.warning(
            "ase.parallel.world was used before as rank %d of %d; it is now rank %d of %d. "
            "Files that ASE opened for writing before this may have been opened by every rank.",
            earlier.rank,
            earlier.size,
            world.rank,
            world.size,
        )
    ase.parallel.world.comm = world


def _ase_world_of(comm: Communicator) -> "ase.parallel.MPI4PY | AseWorld | None":
    """Return ASE's communicator for the job that ``comm`` belongs to."""
    if isinstance(comm, SerialCommunicator):
        return None
    mpi = sys.modules.get("nvdd_md.comm.mpi")
    if mpi is not None and isinstance(comm, mpi.MpiCommunicator):
        return ase.parallel.MPI4PY(mpi.MPI.COMM_WORLD)
    torch_dist = sys.modules.get("nvdd_md.comm.torch_dist")
    if torch_dist is not None and isinstance(comm, torch_dist.TorchCommunicator):
        return AseWorld(torch_dist.TorchCommunicator(torch.distributed.group.WORLD))
    return AseWorld(comm)
