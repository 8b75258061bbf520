"""Equations of motion, one algorithm per file.

The folder stands at the top of the repository and is imported as ``nvdd_md.integrators``.
"""

if not __name__.startswith("nvdd_md."):
    raise ImportError(
        f"this package was imported as {__name__!r}; use 'import nvdd_md.integrators' instead. "
        "The folder at the top of the repository is part of nvdd_md and is not a package of its "
        "own: under a second name its classes would exist twice."
    )

from nvdd_md.integrators.langevin import Langevin
from nvdd_md.integrators.nose_hoover_chain import NoseHooverChain
from nvdd_md.integrators.runaway import Limits, RunawayError
from nvdd_md.integrators.schedule import Linear
from nvdd_md.integrators.simulation import Simulation
from nvdd_md.integrators.state import SimulationState
from nvdd_md.integrators.thermo import Thermo
from nvdd_md.integrators.thermostat import Thermostat
from nvdd_md.integrators.velocity_rescaling import VelocityRescaling
from nvdd_md.integrators.velocity_verlet import VelocityVerlet

__all__ = [
    "Langevin",
    "Limits",
    "Linear",
    "NoseHooverChain",
    "RunawayError",
    "Simulation",
    "SimulationState",
    "Thermo",
    "Thermostat",
    "VelocityRescaling",
    "VelocityVerlet",
]
