"""One timed run: molecular dynamics steps of a silicon or Lennard-Jones crystal.

Prints one JSON line: seconds per step (median), the phases of a step, and the load per rank.
Started by ``force_call.py`` and ``skin.py``, alone or under ``mpiexec``.
"""

import argparse
import json
import time

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.calculators.lj import LennardJones as AseLennardJones
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet

from nvdd_md.calculators import DistributedCalculator, LennardJones
from nvdd_md.calculators.sevennet import SevenNet

ARGON = {"sigma": 3.4, "epsilon": 0.0104, "rc": 8.5}


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    atoms = crystal(options.model, options.repeat)
    atoms.calc = calculator(options)
    thermalize_momenta(atoms, temperature_K=options.temperature, rng=np.random.default_rng(1))
    dynamics = VelocityVerlet(atoms, timestep=1.0 * units.fs)
    dynamics.run(options.warmup)
    distributed = isinstance(atoms.calc, DistributedCalculator)
    before = dict(atoms.calc.engine.times.seconds) if distributed else {}
    rebuilds = atoms.calc.engine.n_rebuilds if distributed else 0
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        dynamics.run(1)
        seconds.append(time.perf_counter() - start)
    record = {"step_s": float(np.median(seconds)), "atoms": len(atoms)}
    if distributed:
        engine = atoms.calc.engine
        record["phases_s"] = {
            phase: (total - before.get(phase, 0.0)) / options.steps
            for phase, total in engine.times.seconds.items()
        }
        record["rebuilds"] = engine.n_rebuilds - rebuilds
        record["mean_s"] = float(np.mean(seconds))
        record["load"] = [
            [load.owned, load.ghosts, load.edges] for load in atoms.calc.partition_report(atoms)
        ]
    if not distributed or atoms.calc.comm.rank == 0:
        print(json.dumps(record), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("sevennet", "lj"), default="sevennet")
    parser.add_argument("--repeat", type=int, nargs=3, default=(4, 4, 4))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skin", type=float, default=None)
    parser.add_argument("--temperature", type=float, default=600.0, help="K")
    parser.add_argument("--plain", action="store_true", help="the model's own ASE calculator")
    parser.add_argument("--float64", action="store_true")
    return parser.parse_args()


def crystal(model: str, repeat: tuple[int, int, int]) -> Atoms:
    if model == "lj":
        atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat(repeat)
    else:
        atoms = bulk("Si", "diamond", a=5.431, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=0)
    return atoms


def calculator(options: argparse.Namespace) -> Calculator:
    if options.plain:
        if options.model == "lj":
            return AseLennardJones(**ARGON)
        from sevenn.calculator import SevenNetCalculator

        return SevenNetCalculator("7net-0", device="cpu")
    dtype = torch.float64 if options.float64 else torch.float32
    if options.model == "lj":
        potential = LennardJones(**ARGON, dtype=dtype)
    else:
        potential = SevenNet("7net-0", dtype=dtype)
    skin = {} if options.skin is None else {"skin": options.skin}
    return DistributedCalculator(potential, **skin)


if __name__ == "__main__":
    main()
