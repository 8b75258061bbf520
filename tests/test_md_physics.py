"""Laws of statistical mechanics that trajectories have to obey, on at most 256 atoms.

Seeds are fixed. Where a law holds on average, the rule to pass is: within 4 standard errors, these
from averages over 20 blocks of the run (see `block_averages`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from block_averages import FloatArray, jackknife, log_ratio, mean
from scipy import stats
from scipy.spatial import cKDTree

from nvdd_md.calculators import LennardJones
from nvdd_md.integrators import (
    Langevin,
    Linear,
    NoseHooverChain,
    Simulation,
    Thermo,
    Thermostat,
    VelocityRescaling,
    VelocityVerlet,
)

SIGMA = 3.405  # Å, argon
EPSILON = 119.8 * units.kB  # eV


def fcc(n_cells: int, reduced_density: float) -> Atoms:
    """Return 4 n_cells³ argon atoms on a lattice."""
    a = SIGMA * (4.0 / reduced_density) ** (1.0 / 3.0)
    return bulk("Ar", cubic=True, a=a) * (n_cells, n_cells, n_cells)


def smooth_argon() -> LennardJones:
    return LennardJones(SIGMA, EPSILON, rc=2.2 * SIGMA, smooth=True)


def watch(simulation: Simulation, n_steps: int, every: int) -> list[Thermo]:
    """Run, and return what was measured."""
    seen: list[Thermo] = []
    simulation.attach(lambda now: seen.append(now.thermo()), every)
    simulation.run(n_steps)
    return seen


# -- Errors of the timestep


def test_energy_fluctuates_in_proportion_to_timestep_squared():
    """The same 3.2 ps of constant energy: twice the timestep, 4 ± 0.3 times the fluctuation."""
    fluctuations = []
    for timestep_fs in (4.0, 8.0, 16.0):
        integrator = VelocityVerlet(timestep_fs)
        simulation = Simulation(fcc(3, 0.85), smooth_argon(), integrator, skin=1.5)
        simulation.draw_velocities(200.0, seed=1)
        seen = watch(simulation, round(3200 / timestep_fs), every=round(16 / timestep_fs))
        fluctuations.append(np.std([thermo.conserved_eV for thermo in seen]))
    ratios = np.divide(fluctuations[1:], fluctuations[:-1])
    np.testing.assert_allclose(ratios, 4.0, atol=0.3)


def test_baoab_in_a_harmonic_crystal():
    """At any timestep the potential energy is exact, and the kinetic one low by a known factor.

    Leimkuhler & Matthews 2013: for a vibration of frequency ω, the mean potential energy is kT/2
    and the mean kinetic energy kT/2 (1 - ω²Δt²/4). At 1 K argon is harmonic. Of its 3 N modes, 3
    are translations. The mean of ω² over all modes, the trace of the Hessian, is from the force
    that drives one atom back.
    """
    temperature_K, timestep_fs, moved = 1.0, 80.0, 1e-4
    crystal = fcc(2, 1.06)
    displaced = crystal.copy()
    displaced.positions[0, 0] += moved
    resting, pulled = (
        Simulation(atoms, smooth_argon(), VelocityVerlet(timestep_fs)).gather()
        for atoms in (crystal, displaced)
    )
    squared_frequency = -pulled.get_forces()[0, 0] / moved / crystal.get_masses()[0]

    integrator = VelocityVerlet(timestep_fs, Langevin(temperature_K, 5.0, seed=41))
    simulation = Simulation(crystal, smooth_argon(), integrator)
    simulation.draw_velocities(temperature_K, seed=42)
    simulation.run(200)
    seen = watch(simulation, 3000, every=2)
    lowest = resting.get_potential_energy()
    potential = mean([(thermo.potential_eV - lowest) / units.kB for thermo in seen])
    assert potential.agrees_with(0.5 * (3 * 32 - 3) * temperature_K), str(potential)
    factor = 1.0 - squared_frequency * (timestep_fs * units.fs) ** 2 / 4.0
    assert factor < 0.9  # else this would be a short timestep
    temperature = mean([thermo.temperature_K for thermo in seen])
    assert temperature.agrees_with(factor * temperature_K), f"{temperature}, not {factor}"


# -- Temperature


@pytest.mark.parametrize(
    "make",
    [lambda: Langevin(150.0, 4.0, seed=3), lambda: NoseHooverChain(150.0, 200.0)],
    ids=["Langevin", "NoseHooverChain"],
)
def test_light_and_heavy_element_have_the_same_temperature(make: Callable[[], Thermostat]):
    """Equipartition: Σ p²/m of an element is kT times its degrees of freedom.

    These are 3 Σ (1 - m/M) where total momentum is zero, with the total mass M, else 3 n. In the
    beginning the light atoms have all the kinetic energy.
    """
    atoms, light, masses = mixture()
    integrator = VelocityVerlet(6.0, make())
    potential = LennardJones(
        {"Ar": SIGMA, "Kr": 1.05 * SIGMA}, {"Ar": EPSILON, "Kr": EPSILON}, rc=7.0, smooth=True
    )
    simulation = Simulation(atoms, potential, integrator, skin=1.5)
    twice_kinetic: list[FloatArray] = []

    def measure(now: Simulation) -> None:
        momenta = now.gather_arrays(["momenta"])["momenta"]
        twice_kinetic.append((momenta**2).sum(1) / masses)

    simulation.run(1000)
    simulation.attach(measure, every=4)
    simulation.run(4000)
    conserved = integrator.thermostat.conserves_momentum
    degrees_of_freedom = 3.0 * (1.0 - conserved * masses / masses.sum())
    for element in (light, ~light):
        of_element = np.array(twice_kinetic)[:, element].sum(1)
        temperature = mean(of_element / degrees_of_freedom[element].sum() / units.kB)
        assert temperature.agrees_with(150.0), str(temperature)


def mixture() -> tuple[Atoms, FloatArray, FloatArray]:
    """Return 108 atoms of 10 and 200 u, which of them are light, and the masses."""
    atoms = fcc(3, 0.8)
    atoms.symbols[::2] = "Kr"
    light = atoms.numbers == 18
    masses = np.where(light, 10.0, 200.0)
    atoms.set_masses(masses)
    velocities = np.random.default_rng(4).normal(size=(len(atoms), 3)) * light[:, None]
    velocities[light] -= velocities[light].mean(0)
    atoms.set_velocities(velocities * np.sqrt(2.0 * units.kB * 150.0 / 10.0))
    return atoms, light, masses


# -- The canonical distribution

COLD_K, HOT_K = 200.0, 260.0

THERMOSTATS = {
    "Langevin": lambda temperature_K: Langevin(temperature_K, 5.0, seed=11),
    "VelocityRescaling": lambda temperature_K: VelocityRescaling(temperature_K, 60.0, seed=12),
    "NoseHooverChain": lambda temperature_K: NoseHooverChain(temperature_K, 100.0),
}


@cache
def canonical_run(name: str, temperature_K: float) -> dict[str, FloatArray]:
    """Return energies of a dense fluid of 32 atoms, in eV, one every 60 fs."""
    integrator = VelocityVerlet(15.0, THERMOSTATS[name](temperature_K))
    simulation = Simulation(fcc(2, 0.8), smooth_argon(), integrator, skin=2.0)
    simulation.draw_velocities(temperature_K, seed=13)
    simulation.run(400)
    seen = watch(simulation, 4800, every=4)
    energies = ("potential_eV", "kinetic_eV", "total_eV")
    return {name: np.array([getattr(thermo, name) for thermo in seen]) for name in energies}


@pytest.mark.parametrize("energy", ["potential_eV", "total_eV"])
@pytest.mark.parametrize("name", THERMOSTATS)
def test_energies_at_two_temperatures_have_the_canonical_ratio(name: str, energy: str):
    """ln p₂(E)/p₁(E) is linear in E, with the slope 1/kT₁ - 1/kT₂ (Shirts 2013).

    For the potential energy and the total energy alike: density of states and partition function
    drop out. Linear: the quadratic term, where one is allowed, is zero. That the error of the slope
    is below 12 % is part of the test: a distribution of another width has another slope.
    """
    cold, hot = canonical_run(name, COLD_K)[energy], canonical_run(name, HOT_K)[energy]
    slope = jackknife(lambda *runs: log_ratio(*runs, degree=1)[1], cold, hot)
    expected = 1.0 / (units.kB * COLD_K) - 1.0 / (units.kB * HOT_K)
    assert slope.agrees_with(expected), f"{slope}, not {expected:.6g}"
    assert slope.error < 0.12 * expected, str(slope)
    bend = jackknife(lambda *runs: log_ratio(*runs, degree=2)[2], cold, hot)
    assert bend.agrees_with(0.0), str(bend)


@pytest.mark.parametrize("name", THERMOSTATS)
def test_kinetic_energy_has_mean_and_variance_of_the_gamma_distribution(name: str):
    """K/kT has mean and variance N_f/2, where N_f is 3 N - 3 if momentum is conserved, else 3 N."""
    shape = 0.5 * (3 * 32 - 3 * THERMOSTATS[name](COLD_K).conserves_momentum)
    for temperature_K in (COLD_K, HOT_K):
        kinetic = canonical_run(name, temperature_K)["kinetic_eV"] / (units.kB * temperature_K)
        average, variance = mean(kinetic), jackknife(np.var, kinetic)
        assert average.agrees_with(shape), f"{average}, not {shape}"
        assert variance.agrees_with(shape), f"{variance}, not {shape}"


def test_velocity_rescaling_gives_a_gamma_distribution():
    """K/kT of samples 240 fs apart, which are independent: they are rescaled with a τ of 60 fs.

    Kolmogorov-Smirnov, p > 6e-5: 4 standard deviations.
    """
    samples = [
        canonical_run("VelocityRescaling", temperature_K)["kinetic_eV"][::4] / temperature_K
        for temperature_K in (COLD_K, HOT_K)
    ]
    shape = 0.5 * (3 * 32 - 3)
    assert stats.kstest(np.concatenate(samples) / units.kB, stats.gamma(shape).cdf).pvalue > 6e-5


# -- Equation of state

CUTOFF = 3.0
AT_CUTOFF = 4.0 * (CUTOFF**-12 - CUTOFF**-6)
"""Pair energy at the cutoff, in units of ε."""


@pytest.mark.parametrize(
    ("temperature", "density", "energy", "pressure"),
    [(0.85, 0.82, -5.7947, 0.55355), (0.90, 0.776, -5.4689, 0.24056)],
)
def test_lennard_jones_fluid_has_the_reference_energy_and_pressure(
    temperature: float, density: float, energy: float, pressure: float
):
    """Potential energy per atom and pressure, all in reduced units.

    Reference: NIST Standard Reference Simulation Website (NIST SRD 173), "Lennard-Jones Fluid
    Properties", NVT Monte Carlo of the potential cut (not shifted) at 3 σ with the standard
    long-range corrections. Its errors are neglected. The equation of state of Kolafa & Nezbeda,
    Fluid Phase Equilib. 100, 1 (1994), gives the same energies within 0.001 and pressures within
    0.014.

    * Our potential is also shifted. The number n of pairs within the cutoff is counted: a
      configuration has n u(3σ) less energy than here, by which its energy is corrected and its
      Boltzmann weight as well.
    * Both pressures are from the virial of the force inside the cutoff, the same in both
      potentials. The impulse of a cut potential at the cutoff is in neither: the long-range
      correction stands for the forces beyond, of a potential that goes on. So nothing is added.
    """
    n, u, p = fluid(temperature, density)
    u = u + AT_CUTOFF * n
    n_atoms = 256

    def reweighted(n: FloatArray, values: FloatArray) -> float:
        weights = np.exp(-AT_CUTOFF / temperature * (n - n.mean()))
        return float(np.average(values, weights=weights))

    tail = 8.0 / 3.0 * np.pi * density * (CUTOFF**-9 / 3.0 - CUTOFF**-3)
    found = jackknife(reweighted, n, u / n_atoms + tail)
    assert found.agrees_with(energy), f"energy {found}, not {energy}"
    tail = 16.0 / 3.0 * np.pi * density**2 * (CUTOFF**-9 * 2.0 / 3.0 - CUTOFF**-3)
    found = jackknife(reweighted, n, p + tail)
    assert found.agrees_with(pressure), f"pressure {found}, not {pressure}"


def fluid(temperature: float, density: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return pairs within the cutoff, energy and pressure of 256 atoms, every 150 fs."""
    target_K = temperature * EPSILON / units.kB
    melting = Langevin(Linear(3.0 * target_K, target_K, 100, 400), 3.0, seed=21)
    potential = LennardJones(SIGMA, EPSILON, rc=CUTOFF * SIGMA)
    simulation = Simulation(fcc(4, density), potential, VelocityVerlet(15.0, melting), skin=1.2)
    simulation.draw_velocities(3.0 * target_K, seed=22)
    simulation.run(800)
    box = SIGMA * (256 / density) ** (1.0 / 3.0)
    pairs: list[int] = []

    def count(now: Simulation) -> None:
        wrapped = now.gather_arrays(["positions"])["positions"] % box
        tree = cKDTree(wrapped, boxsize=box)
        pairs.append((tree.count_neighbors(tree, CUTOFF * SIGMA) - 256) // 2)

    simulation.attach(count, every=10)
    seen = watch(simulation, 3000, every=10)
    energies = np.array([thermo.potential_eV for thermo in seen]) / EPSILON
    pressures = np.array([thermo.pressure_GPa for thermo in seen]) * units.GPa
    return np.array(pairs), energies, pressures * SIGMA**3 / EPSILON


# -- Diffusion


def test_free_particles_diffuse():
    """⟨|Δr|²⟩ = 6 D (t - (1 - exp(-γt))/γ), D = kT/(mγ): from free flight to diffusion.

    On the way the atoms pass many periodic images of the cell. The potential is there in name only.
    """
    temperature_K, friction_per_ps, box, every = 300.0, 10.0, 6.0, 5
    positions = np.random.default_rng(31).uniform(0.0, box, (256, 3))
    atoms = Atoms("He256", positions, cell=[box] * 3, pbc=True)
    integrator = VelocityVerlet(10.0, Langevin(temperature_K, friction_per_ps, seed=32))
    simulation = Simulation(atoms, LennardJones(1e-3, 1e-12), integrator, skin=0.6)
    simulation.draw_velocities(temperature_K, seed=33, remove_momentum=False)
    path: list[FloatArray] = []
    simulation.attach(lambda now: path.append(now.gather_arrays(["positions"])["positions"]), every)
    simulation.run(2000)
    friction = friction_per_ps / (1000.0 * units.fs)
    diffusion = units.kB * temperature_K / (atoms.get_masses()[0] * friction)
    for n_frames in (1, 4, 40):
        time = n_frames * every * integrator.timestep
        moves = np.diff(np.array(path)[::n_frames], axis=0)
        of_atoms = mean((moves**2).sum(2).mean(0))  # blocks of atoms, which are independent
        expected = 6.0 * diffusion * (time - (1.0 - np.exp(-friction * time)) / friction)
        assert of_atoms.agrees_with(expected), f"{of_atoms}, not {expected} after {time * friction}"
    assert np.abs(path[-1] - path[0]).max() > 5.0 * box
