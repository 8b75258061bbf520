"""Speed and memory of the force call: R1, R2, R3, R8 and R9 of ``docs/performance.md``.

``python -m benchmarks`` measures every case of ``benchmarks/cases.py``, prints a table and writes
``benchmarks/results.json``, anew after every round, so that it can be interrupted. With ``--only``
or ``--models`` the numbers measured take the place of the old ones in that file, and the others
stay. ``--table`` measures nothing and shows the file.

Each run is a process of its own, with its model's environment: ``.venv`` for Lennard-Jones and
SevenNet, ``.venv-mace`` for MACE (``make bench`` makes both). The runs of a round follow each
other, every other round in the reverse order; all that run side by side begin together. Nothing
else should run on the machine.
"""

import argparse
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import results_file
from benchmarks.cases import CASES, EVERYTHING, MODELS, TINY, Case, Run, runs_of
from benchmarks.judge import numbers_of
from benchmarks.launch import ROOT, run

RESULTS = ROOT / "benchmarks" / "results.json"
QUICK_RESULTS = RESULTS.with_name("results-quick.json")


def main() -> None:
    options = parse_options()
    path = QUICK_RESULTS if options.quick else RESULTS
    if not options.table:
        measure(options, path)
    table = results_file.table(results_file.read(path), markdown=options.markdown)
    print(f"{results_file.machine()}\n\n{table}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", choices=EVERYTHING, metavar="R", help="e.g. R1 R9")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS))
    parser.add_argument("--rounds", type=int, help="instead of 2 or 3, as cases.py says")
    parser.add_argument("--quick", action="store_true", help="few atoms: shows that all works")
    parser.add_argument("--table", action="store_true", help="show the results that there are")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--mace-venv", type=Path, default=ROOT / ".venv-mace")
    return parser.parse_args()


def measure(options: argparse.Namespace, path: Path) -> None:
    """Measure the cases asked for, and keep the file up to date."""
    complete = not (options.only or options.models)
    results = [] if complete else results_file.read(path)
    with tempfile.TemporaryDirectory() as folder:
        model_file = Path(folder) / "mace.model"
        for case in chosen(options):
            python = (options.mace_venv if case.model == "mace" else options.venv) / "bin/python"
            if not python.exists():
                raise SystemExit(
                    f"no {python}: `make bench` makes it; or name it, or other --models"
                )
            if case.model == "mace" and not model_file.exists():
                write_mace_model(model_file, python)
            print(f"{case.title}: {', '.join(case.ids)}", flush=True)
            rounds: list[dict[str, dict]] = []
            for number in range(case.rounds):
                records = one_round(case, number, model_file, python)
                # What a tiny system is run for, its memory, does not change.
                rounds.append({**(rounds[0] if rounds else {}), **records})
                results = results_file.updated(results, numbers_of(case, rounds))
                results_file.write(path, results)


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases to measure."""
    cases = []
    for case in CASES:
        ids = tuple(id for id in case.ids if id in (options.only or EVERYTHING))
        if not ids or case.model not in (options.models or MODELS):
            continue
        case = case.quick() if options.quick else case
        cases.append(replace(case, ids=ids, rounds=options.rounds or case.rounds))
    return cases


def write_mace_model(file: Path, python: Path) -> None:
    command = [python, "-m", "benchmarks.mace_model", file]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"{made.stderr[-4000:]}\nfailed: {' '.join(map(str, command))}")


def one_round(case: Case, number: int, model_file: Path, python: Path) -> dict[str, dict]:
    """Run once all that the numbers of ``case`` need, tiny systems in the first round only."""
    runs = {
        name: settings
        for name, settings in runs_of(case.ids).items()
        if number == 0 or settings.size != "tiny"
    }
    # A machine that becomes slower and slower favours neither of two runs.
    names = list(runs) if number % 2 == 0 else list(reversed(runs))
    records = {}
    for name in names:
        start = time.perf_counter()
        settings = runs[name]
        records[name] = run(
            arguments(case, settings, model_file),
            ranks=settings.ranks,
            copies=settings.copies,
            threads=settings.threads,
            python=python,
        )
        took = time.perf_counter() - start
        print(
            f"  round {number + 1}  {name:<26}{records[name]['step_s']:9.4f} s/step"
            f"  (the run took {took:.0f} s)",
            flush=True,
        )
    return records


def arguments(case: Case, settings: Run, model_file: Path) -> list[str]:
    """Return the worker's options for one run of a case."""
    repeat = {"tiny": TINY, "share": case.share, "whole": case.whole}[settings.size]
    structure = case.structure
    if settings.size == "tiny":
        structure = "argon" if case.model == "lj" else "crystal"
    return [
        *("--model", case.model, "--dtype", case.dtype, "--model-file", str(model_file)),
        *("--structure", structure, "--repeat", *map(str, repeat)),
        *("--steps", str(case.steps)),
        *(["--own"] if settings.own else []),
    ]


if __name__ == "__main__":
    main()
