"""What integrators, thermostats and schedules promise, on one process."""

import json
import math

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.md.nose_hoover_chain import NoseHooverChainNVT
from ase.md.velocitydistribution import Stationary
from domain_cases import PartialSum
from oracle import TwoHop as Reference
from simulations import (
    PER_FS,
    THERMOSTATS,
    assert_same_state,
    free_particles,
    hot_crystal,
    integrator,
    no_forces,
    numbers,
    record,
    simulate,
)

from nvdd_md.calculators import TwoHop
from nvdd_md.comm import SerialCommunicator
from nvdd_md.integrators import (
    Langevin,
    Limits,
    Linear,
    NoseHooverChain,
    RunawayError,
    Simulation,
    Thermostat,
    VelocityRescaling,
    VelocityVerlet,
)
from nvdd_md.integrators.random_numbers import ScalarNoise, Stream, normals

ALONE = SerialCommunicator()


def begin(atoms: Atoms, thermostat: Thermostat | None, timestep_fs: float = 2.0, **options):
    given = {"potential": TwoHop(), "device": "cpu", "skin": 0.3} | options
    potential = given.pop("potential")
    return Simulation(atoms, potential, VelocityVerlet(timestep_fs, thermostat), ALONE, **given)


def momenta(simulation: Simulation) -> np.ndarray:
    return simulation.gather_arrays(["momenta"])["momenta"]


def positions(simulation: Simulation) -> np.ndarray:
    return simulation.gather_arrays(["positions"])["positions"]


# -- Arguments

REFUSED = {
    "timestep_fs": (
        lambda value: VelocityVerlet(value),
        (0.0, -1.0, math.nan, math.inf, 100.1),
        "timestep_fs must be above 0 and at most 100 fs",
    ),
    "temperature_K": (
        lambda value: Langevin(value, 1.0, 1),
        (-1.0, "300", None, True, Linear(300.0, -1.0, 0, 5)),
        "temperature_K must",
    ),
    "temperature that is not finite": (
        lambda value: VelocityRescaling(value, 10.0, 1),
        (math.nan, math.inf),
        "needs finite values",
    ),
    "temperature of a chain": (
        lambda value: NoseHooverChain(value, 10.0),
        (0.0, Linear(0.0, 300.0, 0, 5), Linear(300.0, 0.0, 0, 5)),
        "needs temperature_K above 0",
    ),
    "friction_per_ps": (
        lambda value: Langevin(300.0, value, 1),
        (-1.0, math.nan, math.inf),
        "friction_per_ps must be >= 0",
    ),
    "damping_fs": (
        lambda value: VelocityRescaling(300.0, value, 1),
        (0.0, -1.0, math.nan, math.inf),
        "damping_fs must be above 0",
    ),
    "damping_fs of a chain": (
        lambda value: NoseHooverChain(300.0, value),
        (0.0, -1.0, math.nan, math.inf),
        "damping_fs must be above 0",
    ),
    "chain_length": (
        lambda value: NoseHooverChain(300.0, 10.0, value),
        (0, -1),
        "chain_length must be at least 1",
    ),
    "seed": (lambda value: Langevin(300.0, 1.0, value), (-1, 2**64, 1.5, None), "seed"),
    "seed of rescaling": (
        lambda value: VelocityRescaling(300.0, 1.0, value),
        (-1, 2**64, 1.5, None),
        "seed",
    ),
    "n_steps": (lambda value: Linear(1.0, 2.0, 0, value), (-1,), "n_steps >= 0"),
    "start": (lambda value: Linear(value, 2.0, 0, 1), (math.nan, math.inf), "finite values"),
    "end": (lambda value: Linear(1.0, value, 0, 1), (math.nan, -math.inf), "finite values"),
    "max_move_A": (lambda value: Limits(max_move_A=value), (0.0, -1.0, math.nan), "max_move_A"),
    "max_drift_eV_per_atom": (
        lambda value: Limits(max_drift_eV_per_atom=value),
        (0.0, -1.0, math.nan),
        "max_drift_eV_per_atom",
    ),
}


