"""The numbered examples, run as users run them; their numbers come out of other programs too."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, fcc111
from ase.calculators.calculator import Calculator
from ase.calculators.lj import LennardJones
from ase.constraints import FixAtoms
from ase.io import read
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.neighborlist import neighbor_list
from ase.optimize import BFGS, FIRE

from nvdd_md.potential import LocalGraph

FOLDER = Path(__file__).resolve().parent.parent / "examples"
MPIEXEC = Path(sys.executable).with_name("mpiexec")
TIME_LIMIT_S = 120

needs_sevenn = pytest.mark.skipif(
    importlib.util.find_spec("sevenn") is None, reason="the package sevenn is not installed"
)
needs_mace = pytest.mark.skipif(
    importlib.util.find_spec("mace") is None, reason="runs in the MACE environment"
)


class Printed(dict[str, np.ndarray]):
    """The numbers of lines like ``energy = -3.2 eV``, by their names, and the whole text."""

    def __init__(self, text: str) -> None:
        self.text = text
        for name, values in re.findall(r"^([\w ]+?) =((?: \S*\d\b)+)", text, re.MULTILINE):
            assert name not in self, f"more than one rank printed {name!r}:\n{text}"
            self[name] = np.squeeze([float(value) for value in values.split()])


def run(name: str, ranks: int, folder: Path, *arguments: str) -> Printed:
    """Run an example in a folder and return what it printed."""
    command = [sys.executable, str(FOLDER / name), *arguments]
    if ranks > 1:
        command = [str(MPIEXEC), "-n", str(ranks), *command]
    job = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    return Printed(job.stdout)


def load(name: str) -> ModuleType:
    """Return an example as a module, without running it."""
    spec = importlib.util.spec_from_file_location("example", FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sevennet() -> Calculator:
    from sevenn.calculator import SevenNetCalculator

    return SevenNetCalculator("7net-0", device="cpu")


def test_the_table_has_every_example():
    listed = re.findall(r"\(([0-9]\w+\.py)\)", (FOLDER / "README.md").read_text())
    assert listed == sorted(path.name for path in FOLDER.glob("[0-9]*.py"))
    assert len(listed) >= 7


# -- SevenNet, whose float32 adds some 1e-7 of the energy and 1e-6 of the largest force


@needs_sevenn
@pytest.mark.parametrize("ranks", [1, 2])
def test_first_force_call(ranks, sevennet, tmp_path):
    printed = run("01_first_force_call.py", ranks, tmp_path)
    atoms = bulk("Si", cubic=True, a=5.431) * (2, 2, 2)
    atoms.rattle(0.05, seed=0)
    atoms.calc = sevennet
    forces, stress = atoms.get_forces(), atoms.get_stress()
    largest = np.abs(forces).max()
    assert largest > 1.0
    assert abs(printed["energy"] - atoms.get_potential_energy()) < 1e-6 * len(atoms)
    assert abs(printed["largest force component"] - largest) < 2e-5 * largest
    assert np.abs(printed["force on atom 0"] - forces[0]).max() < 2e-5 * largest
    assert np.abs(printed["stress"] * units.GPa - stress).max() < 1e-6
    assert f"64 atoms on {ranks} rank(s)" in printed.text


@needs_sevenn
def test_relax_with_cell(sevennet, tmp_path):
    printed = run("02_relax_with_cell.py", 2, tmp_path)
    assert "converged: True" in printed.text

    # The minimum of the energy over the lattice constant, without forces and optimisers.
    lengths = np.linspace(5.43, 5.49, 9)
    energies = []
    for length in lengths:
        atoms = bulk("Si", cubic=True, a=length)
        atoms.calc = sevennet
        energies.append(atoms.get_potential_energy() / len(atoms))
    fit = np.polynomial.Polynomial.fit(lengths, energies, 4)
    (length,) = (
        root.real
        for root in fit.deriv().roots()
        if abs(root.imag) < 1e-9 and lengths[0] < root.real < lengths[-1]
    )
    # Optimised to 1e-3 eV in the cell, whose force constant against a strain of all axes is
    # 3 B V = 300 eV: 2e-5 Å. As much for the fit, of a fourth degree and to energies in float32.
    assert abs(printed["lattice constant"] - length) < 1e-4
    assert abs(printed["energy"] - fit(length)) < 3e-6
    steps = [line.split()[1] for line in log_lines(tmp_path / "relax.log")]
    assert steps == [str(step) for step in range(len(steps))], "not written by one rank"


def log_lines(path: Path) -> list[str]:
    """Return the lines of an optimiser's log that stand for steps."""
    return re.findall(r"^\w+: +\d+ .*", path.read_text(), re.MULTILINE)


