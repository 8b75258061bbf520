"""From the runs of a case to its numbers: what each R is, its goal, and what stands beside it.

A round is a dictionary from the name of a run (``cases.RUNS``) to its record. Every ratio is
formed within a round, whose runs follow each other closely, and the value is the median over
rounds: so a machine that becomes slower for a while does not shift a ratio.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import MODELS, Case

Round = Mapping[str, dict]

R1_MOST = 1.00
R2_LEAST = 0.95
R3_LEAST = 0.95
R8_MOST = 0.05
R9_MOST = 1.10


@dataclass(frozen=True)
class Number:
    """One measured number.

    Attributes
    ----------
    id : str
        ``"R1"`` to ``"R9"``, as in ``docs/performance.md``.
    case : str
    value : float
    goal : str
    met : bool
    peers : dict of str to float
        What the value was made of, and what it is to be compared with.
    """

    id: str
    case: str
    value: float
    goal: str
    met: bool
    peers: dict[str, float]


def numbers_of(case: Case, rounds: Sequence[Round]) -> list[Number]:
    """Return the numbers of a case after some rounds."""
    return [number for id in case.ids for number in MEASURES[id](case, rounds)]


def over_rounds(rounds: Sequence[Round], quantity: Callable[[Round], float]) -> float:
    """Return the median of what ``quantity`` makes of each round."""
    return median(quantity(runs) for runs in rounds)


def step(rounds: Sequence[Round], name: str) -> float:
    """Return the seconds per step of one run."""
    return over_rounds(rounds, lambda runs: runs[name]["step_s"])


def title(case: Case, rounds: Sequence[Round], run: str) -> str:
    return f"{case.title}, {rounds[0][run]['atoms']} atoms"


def one_rank(case: Case, rounds: Sequence[Round]) -> list[Number]:
    """R1: the step of one rank ÷ the step of the model's own calculator, one thread each."""
    value = over_rounds(
        rounds, lambda runs: runs["share"]["step_s"] / runs["own calculator"]["step_s"]
    )
    own = MODELS[case.model].own_calculator
    first = rounds[0]
    difference = abs(first["share"]["energy"] - first["own calculator"]["energy"])
    peers = {
        f"{own} 1 thread, s/step": step(rounds, "own calculator"),
        f"{own} 2 threads, s/step": step(rounds, "own calculator, 2 threads"),
        "nvdd_md 1 rank, s/step": step(rounds, "share"),
        "difference of the energies, eV/atom": difference / first["share"]["atoms"],
    }
    name = title(case, rounds, "share")
    return [Number("R1", name, value, f"<= {R1_MOST:.2f}", value <= R1_MOST, peers)]


def strong_scaling(case: Case, rounds: Sequence[Round]) -> list[Number]:
    """R2: speed-up of two ranks, as a part of what the machine allows for two processes."""

    def speed_up(runs: Round) -> float:
        return runs["whole"]["step_s"] / runs["whole, 2 ranks"]["step_s"]

    def ceiling(runs: Round) -> float:
        return 2 * runs["share"]["step_s"] / runs["two shares side by side"]["step_s"]

    def faster_than_threads(runs: Round) -> float:
        return runs["whole, 2 threads"]["step_s"] / runs["whole, 2 ranks"]["step_s"]

    value = over_rounds(rounds, lambda runs: speed_up(runs) / ceiling(runs))
    threads = over_rounds(rounds, faster_than_threads)
    peers = {
        "speed-up of 2 ranks": over_rounds(rounds, speed_up),
        "ceiling of the machine": over_rounds(rounds, ceiling),
        "time of 1 process x 2 threads / time of 2 ranks": threads,
        "ghosts per owned atom": ghosts_per_owned(rounds),
        "nvdd_md 1 rank, s/step": step(rounds, "whole"),
        "nvdd_md 2 ranks, s/step": step(rounds, "whole, 2 ranks"),
        "nvdd_md 1 process x 2 threads, s/step": step(rounds, "whole, 2 threads"),
        "half the atoms alone, s/step": step(rounds, "share"),
        "half the atoms, two side by side, s/step": step(rounds, "two shares side by side"),
    }
    goal = f">= {R2_LEAST:.2f} of the ceiling, and faster than 2 threads"
    met = value >= R2_LEAST and threads > 1.0
    return [Number("R2", title(case, rounds, "whole"), value, goal, met, peers)]