@pytest.mark.parametrize(
    ("make", "value", "message"),
    [
        pytest.param(make, value, message, id=f"{name}-{value!r}")
        for name, (make, values, message) in REFUSED.items()
        for value in values
    ],
)
def test_values_that_are_refused(make, value, message):
    with pytest.raises(ValueError, match=message):
        make(value)


def test_a_thermostat_must_be_one():
    for wrong in (300.0, "Langevin", Langevin):
        with pytest.raises(TypeError, match="thermostat must be a Thermostat or None"):
            VelocityVerlet(1.0, wrong)


def test_zero_is_a_value():
    assert Langevin(0.0, 0.0, 0).temperature_K(5) == 0.0
    assert VelocityRescaling(0, 1.0, 0).temperature_K(5) == 0.0
    assert Limits(None, None) == Limits(max_move_A=None, max_drift_eV_per_atom=None)


def test_numbers_of_numpy_are_numbers():
    assert Langevin(np.float32(300.0), 1.0, 1).temperature_K(0) == 300.0
    assert NoseHooverChain(np.int64(300), np.float64(10.0)).temperature_K(0) == 300.0


def test_descriptions_tell_all_parameters_apart():
    """Ranks compare them."""
    ramp = Linear(300.0, 400.0, 0, 10)
    different = [
        VelocityVerlet(1.0),
        VelocityVerlet(1.0 + 2e-16),
        VelocityVerlet(1.0, Thermostat(0.0)),
        *(VelocityVerlet(1.0, Langevin(*values)) for values in langevins(ramp)),
        VelocityVerlet(1.0, VelocityRescaling(300.0, 10.0, 1)),
        VelocityVerlet(1.0, VelocityRescaling(300.0, 11.0, 1)),
        VelocityVerlet(1.0, VelocityRescaling(300.0, 10.0, 2)),
        VelocityVerlet(1.0, NoseHooverChain(300.0, 10.0)),
        VelocityVerlet(1.0, NoseHooverChain(300.0, 10.0, 4)),
        VelocityVerlet(1.0, NoseHooverChain(ramp, 10.0, 4)),
    ]
    assert len({one.description() for one in different}) == len(different)
    assert integrator("chain").description() == integrator("chain").description()


def langevins(ramp: Linear) -> list[tuple[float | Linear, float, int]]:
    first = (300.0, 1.0, 1)
    later = (Linear(300.0, 400.0, 0, 11), 1.0, 1)
    return [first, (301.0, 1.0, 1), (300.0, 1.1, 1), (300.0, 1.0, 2), (ramp, 1.0, 1), later]


# -- Schedules


def test_a_ramp_is_a_function_of_the_absolute_step():
    ramp = Linear(100.0, 500.0, first_step=20, n_steps=8)
    assert [ramp(step) for step in (0, 19, 20)] == [100.0] * 3
    assert [ramp(20 + k) for k in range(9)] == [100.0 + 50.0 * k for k in range(9)]
    assert ramp(10**12) == 500.0
    # Down as well as up, and the ends to the last bit.
    falling = Linear(0.3, 0.1, 0, 3)
    assert (falling(0), falling(3)) == (0.3, 0.1)
    assert 0.1 < falling(2) < falling(1) < 0.3


def test_a_ramp_of_no_steps_is_at_its_end():
    assert Linear(1.0, 2.0, 5, 0)(5) == 2.0
    assert Linear(1.0, 2.0, 5, 0)(4) == 1.0


