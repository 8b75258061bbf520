"""Starting torch.distributed for a job that has not done so itself."""

import atexit
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from nvdd_md.comm.communicator import Communicator
from nvdd_md.comm.detect import Launch
from nvdd_md.comm.errors import LaunchError
from nvdd_md.comm.torch_dist import forget_groups

__all__ = ["start_from_environment", "start_through"]

# torch.distributed gives up after this; waiting ranks are the watchdog's business, not its.
TIMEOUT = timedelta(days=2)


def start_from_environment(launch: Launch) -> None:
    """Start with the addresses that torchrun has put into the environment. **Collective**."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(
            f"{launch.launcher} started {launch.size} ranks (this is rank {launch.rank}), but "
            f"{' and '.join(missing)} is not set: torch.distributed cannot find rank 0"
        )
    _start(None, launch.rank, launch.size or 1, launch.local_rank or 0)


def start_through(world: Communicator) -> None:
    """Start with the ranks of another communicator, which passes the address. **Collective**."""
    store: Store
    if world.size == 1:
        store = HashStore()
    elif world.rank == 0:
        address = "127.0.0.1" if world.local_size == world.size else _own_address()
        # Port 0: the system picks a free one, and nobody can take it in between.
        master = TCPStore(address, 0, world.size, is_master=True, wait_for_workers=False)
        world.broadcast_object((address, master.port))
        store = master
    else:
        address, port = world.broadcast_object(("", 0))
        store = TCPStore(address, port, world.size, is_master=False)
    _start(store, world.rank, world.size, world.local_rank)


def _start(store: Store | None, rank: int, size: int, local_rank: int) -> None:
    """Call init_process_group with NCCL and gloo where there are GPUs, else with gloo."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        # NCCL's connections are made on the current device.
        torch.cuda.set_device(local_rank if torch.cuda.device_count() > local_rank else 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    atexit.register(_stop)


def _stop() -> None:
    """Close torch.distributed in order: its threads do not survive the interpreter's end."""
    forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_address() -> str:
    """Return an address of this node that other nodes can reach."""
    given = os.environ.get("MASTER_ADDR")
    if given:
        return given
    # No packet is sent: this asks which local address faces the outside. A host's own name
    # often resolves to a loopback address, which other nodes cannot reach.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.getfqdn()
        return str(probe.getsockname()[0])