@needs_sevenn
def test_slab_with_vacuum(sevennet, tmp_path):
    printed = run("04_slab_with_vacuum.py", 2, tmp_path)
    assert "atoms of each rank: 12 12" in printed.text

    crystal = bulk("Al", a=4.04)
    # The open axis may have any length.
    slab = fcc111("Al", (2, 2, 6), a=4.04, vacuum=6.0)
    slab.pbc = (True, True, False)
    crystal.calc = slab.calc = sevennet

    def surface_energy() -> float:
        excess = slab.get_potential_energy() - len(slab) * crystal.get_potential_energy()
        return excess / (2 * np.linalg.norm(np.cross(*slab.cell.array[:2]))) * 16.02176634

    cleaved = surface_energy()
    assert cleaved > 0.3
    # 1e-6 eV per atom in both energies of the difference, over 2 × 28 Å².
    assert abs(printed["cleaved surface"] - cleaved) < 2e-5

    # Tighter than the example, and by another optimiser.
    slab.set_constraint(FixAtoms(mask=np.isin(slab.get_tags(), (3, 4))))
    assert BFGS(slab, logfile=None).run(fmax=1e-3, steps=100)
    relaxed = surface_energy()
    assert cleaved - relaxed > 2e-3
    # Float32 as above, and what 0.003 eV/Å on 16 atoms leave above the minimum, at the 2 eV/Å² of
    # layers that move as one: 4e-5 eV over 2 × 28 Å², 1e-5 J/m².
    assert abs(printed["relaxed surface"] - relaxed) < 5e-5


# -- Lennard-Jones in float64, compared with ASE's own


