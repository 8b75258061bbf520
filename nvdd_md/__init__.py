"""Domain-decomposed molecular dynamics for torch potentials, driven from ASE.

The same script runs on one process or under ``mpirun -n 8``; the number of ranks never
changes the physics.
"""

from nvdd_md.output import print0, start_logging
from nvdd_md.version import __version__

__all__ = ["__version__", "print0", "start_logging"]