def test_a_thermostat_follows_its_ramp():
    """Without forces a friction that erases all memory gives the target at every step."""
    atoms = free_particles(64, speed=0.0)
    simulation = begin(atoms, Langevin(Linear(0.0, 400.0, 1, 3), 1e6, 1), potential=no_forces())
    seen = []
    simulation.attach(lambda now: seen.append(now.thermo()))
    simulation.run(5)
    targets = [thermo.target_temperature_K for thermo in seen]
    assert targets == pytest.approx([0.0, 0.0, 400.0 / 3.0, 800.0 / 3.0, 400.0, 400.0])
    assert seen[1].temperature_K < 1e-12
    for thermo in seen[2:]:
        assert 0.6 < thermo.temperature_K / thermo.target_temperature_K < 1.5


# -- Velocity Verlet


def test_a_step_is_the_textbook_one():
    atoms = hot_crystal()
    simulation = begin(atoms, None)
    simulation.run(0)
    before = simulation.gather()
    simulation.run(1)
    after = simulation.gather()
    dt, masses = 2.0 * units.fs, atoms.get_masses()[:, None]
    half = before.get_momenta() + 0.5 * dt * before.get_forces()
    np.testing.assert_allclose(after.positions, before.positions + dt * half / masses, rtol=1e-15)
    wanted = half + 0.5 * dt * after.get_forces()
    np.testing.assert_allclose(after.get_momenta(), wanted, rtol=1e-13, atol=1e-13)


def test_velocity_verlet_is_reversible():
    atoms = hot_crystal()
    simulation = begin(atoms, None)
    simulation.run(50)
    back = simulation.gather()
    assert np.abs(back.positions - atoms.positions).max() > 0.3
    back.set_momenta(-back.get_momenta())
    back.calc = None
    simulation = begin(back, None)
    simulation.run(50)
    assert np.abs(positions(simulation) - atoms.positions).max() < 1e-11
    assert np.abs(momenta(simulation) + atoms.get_momenta()).max() < 1e-11


def test_what_there_is_between_runs():
    simulation = begin(hot_crystal(), None, timestep_fs=0.5)
    assert (simulation.step, simulation.time_fs, simulation.n_atoms) == (0, 0.0, 48)
    simulation.run(3)
    thermo = simulation.thermo()
    assert (simulation.step, simulation.time_fs) == (3, 1.5) == (thermo.step, thermo.time_fs)
    assert thermo.target_temperature_K is None
    assert simulation.n_owned == 48
    names = ["numbers", "positions", "momenta", "velocities", "forces", "energies", "masses"]
    arrays = simulation.gather_arrays(names)
    assert list(arrays) == names
    velocities = arrays["momenta"] / arrays["masses"][:, None] / PER_FS
    np.testing.assert_allclose(arrays["velocities"], velocities, rtol=1e-15)
    assert arrays["energies"].sum() == pytest.approx(thermo.potential_eV, rel=1e-14)
    np.testing.assert_array_equal(arrays["forces"], simulation.gather().get_forces())


def test_arrays_before_the_first_step():
    simulation = begin(hot_crystal(), None)
    forces = simulation.gather_arrays(["forces"])["forces"]
    atoms = hot_crystal()
    atoms.calc = Reference()
    np.testing.assert_allclose(forces, atoms.get_forces(), atol=1e-12)


def test_a_potential_without_energies_per_atom():
    simulation = begin(hot_crystal(), None, potential=PartialSum())
    assert math.isfinite(simulation.thermo().potential_eV)
    with pytest.raises(KeyError, match="no per-atom quantity 'energies'"):
        simulation.gather_arrays(["energies"])


# -- Thermo


