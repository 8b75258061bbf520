"""One run of molecular dynamics in a process (or on each rank) of its own, for ``dynamics.py``.

Prints ``ready``, waits for a line on its input, makes the timed steps and prints one line of JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet as AseVelocityVerlet

from benchmarks import peak_memory, programs
from benchmarks.systems import STRUCTURES
from benchmarks.worker import wait_for_start
from nvdd_md.calculators import DistributedCalculator
from nvdd_md.comm import Communicator
from nvdd_md.integrators import Simulation, VelocityVerlet
from nvdd_md.jobs.background_writer import BackgroundWriter
from nvdd_md.jobs.checkpoint import CheckpointStore
from nvdd_md.jobs.frame import Frame
from nvdd_md.jobs.outputs import make_trajectory

TIMESTEP_FS = 1.0
FRAME_EVERY = 10


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    atoms = STRUCTURES[options.structure](tuple(options.repeat))
    thermalize_momenta(atoms, temperature_K=300.0, rng=np.random.default_rng(1))
    peak_memory.restart()
    record = PROGRAMS[options.program](atoms, options)
    if record:
        print(json.dumps({"atoms": len(atoms), **record}), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=tuple(PROGRAMS), required=True)
    parser.add_argument("--model", choices=("lj", "sevennet"), default="sevennet")
    parser.add_argument("--structure", choices=tuple(STRUCTURES), default="crystal")
    parser.add_argument("--repeat", type=int, nargs=3, default=(4, 4, 4))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--format", default="", help="suffix of a trajectory")
    return parser.parse_args()


def calculator_of(options: argparse.Namespace) -> DistributedCalculator:
    dtype = "float64" if options.model == "lj" else "float32"
    return programs.nvdd_md(options.model, dtype, "", None)


def with_ase(atoms: Atoms, options: argparse.Namespace) -> dict:
    """ASE's own dynamics on this package's calculator."""
    atoms.calc = calculator = calculator_of(options)
    dynamics = AseVelocityVerlet(atoms, timestep=TIMESTEP_FS * units.fs)
    dynamics.run(1)
    comm = calculator.comm
    wait_for_start(comm)
    seconds = timed(partial(dynamics.run, 1), options.steps)
    return gathered(comm, {"peak_bytes": peak_memory.peak()}) | summary(seconds)


def with_simulation(atoms: Atoms, options: argparse.Namespace) -> dict:
    """Atoms that stay on their ranks, with a trajectory if one is asked for."""
    potential = calculator_of(options).potential
    simulation = Simulation(atoms, potential, VelocityVerlet(TIMESTEP_FS))
    comm = simulation.comm
    with tempfile.TemporaryDirectory() as folder:
        writer = attach_trajectory(simulation, Path(folder), options.format)
        simulation.run(1)
        before = dict(simulation.times.seconds)
        wait_for_start(comm)
        seconds = timed(partial(simulation.run, 1), options.steps)
        phases = {
            name: (total - before[name]) / options.steps
            for name, total in simulation.times.seconds.items()
        }
        if writer is not None:
            writer.drain()
            writer.close()
    mine = {"peak_bytes": peak_memory.peak(), "phases_s": phases}
    return gathered(comm, mine) | summary(seconds) | {"rebuilds": simulation.n_rebuilds}


def attach_trajectory(simulation: Simulation, folder: Path, suffix: str) -> BackgroundWriter | None:
    """Write a frame every ten steps, as a job does."""
    if not suffix:
        return None
    writer = None
    output = make_trajectory(folder / f"md{suffix}", ["velocities", "forces"])
    if simulation.comm.rank == 0:
        output.open(None)
        writer = BackgroundWriter(output.write)

    def observe(simulation: Simulation) -> None:
        thermo = simulation.thermo()
        arrays = simulation.gather_arrays(["numbers", *output.needs])
        if arrays is not None and writer is not None:
            around = simulation.surroundings
            numbers = arrays.pop("numbers")
            with simulation.times.measure("output"):
                writer.submit(Frame(thermo, numbers, around.cell, around.pbc, arrays, {}))

    simulation.attach(observe, every=FRAME_EVERY)
    return writer


def restarts(atoms: Atoms, options: argparse.Namespace) -> dict:
    """Measure what a checkpoint costs, and how soon a restart computes again."""
    potential = calculator_of(options).potential
    Simulation(atoms, potential, VelocityVerlet(TIMESTEP_FS)).run(1)  # pays for compilation
    start = time.perf_counter()
    simulation = Simulation(atoms, potential, VelocityVerlet(TIMESTEP_FS))
    simulation.run(1)
    cold_s = time.perf_counter() - start
    comm = simulation.comm
    wait_for_start(comm)
    seconds = timed(partial(simulation.run, 1), options.steps)
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)

        def save() -> None:
            state = simulation.state()
            if state is not None:
                store.write(simulation.step, state, {})
            comm.barrier()

        saves = timed(save, options.steps)
        start = time.perf_counter()
        checkpoint = store.latest() if comm.rank == 0 else None
        state = None if checkpoint is None else checkpoint.state
        Simulation.restore(state, potential, VelocityVerlet(TIMESTEP_FS)).run(1)
        restart_s = time.perf_counter() - start
    record = summary(seconds) | {"checkpoint_s": float(np.median(saves))}
    return gathered(comm, {}) | record | {"cold_s": cold_s, "restart_s": restart_s}


PROGRAMS: dict[str, Callable[[Atoms, argparse.Namespace], dict]] = {
    "ase": with_ase,
    "simulation": with_simulation,
    "restarts": restarts,
}


def timed(action: Callable[[], object], n: int) -> list[float]:
    """Return the seconds of each of n calls."""
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float]) -> dict:
    return {"step_s": float(np.median(seconds)), "mean_s": float(np.mean(seconds))}


def gathered(comm: Communicator, mine: dict) -> dict:
    """Return all ranks' values in lists. Collective; the ranks above 0 then end."""
    ranks = comm.gather_objects(mine)
    if comm.rank:
        sys.exit()
    return {name: [rank[name] for rank in ranks] for name in mine}


if __name__ == "__main__":
    main()