def weak_scaling(case: Case, rounds: Sequence[Round]) -> list[Number]:
    """R3: two independent runs of n atoms side by side ÷ two ranks on 2 n atoms."""
    apart, together = "two shares side by side", "whole, 2 ranks"
    value = over_rounds(rounds, lambda runs: runs[apart]["step_s"] / runs[together]["step_s"])
    peers = {
        "two independent runs side by side, s/step": step(rounds, apart),
        "nvdd_md 2 ranks, s/step": step(rounds, together),
        "ghosts per owned atom": ghosts_per_owned(rounds),
    }
    name = title(case, rounds, together)
    return [Number("R3", name, value, f">= {R3_LEAST:.2f}", value >= R3_LEAST, peers)]


def not_the_model(case: Case, rounds: Sequence[Round]) -> list[Number]:
    """R8: everything in a step but the model's forward and backward ÷ these two."""
    return [
        overhead(case, rounds, run, ranks)
        for run, ranks in (("share", "1 rank"), ("whole, 2 ranks", "2 ranks"))
    ]


def overhead(case: Case, rounds: Sequence[Round], run: str, ranks: str) -> Number:
    value = over_rounds(
        rounds, lambda runs: (runs[run]["mean_s"] - model_s(runs[run])) / model_s(runs[run])
    )
    peers = {
        "step, s": over_rounds(rounds, lambda runs: runs[run]["mean_s"]),
        "model, s": over_rounds(rounds, lambda runs: model_s(runs[run])),
    }
    for phase in rounds[0][run]["phases_s"][0]:
        peers[f"{phase}, s"] = over_rounds(rounds, lambda runs, p=phase: phase_s(runs[run], p))
    peers["lists rebuilt in the timed steps"] = rounds[0][run]["rebuilds"]
    peers["a list from nothing, s"] = over_rounds(rounds, lambda runs: runs[run]["build_s"])
    name = f"{title(case, rounds, run)}, {ranks}"
    return Number("R8", name, value, f"<= {R8_MOST:.2f}", value <= R8_MOST, peers)


def phase_s(record: dict, phase: str) -> float:
    """Return the seconds of a phase in one step, the mean over ranks; 0 for one that is unknown."""
    ranks = record["phases_s"]
    return sum(rank.get(phase, 0.0) for rank in ranks) / len(ranks)


def model_s(record: dict) -> float:
    """Return the seconds of one step in which the model computes, the mean over ranks."""
    return phase_s(record, "forward") + phase_s(record, "backward")


def memory(case: Case, rounds: Sequence[Round]) -> list[Number]:
    """R9: memory of one of two ranks ÷ its share of atoms and ghosts in the memory of one rank.

    From each the memory of the same number of ranks on a tiny system is subtracted.
    """

    def single(runs: Round) -> float:
        return runs["whole"]["peak_bytes"][0] - runs["tiny"]["peak_bytes"][0]

    def worst(runs: Round) -> float:
        ranks, fixed = (runs[name]["peak_bytes"] for name in ("whole, 2 ranks", "tiny, 2 ranks"))
        return max(peak - base for peak, base in zip(ranks, fixed, strict=True))

    ghosts = ghosts_per_owned(rounds)
    value = over_rounds(rounds, lambda runs: worst(runs) / (0.5 * (1 + ghosts) * single(runs)))
    peers = {
        "1 rank, MB": over_rounds(rounds, single) / 1e6,
        "the larger of 2 ranks, MB": over_rounds(rounds, worst) / 1e6,
        "fixed part, MB": over_rounds(rounds, lambda runs: runs["tiny"]["peak_bytes"][0]) / 1e6,
        "ghosts per owned atom": ghosts,
    }
    own = [runs["own calculator"] for runs in rounds if "own calculator" in runs]
    if own:
        text = f"{MODELS[case.model].own_calculator}, half the atoms, fixed part included, MB"
        peers[text] = median(record["peak_bytes"][0] for record in own) / 1e6
    name = title(case, rounds, "whole")
    return [Number("R9", name, value, f"<= {R9_MOST:.2f}", value <= R9_MOST, peers)]


def ghosts_per_owned(rounds: Sequence[Round]) -> float:
    """Return the ghosts of two ranks ÷ their owned atoms."""
    record = rounds[0]["whole, 2 ranks"]
    return sum(record["ghosts"]) / sum(record["owned"])


MEASURES = {
    "R1": one_rank,
    "R2": strong_scaling,
    "R3": weak_scaling,
    "R8": not_the_model,
    "R9": memory,
}
