"""R13: a run that was stopped and resumed is the run that was not, on any number of ranks.

On as many ranks as before every bit is the same; on others the paths agree up to round-off.
"""

import json
from functools import cache

import numpy as np
import pytest
import torch
from oracle import assert_near, assert_same_bits, on_rank_0
from simulations import (
    PER_FS,
    TEMPERATURE_K,
    THERMOSTATS,
    Path,
    assert_same_state,
    first_ranks,
    free_particles,
    hot_crystal,
    integrator,
    no_forces,
    numbers,
    record,
    simulate,
)
from structures import STRUCTURES

from nvdd_md.calculators import LennardJones, TwoHop
from nvdd_md.comm import SerialCommunicator
from nvdd_md.integrators import (
    Langevin,
    Linear,
    NoseHooverChain,
    Simulation,
    SimulationState,
    VelocityVerlet,
)

N_STEPS = 24


def through_a_file(state: SimulationState | None) -> SimulationState | None:
    """Return what comes back of a state: scalars through JSON, arrays through bytes."""
    if state is None:
        return None
    scalars = json.loads(json.dumps(dict(state.scalars), allow_nan=False))
    arrays = {
        name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
        for name, array in state.arrays.items()
    }
    return SimulationState(scalars, arrays)


def restored(state, name, comm, potential=None, **options) -> Simulation:
    given = {"device": "cpu", "skin": 0.3} | options
    state = through_a_file(state)
    return Simulation.restore(state, potential or TwoHop(), integrator(name), comm, **given)


def assert_same_path(got: Path, wanted: Path) -> None:
    """Compare all but the number of lists, which is counted from the restart on."""
    for name in ("steps", "thermo", "positions", "momenta"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), name)


# -- The same number of ranks: bit by bit


@pytest.mark.parametrize("name", THERMOSTATS)
@pytest.mark.parametrize("comm", [1, 2, 3], indirect=True)
def test_stopped_anywhere_and_resumed(comm, name):
    whole = record(simulate(comm, hot_crystal(), name, skin=0.2), N_STEPS)
    rebuilt = whole.steps[1:][np.diff(whole.rebuilds) > 0]
    assert len(rebuilt) >= 3
    # Before the first step, in the middle of a list, with a list just built, at the end.
    stops = [0, int(rebuilt[0]) - 1, int(rebuilt[1]), int(rebuilt[1]) + 2, N_STEPS]

    simulation = simulate(comm, hot_crystal(), name, skin=0.2)
    states = {}
    for stop in stops:
        simulation.run(stop - simulation.step)
        states[stop] = simulation.state()
        assert (states[stop] is None) == (comm.rank > 0)
    # Nothing is different because of runs that ended and states that were taken.
    np.testing.assert_array_equal(numbers(simulation.thermo()), whole.thermo[-1])
    np.testing.assert_array_equal(simulation.gather().positions, whole.positions[-1])

    for stop, state in states.items():
        simulation = restored(state, name, comm, skin=0.2)
        assert simulation.step == stop
        assert simulation.time_fs == 2.0 * stop
        np.testing.assert_array_equal(numbers(simulation.thermo()), whole.thermo[stop])
        wanted = whole.from_step(stop)
        if stop == N_STEPS:
            np.testing.assert_array_equal(simulation.gather().positions, whole.positions[-1])
            continue
        path = record(simulation, N_STEPS - stop)
        assert_same_path(path, wanted)
        # The list goes on where it was: it ends at the same step.
        assert (np.diff(path.rebuilds) > 0).tolist() == (np.diff(wanted.rebuilds) > 0).tolist()
    # And once more after a restart.
    again = restored(states[stops[2]], name, comm, skin=0.2).state()
    again = restored(again, name, comm, skin=0.2)
    assert_same_path(record(again, N_STEPS - stops[2]), whole.from_step(stops[2]))


@pytest.mark.parametrize("name", THERMOSTATS)
@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_looking_changes_nothing(comm, name):
    """R06: whatever is written at whatever cadence."""
    undisturbed = simulate(comm, hot_crystal(), name)
    undisturbed.run(30)

    watched = simulate(comm, hot_crystal(), name)
    watched.attach(lambda simulation: simulation.thermo(), 2)
    watched.attach(lambda simulation: simulation.state(), 3)
    watched.attach(lambda simulation: simulation.gather(), 5)
    watched.attach(lambda simulation: simulation.gather_arrays(["velocities", "forces"]), 7)
    watched.attach(lambda simulation: simulation.report(), 11)
    for n_steps in (0, 1, 6, 0, 23):
        watched.run(n_steps)
        watched.thermo()
        watched.state()
    assert watched.step == 30
    assert watched.n_rebuilds == undisturbed.n_rebuilds
    assert_same_state(comm, watched.state(), undisturbed.state())


