"""The only place that talks to MPI or torch.distributed, and that knows how jobs are started.

Importing this package never starts MPI. In a job of several ranks it imports mpi4py, so that ASE
finds the ranks whichever of the two is used first.
"""

from nvdd_md.comm.ase_world import announce_mpi_to_ase, connect_ase_world
from nvdd_md.comm.communicator import Communicator, RollCall, Traffic
from nvdd_md.comm.detect import Launch, detect_launch
from nvdd_md.comm.errors import CommError, CommTimeoutError, LaunchError
from nvdd_md.comm.excepthook import install_excepthook
from nvdd_md.comm.launch import (
    DEFAULT_WATCHDOG_S,
    as_communicator,
    job_rank,
    world_communicator,
)
from nvdd_md.comm.resources import device_for, set_threads
from nvdd_md.comm.serial import SerialCommunicator

__all__ = [
    "DEFAULT_WATCHDOG_S",
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "Launch",
    "LaunchError",
    "RollCall",
    "SerialCommunicator",
    "Traffic",
    "as_communicator",
    "connect_ase_world",
    "detect_launch",
    "device_for",
    "install_excepthook",
    "job_rank",
    "set_threads",
    "world_communicator",
]

announce_mpi_to_ase()
