"""What a run cost, and whether more ranks would help."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nvdd_md.comm import Traffic
from nvdd_md.engine import ForceEngine
from nvdd_md.phase_times import MODEL, OF_SIMULATIONS, PHASES

_log = logging.getLogger(__name__)

UNEVEN = 1.10
"""Largest over mean number of edges from which on the division is called uneven."""

UNDIVIDED = ("agree", "routing", "exchange", "gather")
"""Phases that more ranks do not make shorter."""

UNDIVIDED_SHARE = 0.3
"""Share of a step from which on these phases decide."""


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes
    ----------
    rank : int
    host, device : str
    threads, owned, ghosts, edges : int
        The last three for the last neighbour list; edges up to cutoff + skin.
    seconds : dict of str to float
        Sums over all calls, by the names in :data:`nvdd_md.phase_times.PHASES`.
    traffic : Traffic
        What this rank sent, over all evaluations.
    """

    rank: int
    host: str
    device: str
    threads: int
    owned: int
    ghosts: int
    edges: int
    seconds: dict[str, float]
    traffic: Traffic

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Report:
    """What a calculator did on all ranks; ``str()`` makes a table of it.

    Attributes
    ----------
    ranks : tuple of RankReport
    evaluations, rebuilds : int
        Of the potential, and of neighbour lists.
    atoms : int
    """

    ranks: tuple[RankReport, ...]
    evaluations: int
    rebuilds: int
    atoms: int

    @property
    def step_s(self) -> float:
        """Mean seconds of one evaluation, on the slowest rank."""
        return max(rank.total_s for rank in self.ranks) / max(self.evaluations, 1)

    def share(self, phase: str) -> float:
        """Return the part of the time that went into a phase, mean over ranks."""
        total = sum(rank.total_s for rank in self.ranks)
        return sum(rank.seconds[phase] for rank in self.ranks) / total if total else 0.0

    @property
    def imbalance(self) -> float:
        """Largest number of edges on a rank over the mean; 1 is even."""
        edges = np.array([rank.edges for rank in self.ranks])
        return float(edges.max() / edges.mean()) if edges.any() else 1.0

    def advice(self) -> str:
        """Return one sentence: would more ranks help, and if not, why not."""
        if not self.evaluations or not self.atoms:
            return "Nothing was evaluated yet."
        return next(sentence for rule in _RULES if (sentence := rule(self)))

    def __str__(self) -> str:
        """Return a table of phases and ranks."""
        n = max(self.evaluations, 1)
        lines = [
            f"{self.evaluations} evaluations of {self.atoms} atoms on {len(self.ranks)} rank(s), "
            f"{self.step_s:.4g} s each; {self.rebuilds} neighbour list(s)",
            "",
            f"{'phase':<12}{'mean':>10}{'slowest':>10}{'rank':>6}{'share':>8}   (s per evaluation)",
        ]
        for phase in PHASES:
            seconds = [rank.seconds[phase] for rank in self.ranks]
            if phase in OF_SIMULATIONS and not any(seconds):
                continue
            slowest = int(np.argmax(seconds))
            lines.append(
                f"{phase:<12}{np.mean(seconds) / n:>10.5f}{seconds[slowest] / n:>10.5f}"
                f"{slowest:>6}{self.share(phase):>8.1%}"
            )
        lines += [
            "",
            f"{'rank':>4}{'owned':>9}{'ghosts':>9}{'edges':>11}{'messages':>10}{'kB':>11}"
            f"{'collectives':>13}{'kB':>9}   {'device':<8}{'threads':>7}  host   (per evaluation)",
        ]
        for rank in self.ranks:
            sent = rank.traffic
            lines.append(
                f"{rank.rank:>4}{rank.owned:>9}{rank.ghosts:>9}{rank.edges:>11}"
                f"{sent.messages / n:>10.1f}{sent.message_bytes / n / 1e3:>11.1f}"
                f"{sent.collectives / n:>13.1f}{sent.collective_bytes / n / 1e3:>9.1f}"
                f"   {rank.device:<8}{rank.threads:>7}  {rank.host}"
            )
        lines += ["", f"edges, largest over mean: {self.imbalance:.3f}", self.advice()]
        return "\n".join(lines)


def _empty_ranks(report: Report) -> str:
    empty = sum(rank.owned == 0 for rank in report.ranks)
    if not empty:
        return ""
    return (
        f"More ranks do not help: {empty} of {len(report.ranks)} ranks own no atom already, there "
        f"are only {report.atoms}."
    )


def _few_atoms(report: Report) -> str:
    """Half of a rank's domain is within reach of all of it: nearly all atoms become ghosts."""
    owned = sum(rank.owned for rank in report.ranks)
    neighbours = sum(rank.edges for rank in report.ranks) / owned
    if neighbours < 0.5 * owned / len(report.ranks):
        return ""
    return (
        f"More ranks help little: an atom has {neighbours:.0f} neighbours, more than half of the "
        "atoms that a rank owns."
    )


def _uneven(report: Report) -> str:
    if report.imbalance < UNEVEN:
        return ""
    fullest = max(report.ranks, key=lambda rank: rank.edges)
    return (
        f"More ranks help little as long as the work is uneven: rank {fullest.rank} has "
        f"{report.imbalance:.2f} times the mean number of edges, and the others wait for it."
    )


def _undivided(report: Report) -> str:
    shares = {phase: report.share(phase) for phase in UNDIVIDED}
    if sum(shares.values()) < UNDIVIDED_SHARE:
        return ""
    worst = max(shares, key=lambda phase: shares[phase])
    return (
        f"More ranks help little: {sum(shares.values()):.0%} of a step goes into what they do not "
        f"divide, most of it into {worst} ({shares[worst]:.0%}, waiting for other ranks included)."
    )


def _worth_it(report: Report) -> str:
    model = sum(report.share(phase) for phase in MODEL)
    return f"More ranks will help: the model takes {model:.0%} of a step."


_RULES: tuple[Callable[[Report], str], ...] = (
    _empty_ranks,
    _uneven,
    _undivided,
    _few_atoms,
    _worth_it,
)


def log_summary(engine: ForceEngine) -> None:
    """Log what the evaluations of rank 0 cost."""
    if engine.comm.rank or not engine.n_evaluations:
        return
    seconds = engine.times.seconds
    n = engine.n_evaluations
    phases = ", ".join(f"{phase} {total / n:.3g}" for phase, total in seconds.items())
    _log.info(
        "%s: %d evaluations on %d rank(s), %.4g s each (rank 0: %s), %d neighbour list(s)",
        engine.potential.name,
        n,
        engine.comm.size,
        sum(seconds.values()) / n,
        phases,
        engine.n_rebuilds,
    )
