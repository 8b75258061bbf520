"""One run in a process (or on each rank) of its own: steps through a trajectory, and reports.

Started by :mod:`benchmarks.launch`. After two evaluations of a tiny system and one of the atoms
in question, which pay for compiling, allocating and the first neighbour list, it prints ``ready``
and waits for a line on its input; then it takes the timed steps and prints one line of JSON.

The atoms fly straight on with thermal velocities, so that every program sees the same positions
at the same step, also where the forces are those of random weights. ``--verlet`` integrates the
equations of motion instead, which is what decides how often a neighbour list is rebuilt.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet

from benchmarks import peak_memory, programs
from benchmarks.cases import DTYPES, MODELS, TINY
from benchmarks.systems import STRUCTURES
from nvdd_md.calculators import DistributedCalculator
from nvdd_md.comm import Communicator, SerialCommunicator

TIME_STEP = 1.0 * units.fs


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.own:
        calculator = programs.own_calculator(options.model, options.dtype, options.model_file)
        comm: Communicator = SerialCommunicator()
    else:
        calculator = programs.nvdd_md(
            options.model, options.dtype, options.model_file, options.skin
        )
        comm = calculator.comm
    atoms = STRUCTURES[options.structure](tuple(options.repeat))
    thermalize_momenta(atoms, temperature_K=options.temperature, rng=np.random.default_rng(1))
    peak_memory.restart()
    evaluate_tiny(calculator, options.model)
    atoms.calc = calculator
    record = {"atoms": len(atoms), **first_evaluation(atoms)}
    advance = verlet(atoms) if options.verlet else flight(atoms)
    wait_for_start(comm)
    record |= timed_steps(atoms, advance, options.steps)
    record["energy"] = atoms.get_potential_energy()
    memory = comm.gather_objects(peak_memory.peak())
    record["peak_bytes"] = memory
    if comm.rank == 0:
        print(json.dumps(record), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="sevennet")
    parser.add_argument("--model-file", default="", help="of a MACE model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--structure", choices=tuple(STRUCTURES), default="crystal")
    parser.add_argument("--repeat", type=int, nargs=3, default=(4, 4, 4))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skin", type=float, default=None, help="Å")
    parser.add_argument("--temperature", type=float, default=300.0, help="K")
    parser.add_argument("--own", action="store_true", help="the model's own ASE calculator")
    parser.add_argument("--verlet", action="store_true", help="molecular dynamics")
    return parser.parse_args()


def evaluate_tiny(calculator: Calculator, model: str) -> None:
    """Evaluate a few atoms twice: what is compiled at the first calls is compiled here."""
    atoms = STRUCTURES["argon" if model == "lj" else "crystal"](TINY)
    atoms.calc = calculator
    for _ in range(2):
        atoms.positions += 1e-3
        atoms.get_forces()


def first_evaluation(atoms: Atoms) -> dict:
    """Evaluate ``atoms`` once. Collective.

    Returns the seconds that building list and routing took on this rank, if they were built.
    """
    before = phases_of(atoms.calc)
    atoms.get_forces()
    after = phases_of(atoms.calc)
    built = sum(after.get(name, 0.0) - before.get(name, 0.0) for name in ("neighbours", "routing"))
    return {"build_s": built}


def verlet(atoms: Atoms) -> Callable[[], None]:
    """Return what advances ``atoms`` by one step of molecular dynamics."""
    dynamics = VelocityVerlet(atoms, timestep=TIME_STEP)
    dynamics.run(0)
    return lambda: dynamics.run(1)


def flight(atoms: Atoms) -> Callable[[], None]:
    """Return what advances ``atoms`` by one step as if there were no forces, and computes them."""
    velocities = atoms.get_velocities()

    def advance() -> None:
        atoms.positions += TIME_STEP * velocities
        atoms.get_forces()

    return advance


def wait_for_start(comm: Communicator) -> None:
    """Say that this process is ready, and wait until all that run beside it are. Collective."""
    comm.barrier()
    if comm.rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    comm.barrier()


def timed_steps(atoms: Atoms, advance: Callable[[], None], steps: int) -> dict:
    """Take the steps, and return their times and the load of each rank. Collective."""
    calculator = atoms.calc
    before = phases_of(calculator)
    rebuilds = rebuilds_of(calculator)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        advance()
        seconds.append(time.perf_counter() - start)
    record = {"step_s": float(np.median(seconds)), "mean_s": float(np.mean(seconds))}
    if isinstance(calculator, DistributedCalculator):
        mine = {
            phase: (total - before.get(phase, 0.0)) / steps
            for phase, total in phases_of(calculator).items()
        }
        record["phases_s"] = calculator.comm.gather_objects(mine)
        record["rebuilds"] = rebuilds_of(calculator) - rebuilds
        report = calculator.partition_report(atoms)
        record["owned"] = [load.owned for load in report]
        record["ghosts"] = [load.ghosts for load in report]
    return record


def phases_of(calculator: Calculator) -> dict[str, float]:
    """Return the seconds spent in each phase so far, nothing for a calculator without phases."""
    distributed = isinstance(calculator, DistributedCalculator)
    return dict(calculator.engine.times.seconds) if distributed else {}


def rebuilds_of(calculator: Calculator) -> int:
    """Return how often the neighbour list was built so far."""
    return calculator.engine.n_rebuilds if isinstance(calculator, DistributedCalculator) else 0


if __name__ == "__main__":
    main()
