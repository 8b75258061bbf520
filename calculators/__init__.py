"""The ASE calculator and one wrapper file per model family.

The folder stands at the top of the repository and is imported as ``nvdd_md.calculators``.
"""

if not __name__.startswith("nvdd_md."):
    raise ImportError(
        f"this package was imported as {__name__!r}; use 'import nvdd_md.calculators' instead. "
        "The folder at the top of the repository is part of nvdd_md and is not a package of its "
        "own: under a second name its classes would exist twice."
    )

from nvdd_md.calculators.calculator import DistributedCalculator, RankLoad
from nvdd_md.calculators.lennard_jones import LennardJones
from nvdd_md.calculators.registry import load_potential
from nvdd_md.calculators.two_hop import TwoHop

__all__ = ["DistributedCalculator", "LennardJones", "RankLoad", "TwoHop", "load_potential"]