@pytest.mark.parametrize("name", ["slab_across_the_face", "cluster_without_cell", "two_atoms"])
def test_resumed_without_a_full_cell(comm, name):
    atoms = STRUCTURES[name]()
    atoms.set_velocities(np.random.default_rng(3).normal(0.0, 0.02, (len(atoms), 3)) * PER_FS)
    whole = record(simulate(comm, atoms), 16)
    first = simulate(comm, atoms)
    first.run(9)
    assert_same_path(record(restored(first.state(), "NVE", comm), 7), whole.from_step(9))


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_resumed_far_from_the_cell(comm):
    """Images are kept: unwrapped positions go on, bit by bit."""
    atoms, options = free_particles(speed=0.1), {"potential": no_forces(), "skin": 1.0}
    whole = record(simulate(comm, atoms, **options), 60, every=10)
    assert np.abs(whole.positions[-1] - atoms.positions).max() > 26.0
    first = simulate(comm, atoms, **options)
    first.run(35)
    second = restored(first.state(), "NVE", comm, **options)
    assert_same_path(record(second, 25, every=10), whole.from_step(35))


# -- Another number of ranks


@cache
def alone(name: str, dtype: torch.dtype) -> Path:
    simulation = simulate(SerialCommunicator(), hot_crystal(), name, potential=TwoHop(dtype=dtype))
    return record(simulation, 110, every=110)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, *ranks) for name in THERMOSTATS for ranks in ((4, 1), (1, 3))),
        ("NVE", 2, 4),
        ("NVE", 3, 2),
    ],
)
@pytest.mark.parametrize("comm", [4], indirect=True)
def test_resumed_on_other_ranks(comm, name, before, after):
    check_other_ranks(comm, before, after, name, torch.float64, 1e-9)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 3)])
@pytest.mark.parametrize("comm", [4], indirect=True)
def test_resumed_on_other_ranks_in_single_precision(comm, before, after):
    check_other_ranks(comm, before, after, "NVE", torch.float32, 1e-4)


def check_other_ranks(comm, before, after, name, dtype, tolerance) -> None:
    state, path = None, None
    with first_ranks(comm, before) as part:
        if part is not None:
            simulation = simulate(part, hot_crystal(), name, potential=TwoHop(dtype=dtype))
            simulation.run(10)
            state = simulation.state()
    with first_ranks(comm, after) as part:
        if part is not None:
            simulation = restored(state, name, part, potential=TwoHop(dtype=dtype))
            path = record(simulation, 100, every=110)
            assert_same_bits(part, path.thermo, path.positions)
    wanted = on_rank_0(comm, lambda: alone(name, dtype))
    if path is not None:
        assert np.abs(path.positions[-1] - wanted.positions[-1]).max() < tolerance
        assert np.abs(path.momenta[-1] - wanted.momenta[-1]).max() < tolerance
        assert_near(path.thermo[-1], wanted.thermo[-1], tolerance)


def test_a_pair_potential_in_single_precision(comm):
    atoms = STRUCTURES["slab_with_vacuum"]()
    atoms.set_velocities(np.random.default_rng(3).normal(0.0, 0.005, (len(atoms), 3)) * PER_FS)
    potential = LennardJones(2.3, 0.3, rc=5.0, smooth=True, dtype=torch.float32)
    whole = record(simulate(comm, atoms, potential=potential), 20)
    first = simulate(comm, atoms, potential=potential)
    first.run(7)
    second = restored(first.state(), "NVE", comm, potential=potential)
    assert_same_path(record(second, 13), whole.from_step(7))


# -- What else goes on


def test_observers_see_every_step_once(comm):
    seen: list[tuple[str, int]] = []
    first = simulate(comm, hot_crystal())
    first.attach(lambda simulation: seen.append(("a", simulation.step)), 2)
    first.run(0)
    first.run(0)
    first.run(3)
    first.attach(lambda simulation: seen.append(("b", simulation.step)), 3)
    first.run(1)
    expected = [("a", 0), ("a", 2), ("b", 3), ("a", 4)]
    assert seen == expected
    state = first.state()
    first.run(2)

    second = restored(state, "NVE", comm)
    second.attach(lambda simulation: seen.append(("c", simulation.step)), 2)
    second.run(2)
    assert seen == [*expected, ("a", 6), ("b", 6), ("c", 6)]


def test_a_state_from_before_the_first_run_has_seen_nothing(comm):
    steps: list[int] = []
    second = restored(simulate(comm, hot_crystal()).state(), "NVE", comm)
    second.attach(lambda simulation: steps.append(simulation.step))
    second.run(2)
    assert steps == [0, 1, 2]


def test_the_state_taken_by_an_observer(comm):
    """Other observers of that step have had their turn, or will have it before the end of it."""
    states = {}
    first = simulate(comm, hot_crystal())
    first.attach(lambda simulation: states.update({simulation.step: simulation.state()}), 5)
    whole = record(first, 12)
    second = restored(states[10], "NVE", comm)
    assert_same_path(record(second, 2), whole.from_step(10))