@pytest.mark.parametrize("name", THERMOSTATS)
def test_thermo_is_what_ase_finds(name):
    simulation = simulate(ALONE, hot_crystal(), name)
    simulation.run(7)
    thermo, atoms = simulation.thermo(), simulation.gather()
    n_free = simulation.integrator.degrees_of_freedom(48)
    assert n_free == (144 if name == "Langevin" else 141)
    atoms.calc = Reference()
    assert thermo.potential_eV == pytest.approx(atoms.get_potential_energy(), abs=1e-10)
    assert thermo.kinetic_eV == pytest.approx(atoms.get_kinetic_energy(), rel=1e-14)
    assert thermo.total_eV == thermo.potential_eV + thermo.kinetic_eV
    if name != "Langevin":
        Stationary(atoms, preserve_temperature=False)
    assert thermo.temperature_K * n_free == pytest.approx(atoms.get_temperature() * 144, rel=1e-12)
    assert thermo.volume_A3 == pytest.approx(atoms.get_volume(), rel=1e-14)
    np.testing.assert_allclose(thermo.stress, atoms.get_stress(), atol=1e-12)
    pressure = -atoms.get_stress(include_ideal_gas=True)[:3].mean() / units.GPa
    assert thermo.pressure_GPa == pytest.approx(pressure, rel=1e-10)
    assert thermo.target_temperature_K == (None if name == "NVE" else 700.0)


def test_thermo_of_a_molecule():
    atoms = Atoms("Cu2", [[0.0, 0.0, 0.0], [2.4, 0.0, 0.0]])
    thermo = begin(atoms, None).thermo()
    assert (thermo.stress, thermo.pressure_GPa, thermo.volume_A3) == (None, None, None)
    assert thermo.temperature_K == 0.0
    atoms = Atoms("Cu", momenta=[[1.0, 0.0, 0.0]])
    for thermostat in (None, Langevin(300.0, 1.0, 1), NoseHooverChain(300.0, 10.0)):
        thermo = begin(atoms, thermostat).thermo()
        # One atom has no motion but that of its centre of mass.
        assert thermo.temperature_K == pytest.approx(2 * thermo.kinetic_eV / (3 * units.kB))


@pytest.mark.parametrize("name", THERMOSTATS)
def test_what_is_conserved(name):
    """Its change in 0.4 ps falls with the square of the timestep; the energy itself changes."""
    changes = []
    for timestep_fs in (2.0, 1.0):
        simulation = simulate(ALONE, hot_crystal(), name, timestep_fs)
        path = record(simulation, round(400 / timestep_fs), every=round(20 / timestep_fs))
        changes.append(np.ptp(path.thermo[:, 3]))
        assert (np.ptp(path.thermo[:, 2]) > 0.3) == (name != "NVE")
    assert changes[0] < 0.01
    assert changes[1] < changes[0] / 2.5


def test_the_state_of_a_thermostat_is_json():
    for kind in THERMOSTATS.values():
        thermostat = kind.make() or Thermostat(0.0)
        thermostat.restore(json.loads(json.dumps(thermostat.state())))


# -- Langevin


def test_without_friction_it_is_velocity_verlet():
    """Half a drift twice is one drift up to round-off."""
    free = record(begin(hot_crystal(), Langevin(500.0, 0.0, 1)), 30)
    wanted = record(begin(hot_crystal(), None), 30)
    assert np.abs(free.positions - wanted.positions).max() < 1e-12
    assert np.abs(free.thermo[:, 3] - wanted.thermo[:, 3]).max() < 1e-11


def test_one_step_of_langevin_without_forces():
    atoms, friction, temperature, seed = free_particles(), 3.0, 450.0, 12
    simulation = begin(atoms, Langevin(temperature, friction, seed), potential=no_forces())
    conserved = simulation.thermo().conserved_eV
    simulation.run(1)
    masses = atoms.get_masses()[:, None]
    c = math.exp(-friction * 2.0 / 1000.0)
    xi = normals(seed, Stream.THERMOSTAT, 1, torch.arange(24)).numpy()
    p0 = atoms.get_momenta()
    p1 = c * p0 + np.sqrt((1 - c**2) * masses * units.kB * temperature) * xi
    np.testing.assert_allclose(momenta(simulation), p1, rtol=1e-13)
    moved = (p0 + p1) / masses * units.fs
    np.testing.assert_allclose(positions(simulation), atoms.positions + moved, rtol=1e-14)
    # All the energy that came in or went out is heat.
    assert abs(simulation.thermo().total_eV - conserved) > 1e-3
    assert simulation.thermo().conserved_eV == pytest.approx(conserved, abs=1e-12)


