"""The main job: a pretrained potential on several MPI ranks, checked against one process.

Run it with ``make demo``, or ``mpiexec -n 2 python examples/demo.py``. Energy, forces and stress
of an α-quartz crystal are computed by all ranks together and compared with SevenNet's own ASE
calculator in one process; then a short molecular dynamics run follows. The picture
``quartz_domains.png`` shows which rank owns which atom. The exit status is 1 if a difference
exceeds its tolerance, or if fewer than two ranks ran.
"""

import argparse
import os
import socket
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.io import read
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet

from nvdd_md.calculators import DistributedCalculator
from nvdd_md.calculators.sevennet import SevenNet

HERE = Path(__file__).parent

# Both sides compute in float32: their sums differ in order, hence in the last bits.
ENERGY_TOLERANCE = 1.0e-6  # eV per atom
FORCE_TOLERANCE = 2.0e-5  # relative to the largest force
STRESS_TOLERANCE = 1.0e-6  # eV/Å³


def main() -> int:
    options = parse_options()
    atoms = read(options.structure, parallel=False)
    atoms.calc = calc = DistributedCalculator(SevenNet("7net-0"))
    rank_0 = calc.comm.rank == 0

    show_ranks(calc)
    show_domains(calc, atoms)
    ok = compare_with_one_process(calc, atoms)
    run_md(atoms, options.steps, rank_0)
    owners = calc.owners(atoms)
    if rank_0:
        draw_domains(atoms, owners, options.picture)
        print(f"\npicture of the domains: {options.picture}")
    if calc.comm.size < 2:
        print("\nFAILED: this demo needs at least 2 ranks: mpiexec -n 2 python examples/demo.py")
        return 1
    return 0 if ok else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--structure", default=HERE / "quartz.xyz", type=Path)
    parser.add_argument("--steps", default=20, type=int, help="steps of 1 fs")
    parser.add_argument("--picture", default=HERE / "quartz_domains.png", type=Path)
    return parser.parse_args()


def show_ranks(calc: DistributedCalculator) -> None:
    mine = (socket.gethostname(), str(calc.potential.device), torch.get_num_threads(), os.getpid())
    table = calc.comm.gather_objects(mine)
    if calc.comm.rank == 0:
        print(f"\n{'rank':>4}  {'host':<24}{'device':<10}{'threads':>7}{'process':>10}")
        for rank, (host, device, threads, pid) in enumerate(table):
            print(f"{rank:>4}  {host:<24}{device:<10}{threads:>7}{pid:>10}")


def show_domains(calc: DistributedCalculator, atoms: Atoms) -> None:
    loads = calc.partition_report(atoms)
    if calc.comm.rank == 0:
        formula = atoms.get_chemical_formula()
        print(f"\n{len(atoms)} atoms ({formula}), {calc.potential.name} in float32")
        print(f"{'rank':>4}{'owned':>8}{'ghosts':>8}{'edges':>9}")
        for load in loads:
            print(f"{load.rank:>4}{load.owned:>8}{load.ghosts:>8}{load.edges:>9}")


def compare_with_one_process(calc: DistributedCalculator, atoms: Atoms) -> bool:
    """Print both results beside each other; all ranks return the same verdict."""
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    verdict = True
    if calc.comm.rank == 0:
        from sevenn.calculator import SevenNetCalculator

        warnings.filterwarnings("ignore", message="No tensor product accelerator")
        alone = atoms.copy()
        alone.calc = SevenNetCalculator("7net-0", device=calc.potential.device)
        their_forces, their_stress = alone.get_forces(), alone.get_stress()
        their_energy = alone.get_potential_energy()
        largest = np.abs(their_forces).max()
        checks = (
            ("energy", "eV", energy, their_energy, ENERGY_TOLERANCE * len(atoms)),
            ("largest force", "eV/Å", np.abs(forces).max(), largest, FORCE_TOLERANCE * largest),
            ("stress xx", "eV/Å³", stress[0], their_stress[0], STRESS_TOLERANCE),
        )
        differences = (
            abs(energy - their_energy),
            np.abs(forces - their_forces).max(),
            np.abs(stress - their_stress).max(),
        )
        print(
            f"\n{'':<16}{f'{calc.comm.size} ranks':>16}{'one process':>16}{'difference':>12}"
            f"{'tolerance':>12}"
        )
        for (name, unit, ours, theirs, tolerance), difference in zip(
            checks, differences, strict=True
        ):
            good = difference <= tolerance
            verdict = verdict and good
            print(
                f"{name:<16}{ours:>16.8f}{theirs:>16.8f}{difference:>12.1e}{tolerance:>12.1e}"
                f"  {unit:<6} {'ok' if good else 'TOO LARGE'}"
            )
        print("(differences of forces and stress are the largest of all components)")
    return calc.comm.broadcast_object(verdict)


def run_md(atoms: Atoms, steps: int, rank_0: bool) -> None:
    """Run NVE dynamics from 300 K with ASE's own integrator; every rank does the same."""
    thermalize_momenta(atoms, temperature_K=300, rng=np.random.default_rng(1))
    Stationary(atoms)
    dynamics = VelocityVerlet(atoms, timestep=1.0 * units.fs)
    if rank_0:
        print(f"\n{'time / fs':>9}{'T / K':>9}{'E_pot / eV':>15}{'E_total / eV':>15}")
    for step, _ in enumerate(dynamics.irun(steps)):
        if step % 5 == 0:
            potential, kinetic = atoms.get_potential_energy(), atoms.get_kinetic_energy()
            temperature = atoms.get_temperature()
            if rank_0:
                print(f"{step:>9}{temperature:>9.1f}{potential:>15.5f}{potential + kinetic:>15.5f}")


def draw_domains(atoms: Atoms, owners: np.ndarray, path: Path) -> None:
    """Draw the structure from two sides, atoms coloured by owner rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    figure, views = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
    colours = plt.get_cmap("tab10")
    positions = atoms.get_positions(wrap=True)
    for view, (right, up, depth) in zip(views, ((0, 1, 2), (0, 2, 1)), strict=True):
        order = np.argsort(positions[:, depth])
        size = np.where(atoms.numbers[order] > 10, 90, 40)
        view.scatter(
            positions[order, right],
            positions[order, up],
            s=size,
            c=[colours(owner % 10) for owner in owners[order]],
            edgecolors="black",
            linewidths=0.4,
        )
        view.set(xlabel=f"{'xyz'[right]} / Å", ylabel=f"{'xyz'[up]} / Å", aspect="equal")
    handles = [
        Line2D([], [], marker="o", linestyle="", color=colours(rank % 10), label=f"rank {rank}")
        for rank in np.unique(owners)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