def argon() -> LennardJones:
    return LennardJones(sigma=3.4, epsilon=0.0104, rc=8.5, smooth=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_md_with_ase(ranks, tmp_path):
    printed = run("03_md_with_ase.py", ranks, tmp_path)
    temperatures, energies = argon_by_ase()
    # Round-off of float64, 1e-15, grows by some e per picosecond.
    assert abs(printed["mean temperature"] - np.mean(temperatures)) < 2e-6
    assert abs(printed["total energy"] - energies[-1]) < 1e-8
    assert abs(printed["drift of the energy"] - (energies[-1] - energies[0]) / 108) < 1e-10
    # 0.04 % of the kinetic energy of an atom, 3/2 k T = 5 meV.
    assert abs(printed["drift of the energy"]) < 2e-6
    assert f"301 evaluations of 108 atoms on {ranks} rank(s)" in printed.text

    header, *lines = (tmp_path / "md.log").read_text().splitlines()
    assert header.startswith("Time")
    assert len(lines) == 21
    frames = read(tmp_path / "md.traj", ":")
    assert len(frames) == 21
    stored = frames[-1].get_potential_energy()
    frames[-1].calc = argon()
    assert abs(frames[-1].get_potential_energy() - stored) < 1e-9


def argon_by_ase() -> tuple[list[float], list[float]]:
    """Return temperatures (K) and total energies (eV) of the same dynamics on one process."""
    atoms = bulk("Ar", cubic=True, a=5.3) * (3, 3, 3)
    atoms.calc = argon()
    rng = np.random.default_rng(1)
    thermalize_momenta(atoms, temperature_K=80, rng=rng)
    Stationary(atoms)
    settings = {"temperature_K": 40, "friction": 0.005 / units.fs, "fixcm": False}
    Langevin(atoms, 4 * units.fs, rng=rng, **settings).run(100)
    steps = VelocityVerlet(atoms, 4 * units.fs).irun(200)
    series = [(atoms.get_temperature(), atoms.get_total_energy()) for _ in steps]
    temperatures, energies = zip(*series, strict=True)
    return temperatures, energies


def test_neb(tmp_path):
    one, two = (run("06_neb.py", ranks, tmp_path) for ranks in (1, 2))
    for printed in (one, two):
        assert "converged: True" in printed.text
    assert abs(one["barrier"] - two["barrier"]) < 2e-8  # the last digit printed

    # By symmetry the saddle point is half-way: no band is needed to find it.
    crystal = bulk("Ar", cubic=True, a=5.3) * (3, 3, 3)
    half_way = 0.5 * (crystal.positions[0] + crystal.positions[1])
    energies = []
    for hopping in (False, True):
        atoms = crystal.copy()
        del atoms[0]
        if hopping:
            atoms.positions[0] = half_way
            atoms.set_constraint(FixAtoms([0]))
        atoms.calc = argon()
        assert FIRE(atoms, logfile=None).run(fmax=1e-5, steps=500)
        energies.append(atoms.get_potential_energy())
    # What forces of 2e-4 eV/Å on a dozen atoms leave above a minimum, at 0.1 eV/Å²: 3e-6 eV.
    assert abs(two["barrier"] - (energies[1] - energies[0])) < 1e-5


# -- A potential of one's own


@pytest.mark.parametrize("ranks", [1, 2])
def test_bring_your_own_potential(ranks, tmp_path):
    name = "07_bring_your_own_potential.py"
    printed = run(name, ranks, tmp_path)
    atoms = bulk("Cu", cubic=True, a=3.6) * (3, 3, 3)
    atoms.numbers[::4] = 28
    atoms.rattle(0.1, seed=2)
    energy, forces = undivided(load(name).TwoLayers(), atoms)
    largest = np.abs(forces).max()
    assert largest > 0.01
    assert abs(printed["energy"] - energy) < 2e-10  # the last digit printed
    assert abs(printed["sum of squares of forces"] - np.sum(forces**2)) < 2e-10
    assert abs(printed["largest force component"] - largest) < 1e-6
    assert printed["largest sum of forces"] < 1e-12
    # Round-off, 1e-14 eV over a step of 1e-4 Å, and (1e-4 Å)² times a third derivative.
    assert printed["largest difference from finite differences"] < 1e-8


def undivided(potential, atoms: Atoms) -> tuple[float, np.ndarray]:
    """Return energy and forces of one forward on all atoms, with ASE's list of neighbours."""
    centre, neighbour, shift = neighbor_list("ijS", atoms, potential.cutoff)
    positions = torch.tensor(atoms.positions, requires_grad=True)
    numbers = torch.tensor(atoms.numbers)
    vectors = positions[neighbour] - positions[centre] + torch.tensor(shift @ atoms.cell.array)
    graph = LocalGraph(
        numbers=numbers,
        neighbour_numbers=numbers,
        edge_centre=torch.tensor(centre),
        edge_neighbour=torch.tensor(neighbour),
        edge_vectors=vectors,
        n_owned=len(atoms),
        system=torch.zeros_like(numbers),
        n_systems=1,
        info={},
        arrays={},
        cell=torch.tensor(atoms.cell.array),
        pbc=torch.tensor(atoms.pbc),
    )
    energy = potential.forward(graph)["energies"].sum()
    (slope,) = torch.autograd.grad(energy, positions)
    return energy.item(), -slope.numpy()


# -- MACE


@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamics_on_ranks(ranks, tmp_path):
    printed = run("08_dynamics_on_ranks.py", ranks, tmp_path)
    assert abs(printed["drift of the energy"]) < 1e-5
    assert printed["atoms on rank 0"] == 256 / ranks
    final = read(tmp_path / "argon.traj")
    energy, forces = final.get_potential_energy(), final.get_forces()
    final.calc = argon()  # ASE's
    assert abs(final.get_potential_energy() - energy) < 1e-9
    np.testing.assert_allclose(final.get_forces(), forces, rtol=0, atol=1e-11)
    assert abs(final.get_total_energy() - printed["total energy"]) < 1e-8
    assert abs(np.abs(forces).max() - printed["largest force"]) < 1e-8


@needs_sevenn
def test_job(sevennet, tmp_path):
    for file in ("job.toml", "quartz.xyz"):
        shutil.copy(FOLDER / file, tmp_path)
    command = [sys.executable, "-m", "nvdd_md", "run", "job.toml"]
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    frames = read(tmp_path / "quartz-run" / "md.traj", ":")
    assert [frame.info["step"] for frame in frames] == [0, 10, 20, 30, 40, 50, 60]
    assert not np.array_equal(frames[0].positions, frames[-1].positions)
    last = frames[-1]
    forces = last.get_forces()
    last.calc = sevennet
    np.testing.assert_allclose(last.get_forces(), forces, rtol=0, atol=2e-4)


@needs_mace
def test_mace_from_file(tmp_path):
    name = "05_mace_from_file.py"
    printed = run(name, 2, tmp_path)
    check_against_mace(printed)

    with warnings.catch_warnings(action="ignore"):
        from mace.calculators import MACECalculator

        file = tmp_path / "mine.model"
        load(name).save_random_model(file)
        atoms = bulk("Si", cubic=True, a=5.431) * (2, 2, 2)
        atoms.rattle(0.05, seed=0)
        atoms.calc = MACECalculator(model_paths=str(file), device="cpu", default_dtype="float64")
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    for ranks in (1, 2):
        printed = run(name, ranks, tmp_path, file.name)
        check_against_mace(printed)
        assert abs(printed["energy"] - energy) < 1e-12 * abs(energy) + 1e-9  # a digit printed
        assert abs(printed["largest force component"] - np.abs(forces).max()) < 2e-9


def check_against_mace(printed: Printed) -> None:
    """Expect float64 round-off only."""
    assert printed["difference of energies"] < 1e-12 * abs(printed["energy"])
    largest = printed["largest force component"]
    assert largest > 0.1
    assert printed["largest difference of forces"] < 1e-11 * max(1.0, largest)
