"""The share of a node, GPUs and cores, that one rank takes."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from nvdd_md.comm.communicator import Communicator
from nvdd_md.comm.detect import detect_launch
from nvdd_md.comm.errors import LaunchError

__all__ = ["device_for", "set_threads"]


@dataclass(frozen=True)
class Seat:
    """What one rank sees of its node."""

    node: str
    cores: frozenset[int]
    gpus: tuple[str, ...]


_neighbours: "WeakKeyDictionary[Communicator, list[Seat]]" = WeakKeyDictionary()


def device_for(comm: Communicator, requested: str | torch.device | None = None) -> torch.device:
    """Choose the device this rank computes on. **Collective**, the first time.

    Parameters
    ----------
    comm : Communicator
        The ranks that share the nodes' GPUs.
    requested : str or torch.device, optional
        A device with its number, or "cpu", is taken as it is. "cuda" is the GPU with the
        number of the node-local rank, or the only one that the launcher lets this rank see.
        None is "cuda" where there is one, else "cpu".

    Raises
    ------
    LaunchError
        When there are fewer GPUs than ranks on this node, or none and one is asked for.
    """
    device = None if requested is None else torch.device(requested)
    if device is not None and (device.type != "cuda" or device.index is not None):
        return device
    seats = _node_seats(comm)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        if device is None:
            return torch.device("cpu")
        raise LaunchError(
            f"rank {comm.rank} of {comm.size}: device 'cuda' was asked for, but torch sees no "
            f"GPU on {socket.gethostname()}; ask for 'cpu', or check the driver and "
            "CUDA_VISIBLE_DEVICES"
        )
    if visible >= comm.local_size:
        return torch.device("cuda", comm.local_rank)
    # One GPU each, chosen by the launcher: all are number 0, but they are different devices.
    if visible == 1 and len({gpu for seat in seats for gpu in seat.gpus}) == len(seats):
        return torch.device("cuda", 0)
    raise LaunchError(
        f"rank {comm.rank} of {comm.size}: {comm.local_size} ranks on {socket.gethostname()}, "
        f"but only {visible} GPU(s) to see; start at most one rank per GPU, or pass a device "
        "with its number, such as 'cuda:0', to let ranks share one"
    )


def set_threads(comm: Communicator) -> int:
    """Give this rank its share of the cores, and return the number of torch's threads.

    **Collective**, the first time. The share is the cores that this process may run on,
    divided by the ranks on the node; when the launcher has bound the ranks to different
    cores, it is all of them. Nothing is changed for a single rank on a node, when
    ``OMP_NUM_THREADS`` is set (torchrun sets it to 1), or when the number of threads is none
    of those that torch starts with: then the user has chosen it.
    """
    seats = _node_seats(comm)
    launch = detect_launch()
    ranks_here = max(comm.local_size, (launch and launch.local_size) or 1)
    cores = os.sched_getaffinity(0)
    if ranks_here == 1 or os.environ.get("OMP_NUM_THREADS") or not _is_torch_default(cores):
        return torch.get_num_threads()
    bound = len(seats) == ranks_here and _disjoint([seat.cores for seat in seats])
    torch.set_num_threads(len(cores) if bound else max(1, len(cores) // ranks_here))
    return torch.get_num_threads()


def _node_seats(comm: Communicator) -> list[Seat]:
    """Return the seats of the ranks on this node. **Collective** the first time."""
    seats = _neighbours.get(comm)
    if seats is None:
        mine = Seat(socket.gethostname(), frozenset(os.sched_getaffinity(0)), _visible_gpus())
        seats = [seat for seat in comm.gather_objects(mine) if seat.node == mine.node]
        _neighbours[comm] = seats
    return seats


def _visible_gpus() -> tuple[str, ...]:
    """Return names of the GPUs this process sees that differ between devices of a node."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    )


def _disjoint(masks: list[frozenset[int]]) -> bool:
    """Return whether no core is in two masks."""
    return sum(map(len, masks)) == len(frozenset().union(*masks))


def _is_torch_default(cores: set[int]) -> bool:
    """Return whether torch's number of threads is one that it starts with by itself."""
    cpu_count = os.cpu_count() or 1
    every = frozenset(range(cpu_count))
    defaults = {len(cores), cpu_count, _physical(frozenset(cores)), _physical(every)}
    return torch.get_num_threads() in defaults


@cache
def _physical(cores: frozenset[int]) -> int:
    """Return the number of physical cores among hardware threads."""
    siblings = set()
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.exists() else str(core))
    return len(siblings)
