"""What is measured: models, structures, sizes, and the runs of one round.

Each case measures everything (R1, R2, R3, R8, R9), because its ratios share their runs: both real
models, in float32 and float64, on three structures; three rounds where a round is short, two where
it takes minutes. Lennard-Jones is there because its model costs next to nothing, so that everything
else shows; it has no R8 and R9, which are about real models.

Sizes: one rank's *share* has 512 atoms (525 in water), the *whole* system of two ranks twice as
many, 43 Å long and cut in the middle, with fewer ghosts than owned atoms even at MACE's 6 Å.
"""

from dataclasses import dataclass, replace

from benchmarks.systems import Repeat

EVERYTHING = ("R1", "R2", "R3", "R8", "R9")

TINY: Repeat = (1, 1, 1)

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Model:
    """A model, and what its own ASE calculator is called."""

    title: str
    own_calculator: str


MODELS = {
    "lj": Model("Lennard-Jones", "ASE's LennardJones"),
    "sevennet": Model("SevenNet-0", "SevenNetCalculator"),
    "mace": Model("MACE full size", "MACECalculator"),
}

TITLES = {
    "crystal": "silicon crystal",
    "water": "water-like liquid",
    "slab": "silicon slab in half a cell",
    "argon": "argon crystal",
}


@dataclass(frozen=True)
class Case:
    """One model on one structure.

    Attributes
    ----------
    model, dtype, structure : str
        Names in ``MODELS``, ``DTYPES`` and ``TITLES``.
    share, whole : tuple of int
        Cells along each axis of one rank's share, and of the system of two ranks.
    steps : int
        Timed steps of each run.
    rounds : int
    ids : tuple of str
        What is measured.
    """

    model: str
    dtype: str
    structure: str
    share: Repeat
    whole: Repeat
    steps: int
    rounds: int
    ids: tuple[str, ...] = EVERYTHING

    @property
    def title(self) -> str:
        """Name of the case in the table."""
        return f"{MODELS[self.model].title} {self.dtype}, {TITLES[self.structure]}"

    def quick(self) -> "Case":
        """Return the same case with few atoms, one step and one round."""
        return replace(self, share=(2, 2, 2), whole=(4, 2, 2), steps=1, rounds=1)


SILICON: tuple[Repeat, Repeat] = (4, 4, 4), (8, 4, 4)
WATER: tuple[Repeat, Repeat] = (7, 5, 5), (14, 5, 5)
ARGON: tuple[Repeat, Repeat] = (10, 10, 10), (20, 10, 10)

CASES = (
    Case("lj", "float64", "argon", *ARGON, steps=10, rounds=3, ids=("R1", "R2", "R3")),
    Case("sevennet", "float32", "crystal", *SILICON, steps=3, rounds=3),
    Case("sevennet", "float32", "water", *WATER, steps=3, rounds=2),
    Case("sevennet", "float32", "slab", *SILICON, steps=3, rounds=3),
    Case("sevennet", "float64", "crystal", *SILICON, steps=2, rounds=2),
    Case("sevennet", "float64", "water", *WATER, steps=2, rounds=2),
    Case("sevennet", "float64", "slab", *SILICON, steps=2, rounds=2),
    Case("mace", "float32", "crystal", *SILICON, steps=2, rounds=3),
    Case("mace", "float32", "water", *WATER, steps=2, rounds=2),
    Case("mace", "float32", "slab", *SILICON, steps=2, rounds=2),
    Case("mace", "float64", "crystal", *SILICON, steps=2, rounds=2),
    Case("mace", "float64", "water", *WATER, steps=2, rounds=2),
    Case("mace", "float64", "slab", *SILICON, steps=2, rounds=2),
)


@dataclass(frozen=True)
class Run:
    """One run: a program on so many atoms, ranks, copies side by side, and threads per rank.

    Attributes
    ----------
    size : str
        ``"tiny"``, ``"share"`` or ``"whole"``.
    own : bool
        The model's own calculator instead of nvdd_md.
    """

    size: str
    own: bool = False
    ranks: int = 1
    copies: int = 1
    threads: int = 1


RUNS = {  # in an order that puts side by side what is compared
    "own calculator": Run("share", own=True),
    "share": Run("share"),
    "own calculator, 2 threads": Run("share", own=True, threads=2),
    "two shares side by side": Run("share", copies=2),
    "whole, 2 ranks": Run("whole", ranks=2),
    "whole": Run("whole"),
    "whole, 2 threads": Run("whole", threads=2),
    "tiny": Run("tiny"),
    "tiny, 2 ranks": Run("tiny", ranks=2),
}

NEEDED = {
    "R1": ("own calculator", "share", "own calculator, 2 threads"),
    "R2": (
        "whole",
        "whole, 2 ranks",
        "whole, 2 threads",
        "share",
        "two shares side by side",
    ),
    "R3": ("two shares side by side", "whole, 2 ranks"),
    "R8": ("share", "whole, 2 ranks"),
    "R9": ("whole", "whole, 2 ranks", "tiny", "tiny, 2 ranks"),
}
"""The runs behind each number."""


def runs_of(ids: tuple[str, ...]) -> dict[str, Run]:
    """Return the runs that the numbers ``ids`` need, in the order of ``RUNS``."""
    needed = {name for id in ids for name in NEEDED[id]}
    return {name: run for name, run in RUNS.items() if name in needed}