# -- Velocity rescaling


def test_one_step_of_rescaling_without_forces():
    atoms, tau, temperature, seed = free_particles(), 7.0, 450.0, 12
    Stationary(atoms)
    simulation = begin(atoms, VelocityRescaling(temperature, tau, seed), potential=no_forces())
    kinetic = simulation.thermo().kinetic_eV
    simulation.run(1)
    noise = ScalarNoise(seed, Stream.THERMOSTAT, 1)
    first = noise.normal()
    others = 2.0 * noise.gamma(0.5 * (69 - 1))
    c = math.exp(-2.0 / tau)
    ratio = 0.5 * units.kB * temperature / kinetic
    square = c + (1 - c) * (first**2 + others) * ratio
    square += 2 * first * math.sqrt(c * (1 - c) * ratio)
    factors = momenta(simulation) / atoms.get_momenta()
    np.testing.assert_allclose(factors, math.sqrt(square), rtol=1e-12)


def test_atoms_at_rest_stay_at_rest():
    atoms = free_particles(speed=0.0)
    simulation = begin(atoms, VelocityRescaling(300.0, 10.0, 1), potential=no_forces())
    simulation.run(3)
    assert not momenta(simulation).any()
    assert simulation.thermo().temperature_K == 0.0


def test_rescaling_to_zero_kelvin_takes_all_motion():
    atoms = free_particles()
    Stationary(atoms)
    simulation = begin(atoms, VelocityRescaling(0.0, 2.0, 1), potential=no_forces())
    kinetic = simulation.thermo().kinetic_eV
    simulation.run(5)
    # c = 1/e in each step, and no noise.
    assert simulation.thermo().kinetic_eV == pytest.approx(kinetic * math.exp(-5.0), rel=1e-12)
    assert simulation.thermo().conserved_eV == pytest.approx(
        simulation.thermo().potential_eV + kinetic, rel=1e-12
    )


# -- Nosé-Hoover chain


@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_chain_of_ase(length):
    """The same algorithm, except that ASE counts 3 N degrees of freedom."""
    chain = NoseHooverChain(700.0, 40.0, length)
    chain.conserves_momentum = False
    simulation = begin(hot_crystal(), chain)
    assert simulation.integrator.degrees_of_freedom(48) == 144
    atoms = hot_crystal()
    atoms.calc = Reference()
    dynamics = NoseHooverChainNVT(
        atoms, 2.0 * units.fs, temperature_K=700.0, tdamp=40.0 * units.fs, tchain=length
    )
    start = dynamics.get_conserved_energy()
    assert simulation.thermo().conserved_eV == pytest.approx(start, abs=1e-10)
    simulation.run(100)
    dynamics.run(100)
    assert np.abs(positions(simulation) - atoms.positions).max() < 1e-9
    assert np.abs(momenta(simulation) - atoms.get_momenta()).max() < 1e-9
    conserved = simulation.thermo().conserved_eV
    assert conserved == pytest.approx(dynamics.get_conserved_energy(), abs=1e-9)
    # What it conserves is far from the energy.
    assert abs(conserved - start) < 5e-3
    assert abs(simulation.thermo().total_eV - start) > 0.5


def test_a_chain_holds_its_temperature():
    """Averages over 2 ps, against the target and against ASE's chain."""
    simulation = begin(hot_crystal(), NoseHooverChain(700.0, 40.0))
    simulation.run(200)
    path = record(simulation, 1000, every=10)
    temperatures = path.thermo[:, 4]
    # Of 100 records, and fluctuations of 700 K sqrt(2/141).
    assert abs(temperatures.mean() - 700.0) < 4 * 83.0 / math.sqrt(100)
    assert 0.6 * 83.0 < temperatures.std() < 1.5 * 83.0


