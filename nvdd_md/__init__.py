"""Domain-decomposed molecular dynamics for torch potentials, driven from ASE.

The same script runs on one process or under ``mpirun -n 8``; the number of ranks never
changes the physics.
"""

__version__ = "0.1.0"