@pytest.mark.parametrize(
    "make",
    [lambda ramp: Langevin(ramp, 5.0, seed=3), lambda ramp: NoseHooverChain(ramp, 40.0)],
    ids=["Langevin", "chain"],
)
@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_a_ramp_goes_on_where_it_was(comm, make):
    """R04: the target is a function of the absolute step."""

    def ramp() -> VelocityVerlet:
        schedule = Linear(300.0, 900.0, first_step=10, n_steps=20)
        return VelocityVerlet(2.0, make(schedule))

    def target(simulation: Simulation) -> float | None:
        return simulation.thermo().target_temperature_K

    whole = Simulation(hot_crystal(), TwoHop(), ramp(), comm, device="cpu", skin=0.3)
    first = Simulation(hot_crystal(), TwoHop(), ramp(), comm, device="cpu", skin=0.3)
    first.run(20)
    assert target(first) == 600.0
    state = through_a_file(first.state())
    second = Simulation.restore(state, TwoHop(), ramp(), comm, device="cpu", skin=0.3)
    assert target(second) == 600.0
    path = record(second, 20)
    assert_same_path(path, record(whole, 40).from_step(20))
    np.testing.assert_array_equal(path.thermo[:, 5], [*np.linspace(630, 900, 10), *[900.0] * 10])


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_the_conserved_energy_across_stages(comm):
    """Another thermostat takes over without a jump, in one run or with a restart in between."""
    stages = [*THERMOSTATS, "NVE"]
    staged = simulate(comm, hot_crystal(), stages[0], timestep_fs=1.0)
    resumed = simulate(comm, hot_crystal(), stages[0], timestep_fs=1.0)
    first = staged.thermo().conserved_eV
    for name in stages:
        before = staged.thermo()
        staged.set_integrator(integrator(name, 1.0))
        after = staged.thermo()
        assert after.conserved_eV == pytest.approx(before.conserved_eV, abs=1e-11)
        assert after.total_eV == before.total_eV
        assert (after.target_temperature_K is None) == (name == "NVE")
        staged.run(20)
        assert abs(staged.thermo().conserved_eV - first) < 2e-2

        resumed.set_integrator(integrator(name, 1.0))
        resumed.run(13)
        state = through_a_file(resumed.state())
        options = {"device": "cpu", "skin": 0.3}
        resumed = Simulation.restore(state, TwoHop(), integrator(name, 1.0), comm, **options)
        resumed.run(7)
        np.testing.assert_array_equal(numbers(resumed.thermo()), numbers(staged.thermo()))
    np.testing.assert_array_equal(resumed.gather().positions, staged.gather().positions)
    # The thermostats did something.
    assert abs(staged.thermo().total_eV - first) > 0.1


def test_a_chain_starts_anew_for_each_simulation(comm):
    """One object may serve two simulations, and two stages."""
    shared = VelocityVerlet(2.0, NoseHooverChain(TEMPERATURE_K, 30.0))
    options = {"device": "cpu", "skin": 0.3}
    paths = []
    for _ in range(2):
        simulation = Simulation(hot_crystal(), TwoHop(), shared, comm, **options)
        paths.append(record(simulation, 10))
    assert_same_path(*paths)
    simulation.set_integrator(simulation.integrator)  # as it is
    once_more = Simulation(hot_crystal(), TwoHop(), shared, comm, **options)
    simulation.run(10)
    once_more.run(20)
    np.testing.assert_array_equal(simulation.gather().positions, once_more.gather().positions)


# -- What a state is not good for


def test_a_state_of_another_integrator_is_refused(comm):
    simulation = simulate(comm, hot_crystal(), "chain")
    state = simulation.state()

    def restore(timestep_fs, thermostat):
        wanted = VelocityVerlet(timestep_fs, thermostat)
        return Simulation.restore(state, TwoHop(), wanted, comm, device="cpu", skin=0.3)

    with pytest.raises(ValueError, match=r"timestep of 2\.0 fs, the integrator has 1\.0 fs"):
        restore(1.0, NoseHooverChain(TEMPERATURE_K, 50.0))
    with pytest.raises(ValueError, match="thermostat NoseHooverChain, the integrator has Langevin"):
        restore(2.0, Langevin(TEMPERATURE_K, 5.0, 3))
    with pytest.raises(ValueError, match="chain of 3 links, this one has 4"):
        restore(2.0, NoseHooverChain(TEMPERATURE_K, 50.0, chain_length=4))
    state = None
    with pytest.raises(ValueError, match="rank 0 must give the state to go on from, got None"):
        restore(2.0, NoseHooverChain(TEMPERATURE_K, 50.0))
    simulation.run(1)


def test_what_cannot_be_written_is_an_error_on_all_ranks(comm):
    atoms = hot_crystal()
    atoms.info["odd"] = {1, 2}
    simulation = simulate(comm, atoms)
    with pytest.raises(TypeError, match="JSON"):
        simulation.state()
    simulation.run(1)
    assert simulation.gather().info == {"odd": {1, 2}}