def test_a_chain_on_a_ramp_conserves_its_energy():
    """The energy of the chain itself goes with T; its change with T is counted as heat."""
    atoms = bulk("Cu", cubic=True, a=3.7) * (2, 2, 2)
    changes = []
    for timestep_fs in (2.0, 1.0):
        n_steps = round(800 / timestep_fs)
        chain = NoseHooverChain(Linear(150.0, 1800.0, 0, n_steps), 30.0)
        simulation = begin(atoms, chain, timestep_fs)
        simulation.draw_velocities(150.0, seed=3)
        path = record(simulation, n_steps, every=n_steps // 20)
        changes.append(np.ptp(path.thermo[:, 3]))
        assert path.thermo[-1, 4] > 900.0
        # In the variables of the chain alone there is far more.
        links = simulation.integrator.thermostat.energy(simulation._dynamics.motion)
        gained = path.thermo[-1, 2] - path.thermo[0, 2]
        assert abs(links + gained) > 1.0
    assert changes[0] < 0.1
    assert changes[1] < changes[0] / 2.5


def test_a_refused_step_of_a_chain_on_a_ramp_leaves_no_trace():
    simulation = begin(hot_crystal(), NoseHooverChain(Linear(300.0, 900.0, 0, 20), 30.0))
    simulation.run(5)
    before = simulation.state()
    simulation._dynamics.limits = Limits(max_move_A=1e-4)
    with pytest.raises(RunawayError, match="step 6"):
        simulation.run(1)
    assert_same_state(ALONE, simulation.state(), before)


def test_a_chain_of_another_length_is_refused():
    chain = NoseHooverChain(300.0, 10.0, 3)
    with pytest.raises(ValueError, match="chain of 2 links, this one has 3"):
        chain.restore(NoseHooverChain(300.0, 10.0, 2).state())


# -- One object, several simulations


@pytest.mark.parametrize("name", THERMOSTATS)
def test_an_integrator_is_not_used_up(name):
    shared = integrator(name)
    first, second = (
        Simulation(hot_crystal(), TwoHop(), shared, ALONE, device="cpu") for _ in range(2)
    )
    first.run(5)
    second.run(5)
    np.testing.assert_array_equal(numbers(first.thermo()), numbers(second.thermo()))
    assert shared.thermostat.state() == integrator(name).thermostat.state()


def test_errors_are_arithmetic_errors():
    assert issubclass(RunawayError, ArithmeticError)
    simulation = begin(hot_crystal(), None, timestep_fs=100.0)
    with pytest.raises(ArithmeticError, match="max_move_A = 1"):
        simulation.run(1)


@pytest.mark.parametrize("name", ["rescaling", "chain"])
def test_a_moving_system_is_thermostatted_about_its_centre(name):
    atoms = hot_crystal()
    Stationary(atoms)
    at_rest = simulate(ALONE, atoms.copy(), name)
    flight = np.array([0.02, -0.01, 0.03]) * PER_FS
    atoms.set_velocities(atoms.get_velocities() + flight)
    momentum = atoms.get_momenta().sum(axis=0)
    moving = simulate(ALONE, atoms, name)
    for simulation in (at_rest, moving):
        simulation.run(100)
    np.testing.assert_allclose(moving.gather().get_momenta().sum(axis=0), momentum, rtol=1e-12)
    now, then = moving.thermo(), at_rest.thermo()
    assert now.temperature_K == pytest.approx(then.temperature_K, rel=1e-8)
    assert now.pressure_GPa == pytest.approx(then.pressure_GPa, rel=1e-6)
    assert now.kinetic_eV > then.kinetic_eV + 0.1
    path = flight * 100 * 2.0 / PER_FS
    moved = moving.gather().positions - at_rest.gather().positions
    np.testing.assert_allclose(moved, np.tile(path, (48, 1)), rtol=0, atol=1e-8)
