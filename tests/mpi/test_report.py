"""What a user learns about a run: load per rank before it, times and traffic after it."""

import logging
import re
import time
from dataclasses import replace

import pytest
from ase import Atoms
from ase.build import bulk

from nvdd_md.agreement import DisagreementError
from nvdd_md.calculators import DistributedCalculator, TwoHop
from nvdd_md.comm import Traffic
from nvdd_md.phase_times import OF_SIMULATIONS, PHASES
from nvdd_md.report import RankReport, Report

REACH, EDGE = 4.5, 36.0


class Slow(TwoHop):
    """Takes a known time on one rank."""

    late_rank, comm = 0, None

    def forward(self, graph):
        if self.comm.rank == self.late_rank:
            time.sleep(0.05)
        return super().forward(graph)

    def fingerprint(self):
        return {}


def crystal() -> Atoms:
    atoms = bulk("Cu", cubic=True, a=3.6) * (10, 10, 10)
    atoms.rattle(0.02, seed=3)
    return atoms


def test_load_of_the_ranks_without_the_model(comm):
    """Ghosts are those within one cutoff of a domain, whatever the number of layers."""
    atoms = crystal()
    calculator = DistributedCalculator(TwoHop(rc=4.0), comm, device="cpu")
    loads = calculator.partition_report(atoms)
    assert calculator.engine.n_evaluations == 0
    assert [load.rank for load in loads] == list(range(comm.size))
    assert sum(load.owned for load in loads) == len(atoms)
    # How often the crystal is cut along each axis; of three ranks two share two thirds of it.
    lengths = {1: (1, 1, 1), 2: (2, 1, 1), 3: (1.5, 2, 1), 4: (2, 2, 1)}[comm.size]
    halo = 1.0
    for parts in lengths:
        wide = EDGE / parts + (2.0 * REACH if parts > 1 else 0.0)
        halo *= min(wide, EDGE) / EDGE
    for load in loads:
        assert load.owned + load.ghosts <= 1.1 * halo * len(atoms)
    if comm.size > 1:
        assert max(load.ghosts + load.owned for load in loads) < len(atoms)


def test_report(comm):
    potential = Slow(rc=4.0)
    potential.comm, potential.late_rank = comm, comm.size - 1
    atoms = crystal()
    atoms.calc = calculator = DistributedCalculator(potential, comm, device="cpu")
    empty = calculator.report()
    assert (empty.evaluations, empty.atoms) == (0, 0)
    assert "Nothing was evaluated" in str(empty)

    started, before = time.perf_counter(), comm.traffic.snapshot()
    for _ in range(3):
        atoms.positions[0, 0] += 0.01
        atoms.get_forces()
    elapsed, sent = time.perf_counter() - started, comm.traffic - before
    report = calculator.report()
    assert (report.evaluations, report.rebuilds, report.atoms) == (3, 1, len(atoms))
    assert [rank.rank for rank in report.ranks] == list(range(comm.size))
    mine = report.ranks[comm.rank]
    load = calculator.partition_report(atoms)[comm.rank]
    assert (mine.owned, mine.ghosts, mine.edges) == (load.owned, load.ghosts, load.edges)
    assert mine.traffic == sent
    assert set(mine.seconds) == set(PHASES)
    assert min(mine.seconds.values()) >= 0.0
    # The phases are all of an evaluation but the look at the cache.
    assert 0.9 * elapsed - 0.05 < mine.total_s <= elapsed
    # The late rank computes, the others wait for it in messages.
    assert report.ranks[-1].seconds["forward"] >= 0.15
    for rank in report.ranks[:-1]:
        assert rank.seconds["exchange"] >= 0.1
    text = str(report)
    for phase in PHASES:
        shown = re.search(rf"^{phase} .*%$", text, re.MULTILINE)
        assert bool(shown) == (phase not in OF_SIMULATIONS)
    assert f"3 evaluations of {len(atoms)} atoms on {comm.size} rank(s)" in text
    assert mine.host in text


def test_close_logs_one_line(comm, caplog):
    atoms = crystal()
    atoms.info["charge"] = 0
    atoms.calc = calculator = DistributedCalculator(TwoHop(), comm, device="cpu")
    atoms.get_forces()
    with caplog.at_level(logging.INFO, "nvdd_md"):
        calculator.close()
        calculator.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (comm.rank == 0)
    assert all("1 evaluations" in line and "forward" in line for line in told)
    with pytest.raises(RuntimeError, match="closed"):
        calculator.report()


@pytest.mark.parametrize("comm", [2], indirect=True)
def test_a_report_that_others_do_not_ask_for(comm):
    atoms = crystal()
    atoms.calc = calculator = DistributedCalculator(TwoHop(), comm, device="cpu")
    ask = calculator.report if comm.rank == 0 else atoms.get_forces
    with pytest.raises(
        DisagreementError, match="rank 0 in a performance report; rank 1 in an eval"
    ):
        ask()


# -- The advice

USUAL = {phase: 0.01 for phase in PHASES} | {"forward": 1.0, "backward": 2.0}
RANK = RankReport(0, "node", "cpu", 1, 500, 300, 9000, USUAL, Traffic())


def report_of(*ranks: RankReport) -> Report:
    atoms = sum(rank.owned for rank in ranks)
    return Report(tuple(replace(rank, rank=n) for n, rank in enumerate(ranks)), 10, 1, atoms)


@pytest.mark.parametrize(
    ("report", "advice"),
    [
        (report_of(RANK, RANK), "More ranks will help: the model takes 97% of a step."),
        (report_of(RANK, replace(RANK, owned=0)), "1 of 2 ranks own no atom already"),
        (report_of(*2 * [replace(RANK, edges=200_000)]), "an atom has 400 neighbours"),
        (report_of(replace(RANK, edges=27000), RANK), "rank 0 has 1.50 times"),
        (
            report_of(RANK, replace(RANK, seconds=USUAL | {"exchange": 5.0})),
            "into exchange (45%, waiting",
        ),
    ],
    ids=["worth it", "empty ranks", "few atoms", "uneven", "communication"],
)
def test_advice(report, advice):
    assert advice in report.advice()
    assert report.advice() in str(report)
    assert report.advice().count(". ") == 0
