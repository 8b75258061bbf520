"""What goes wrong in a simulation is the same error on all ranks, and it can go on where it may."""

import re

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from oracle import assert_same_bits
from simulations import (
    PER_FS,
    TEMPERATURE_K,
    THERMOSTATS,
    assert_same_state,
    hot_crystal,
    integrator,
    numbers,
    owner_of,
    record,
    simulate,
)

from nvdd_md.agreement import DisagreementError
from nvdd_md.calculators import LennardJones, TwoHop
from nvdd_md.evaluation import NonFiniteError
from nvdd_md.integrators import (
    Langevin,
    Limits,
    NoseHooverChain,
    RunawayError,
    Simulation,
    VelocityVerlet,
)

PAIRS = (2, 3)
"""Numbers of ranks for what does not depend on it."""

several = pytest.mark.parametrize("comm", PAIRS, indirect=True)


class Spoilt(TwoHop):
    """Two-hop with a silver atom that spoils its results once a neighbour comes near.

    Attributes
    ----------
    factor : float
        The energy of the silver atom is multiplied by it: nan spoils forces too.
    offset : float
        Added to its energy: nan spoils nothing but the energy.
    infinite_slope : bool
        Spoil nothing but the forces.
    """

    def __init__(
        self,
        near: float,
        factor: float = 1.0,
        offset: float = 0.0,
        infinite_slope: bool = False,
    ) -> None:
        super().__init__()
        self.near, self.factor, self.offset = near, factor, offset
        self.infinite_slope = infinite_slope

    def forward(self, graph):
        energies = super().forward(graph)["energies"]
        distance = torch.linalg.vector_norm(graph.edge_vectors.detach(), dim=1)
        silver = graph.numbers[graph.edge_centre] == 47
        spoilt = torch.zeros_like(energies, dtype=torch.bool)
        spoilt[graph.edge_centre[silver & (distance < self.near)]] = True
        energies = energies * torch.where(spoilt, self.factor, 1.0)
        if self.infinite_slope:
            rows = torch.nonzero(spoilt)[:, 0]
            energies = energies.index_add(0, rows, torch.sqrt(0.0 * energies[rows]))
        return {"energies": energies + torch.where(spoilt, self.offset, 0.0)}


def approach() -> Atoms:
    """Return a chain of atoms, and a silver one (id 0) that flies towards its end."""
    x = [-3.0, *(2.6 * np.arange(12))]
    atoms = Atoms("AgCu12", np.array(x)[:, None] * [1.0, 0.0, 0.0])
    velocities = np.zeros((13, 3))
    velocities[0, 0] = 0.02 * PER_FS
    atoms.set_velocities(velocities)
    return atoms


def distance_by_step(comm, n_steps: int) -> np.ndarray:
    path = record(simulate(comm, approach(), timestep_fs=1.0), n_steps)
    return np.linalg.norm(path.positions[:, 0] - path.positions[:, 1], axis=1)


# -- The model


def test_nan_forces_stop_all_ranks_at_that_step(comm):
    distances = distance_by_step(comm, 30)
    first = int(np.argmax(distances < 2.6))
    assert 5 < first < 25
    simulation = simulate(comm, approach(), timestep_fs=1.0, potential=Spoilt(2.6, factor=np.nan))
    rank = owner_of(simulation, 0)
    where = rf"step {first}: the forces on atom 0 \(Ag\), owned by rank {rank}, are not finite"
    with pytest.raises(NonFiniteError, match=where) as caught:
        simulation.run(30)
    assert_same_bits(comm, str(caught.value))

    # What the model was asked about is still there.
    assert simulation.step == first
    arrays = simulation.gather_arrays(["positions", "momenta", "forces"])
    if arrays is not None:
        near = np.linalg.norm(arrays["positions"][0] - arrays["positions"][1])
        assert near == pytest.approx(distances[first], abs=1e-12)
        assert np.isnan(arrays["forces"][0]).all()
    for refused in (simulation.thermo, simulation.state, simulation.gather):
        with pytest.raises(NonFiniteError, match=where):
            refused()
    with pytest.raises(NonFiniteError, match=where):
        simulation.run(1)
    assert simulation.step == first


def test_nan_at_the_last_step_of_a_run(comm):
    """No step follows that would find it: the end of the run does."""
    first = int(np.argmax(distance_by_step(comm, 30) < 2.6))
    simulation = simulate(comm, approach(), timestep_fs=1.0, potential=Spoilt(2.6, factor=np.nan))
    simulation.run(first - 1)
    state = simulation.state()
    with pytest.raises(NonFiniteError, match=rf"step {first}: the forces on atom 0 \(Ag\)"):
        simulation.run(1)
    assert simulation.step == first
    # The step before was good.
    again = Simulation.restore(state, TwoHop(), integrator("NVE", 1.0), comm, device="cpu")
    again.run(3)
    assert again.step == first + 2


def test_nan_energy(comm):
    first = int(np.argmax(distance_by_step(comm, 30) < 2.6))
    simulation = simulate(comm, approach(), timestep_fs=1.0, potential=Spoilt(2.6, offset=np.nan))
    with pytest.raises(NonFiniteError, match=f"step {first}: the energy is not finite"):
        simulation.run(30)
    assert simulation.step == first


@pytest.mark.parametrize("how", [{"factor": np.nan}, {"infinite_slope": True}])
def test_nan_before_the_first_step(comm, how):
    simulation = simulate(comm, approach(), potential=Spoilt(4.0, **how))
    where = r"step 0: the forces on atom 0 \(Ag\)"
    for refused in (simulation.thermo, simulation.state, lambda: simulation.run(0)):
        with pytest.raises(NonFiniteError, match=where):
            refused()
    seen: list[int] = []
    simulation.attach(lambda simulation: seen.append(simulation.step))
    with pytest.raises(NonFiniteError, match=where):
        simulation.run(5)
    assert seen == [0]


def test_an_observer_that_looks_meets_the_same_error(comm):
    simulation = simulate(comm, approach(), timestep_fs=1.0, potential=Spoilt(2.6, factor=np.inf))
    simulation.attach(lambda simulation: simulation.thermo())
    with pytest.raises(NonFiniteError, match="the forces on atom 0"):
        simulation.run(30)


# -- Atoms that run away


def test_a_timestep_far_too_long(comm):
    simulation = simulate(comm, hot_crystal(), timestep_fs=90.0)
    before = simulation.gather()
    with pytest.raises(
        RunawayError, match=r"step 1: atom .* would move .* Å in one step"
    ) as caught:
        simulation.run(10)
    assert_same_bits(comm, str(caught.value))
    named = re.search(r"atom (\d+) \(Cu\), owned by rank (\d+)", str(caught.value))
    atom, rank = map(int, named.groups())
    assert rank == owner_of(simulation, atom)
    # The step was not made.
    assert simulation.step == 0
    np.testing.assert_array_equal(simulation.gather().positions, before.positions)
    speeds = np.linalg.norm(before.get_velocities(), axis=1)
    assert speeds[atom] > np.median(speeds)


def test_atoms_on_top_of_each_other(comm):
    atoms = hot_crystal()
    atoms.positions[17] = atoms.positions[40] + [0.0, 0.0, 0.05]
    simulation = simulate(comm, atoms, potential=LennardJones(2.3, 0.1, rc=5.0))
    with pytest.raises(RunawayError, match=r"step 1: atom (17|40) \(Cu\)"):
        simulation.run(10)
    atoms.positions[17] = atoms.positions[40]
    simulation = simulate(comm, atoms, potential=LennardJones(2.3, 0.1, rc=5.0))
    with pytest.raises(NonFiniteError, match=r"step 0: the forces on atom 17 \(Cu\)"):
        simulation.run(10)


def test_energy_that_leaves_its_range(comm):
    limits = Limits(max_move_A=None, max_drift_eV_per_atom=0.02)
    simulation = simulate(comm, hot_crystal(), timestep_fs=30.0, limits=limits)
    with pytest.raises(RunawayError, match=r"conserved energy .* eV per atom since") as e:
        simulation.run(50)
    assert_same_bits(comm, str(e.value))
    assert f"step {simulation.step}: " in str(e.value)
    # The same run without limits goes on.
    limits = Limits(max_move_A=None, max_drift_eV_per_atom=None)
    free = simulate(comm, hot_crystal(), timestep_fs=30.0, limits=limits)
    start = free.thermo().conserved_eV
    free.run(simulation.step)
    drift = (free.thermo().conserved_eV - start) / 48
    assert abs(drift) > 0.02
    assert f"changed by {drift:.3g} eV" in str(e.value)


def test_drift_is_counted_from_new_velocities(comm):
    simulation = simulate(comm, hot_crystal(), "Langevin", timestep_fs=0.5)
    simulation.run(2)
    simulation.draw_velocities(30_000.0, seed=1, replace=True)
    simulation.run(2)
    assert simulation.step == 4


@pytest.mark.parametrize("name", THERMOSTATS)
@several
def test_a_refused_step_leaves_no_trace(comm, name):
    """Not in positions, nor in chains, heat or the list: a gentler run would go on from there."""
    simulation = simulate(comm, hot_crystal(), name)
    simulation.run(5)
    undisturbed = simulation.state()
    simulation._dynamics.limits = Limits(max_move_A=1e-4)
    with pytest.raises(RunawayError, match="step 6"):
        simulation.run(3)
    assert_same_state(comm, simulation.state(), undisturbed)
    simulation._dynamics.limits = Limits()
    simulation.run(3)
    whole = simulate(comm, hot_crystal(), name)
    whole.run(8)
    np.testing.assert_array_equal(numbers(simulation.thermo()), numbers(whole.thermo()))


# -- Observers


@pytest.mark.parametrize("name", THERMOSTATS)
@pytest.mark.parametrize(("error", "shared"), [(ValueError, ValueError), (OSError, RuntimeError)])
@several
def test_an_observer_that_fails_on_one_rank(comm, name, error, shared):
    def fail(simulation: Simulation) -> None:
        simulation.thermo()
        if simulation.step == 6 and comm.rank == comm.size - 1:
            raise error("disk full")

    simulation = simulate(comm, hot_crystal(), name)
    simulation.attach(fail, every=3)
    with pytest.raises(shared, match=f"rank {comm.size - 1}: .*disk full"):
        simulation.run(12)
    assert simulation.step == 6
    # It can go on as if nothing had been.
    simulation.run(6)
    whole = simulate(comm, hot_crystal(), name)
    whole.run(12)
    np.testing.assert_array_equal(simulation.gather().positions, whole.gather().positions)
    np.testing.assert_array_equal(numbers(simulation.thermo()), numbers(whole.thermo()))


def test_an_observer_that_fails_everywhere_keeps_its_error(comm):
    class OwnError(Exception):
        pass

    def fail(simulation: Simulation) -> None:
        raise OwnError("enough")

    for n_steps in (0, 3):  # at the end of a run, and before another step
        simulation = simulate(comm, hot_crystal())
        simulation.attach(fail)
        with pytest.raises(OwnError, match="enough"):
            simulation.run(n_steps)
        assert simulation.step == 0
    with pytest.raises(OwnError, match="enough"):
        simulation.observe(fail)


@several
def test_a_failure_at_the_last_step(comm):
    def fail(simulation: Simulation) -> None:
        if comm.rank == 1 and simulation.step == 4:
            raise ValueError("no room")

    simulation = simulate(comm, hot_crystal())
    simulation.attach(fail)
    with pytest.raises(ValueError, match="rank 1: no room"):
        simulation.run(4)
    assert simulation.step == 4
    simulation.run(1)
    with pytest.raises(ValueError, match="rank 1: once"):
        simulation.observe(lambda _: fail_on(comm, 1))
    simulation.run(1)
    assert simulation.step == 6


def fail_on(comm, rank: int) -> None:
    if comm.rank == rank:
        raise ValueError("once")


# -- Stopping


def test_one_rank_stops_all_after_the_same_step(comm):
    simulation = simulate(comm, hot_crystal())
    seen: list[int] = []
    simulation.attach(lambda simulation: seen.append(simulation.step))
    last = comm.size - 1
    simulation.stop_request = lambda: 15 if comm.rank == last and simulation.step >= 4 else 0
    simulation.run(20)
    assert simulation.stop_reason == 15
    assert len(set(comm.gather_objects(simulation.step))) == 1
    assert 4 <= simulation.step <= 6
    assert seen == list(range(simulation.step + 1))
    # The step was made in full: what follows is what would have followed.
    stopped = simulation.step
    simulation.stop_request = None
    simulation.run(10 - stopped)
    assert simulation.stop_reason == 0
    whole = simulate(comm, hot_crystal())
    whole.run(10)
    np.testing.assert_array_equal(simulation.gather().positions, whole.gather().positions)


@several
def test_the_lowest_rank_gives_the_reason(comm):
    simulation = simulate(comm, hot_crystal())
    simulation.stop_request = lambda: 10 + comm.rank if comm.rank else 0
    simulation.run(5)
    assert (simulation.step, simulation.stop_reason) == (1, 11)


# -- Ranks that do not do the same


@several
def test_ranks_ask_for_different_things(comm):
    odd = comm.rank == 1
    simulation = simulate(comm, hot_crystal())
    with pytest.raises(DisagreementError, match=r"rank 0: \('5'.*rank 1: \('6'"):
        simulation.run(6 if odd else 5)
    with pytest.raises(DisagreementError, match=r"velocities of a simulation: rank 0: .300.*400"):
        simulation.draw_velocities(400.0 if odd else 300.0, seed=1)
    with pytest.raises(DisagreementError, match="change of a simulation's integrator"):
        simulation.set_integrator(integrator("chain" if odd else "NVE"))
    chains = VelocityVerlet(2.0, NoseHooverChain(300.0, 50.0, chain_length=4 if odd else 3))
    with pytest.raises(DisagreementError, match=r"chain_length=3.*chain_length=4"):
        simulation.set_integrator(chains)
    with pytest.raises(DisagreementError, match="different calls at the same time: rank 0"):
        simulation.gather() if odd else simulation.run(1)
    with pytest.raises(ValueError, match="rank 1: n_steps must be >= 0, got -1"):
        simulation.run(-1 if odd else 1)
    with pytest.raises(ValueError, match="rank 1: n_steps must be an integer, got 'all'"):
        simulation.run("all" if odd else 1)
    with pytest.raises(ValueError, match=r"rank 1: .* the new integrator has 1 fs"):
        simulation.set_integrator(integrator("NVE", 1.0 if odd else 2.0))
    if odd:
        simulation.attach(lambda simulation: None, 7)
    with pytest.raises(DisagreementError, match="a run of a simulation"):
        simulation.run(1)
    assert simulation.step == 0
    other = simulate(comm, hot_crystal())
    other.run(1)


@several
def test_ranks_begin_with_different_things(comm):
    odd = comm.rank == 1
    atoms = hot_crystal()
    simulate(comm, None if comm.rank else atoms).run(1)
    simulate(comm, None if odd else atoms).run(1)
    for change in (nudge, rename, heat, shear, charge):
        other = hot_crystal()
        if odd:
            change(other)
        with pytest.raises(DisagreementError, match=r"ranks \[1\] gave other atoms than rank 0"):
            simulate(comm, other)
    with pytest.raises(ValueError, match="rank 0 must give the atoms of a simulation, got None"):
        simulate(comm, atoms if odd else None)
    with pytest.raises(DisagreementError, match=r"VelocityVerlet.*Langevin"):
        simulate(comm, atoms, "Langevin" if odd else "NVE")
    with pytest.raises(DisagreementError, match="different models or settings"):
        simulate(comm, atoms, skin=0.4 if odd else 0.3)
    with pytest.raises(DisagreementError, match="max_move_A"):
        simulate(comm, atoms, limits=Limits(max_move_A=2.0) if odd else None)
    simulate(comm, atoms).run(1)


def nudge(atoms: Atoms) -> None:
    atoms.positions[3, 1] += 1e-6


def rename(atoms: Atoms) -> None:
    atoms.numbers[5] = 28


def heat(atoms: Atoms) -> None:
    atoms.arrays["momenta"][0] += 0.1


def shear(atoms: Atoms) -> None:
    atoms.cell[0, 1] += 0.1


def charge(atoms: Atoms) -> None:
    atoms.info["charge"] = 1


# -- What is refused at once, on all ranks


def spoilt(name: str, value: object) -> Atoms:
    atoms = hot_crystal()
    atoms.set_tags(range(48))
    atoms.arrays.setdefault("masses", atoms.get_masses())
    atoms.arrays[name][7] = value
    return atoms


def held() -> Atoms:
    atoms = hot_crystal()
    atoms.set_constraint(FixAtoms([0]))
    return atoms


def with_objects() -> Atoms:
    atoms = hot_crystal()
    atoms.arrays["odd"] = np.array([None] * 48, dtype=object)
    return atoms


REFUSED = {
    "constraints": (held, r"cannot keep constraints yet, and the atoms have \['FixAtoms'\]"),
    "positions": (lambda: spoilt("positions", np.nan), r"not finite.*7"),
    "momenta": (lambda: spoilt("momenta", np.inf), "momenta are not finite; .* index 7"),
    "masses": (lambda: spoilt("masses", np.nan), "masses are not finite; .* index 7"),
    "no mass": (lambda: spoilt("masses", 0.0), "masses must be above 0; atom 7 has 0 u"),
    "objects": (with_objects, r"atoms.arrays\['odd'\] holds object, which cannot move"),
    "no atoms": (Atoms, "at least one atom"),
    "a path": (lambda: "POSCAR", "must be an ase.Atoms object or None, got str"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("comm", [1, 2], indirect=True)
def test_atoms_that_are_refused(comm, what):
    make, message = REFUSED[what]
    for atoms in (make(), None if comm.rank else make()):
        with pytest.raises(ValueError, match=message):
            simulate(comm, atoms)


@pytest.mark.parametrize("comm", [1, 2], indirect=True)
def test_arguments_that_are_refused(comm):
    atoms, verlet = hot_crystal(), VelocityVerlet(2.0)
    with pytest.raises(TypeError, match="integrator must be a VelocityVerlet, got <"):
        Simulation(atoms, TwoHop(), Langevin(300.0, 1.0, 1), comm)
    with pytest.raises(TypeError, match="potential must be an object"):
        Simulation(atoms, "two-hop", verlet, comm)
    with pytest.raises(TypeError, match="limits must be a Limits or None"):
        Simulation(atoms, TwoHop(), verlet, comm, limits={"max_move_A": 2.0})
    with pytest.raises(ValueError, match="skin must be a length"):
        Simulation(atoms, TwoHop(), verlet, comm, skin=-1.0)

    simulation = simulate(comm, atoms)
    for n_steps in (-1, 2.0, "3", True, None):
        with pytest.raises(ValueError, match="n_steps must be"):
            simulation.run(n_steps)
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="every must be"):
            simulation.attach(lambda simulation: None, every)
    with pytest.raises(TypeError, match="integrator must be a VelocityVerlet, got None"):
        simulation.set_integrator(None)
    with pytest.raises(ValueError, match=r"timestep of 2 fs .* the new integrator has 1 fs"):
        simulation.set_integrator(VelocityVerlet(1.0))
    with pytest.raises(KeyError, match=r"no per-atom quantity 'speed'; there are \['energies', "):
        simulation.gather_arrays(["speed"])
    with pytest.raises(ValueError, match="temperature_K must be finite and >= 0"):
        simulation.draw_velocities(-1.0, seed=1)
    with pytest.raises(ValueError, match="seed"):
        simulation.draw_velocities(300.0, seed=-1)
    simulation.run(np.int64(2))
    assert simulation.step == 2


# -- Velocities to begin with


def test_velocities_are_kept_or_replaced(comm):
    atoms = hot_crystal()
    simulation = simulate(comm, atoms)
    given = simulation.gather().get_momenta()
    np.testing.assert_array_equal(given, atoms.get_momenta())
    assert not simulation.draw_velocities(TEMPERATURE_K, seed=4)
    np.testing.assert_array_equal(simulation.gather().get_momenta(), given)
    before = simulation.thermo()

    assert simulation.draw_velocities(TEMPERATURE_K, seed=4, replace=True)
    drawn = simulation.gather().get_momenta()
    assert (drawn != given).all()
    assert np.abs(drawn.sum(0)).max() < 1e-12
    after = simulation.thermo()
    assert after.potential_eV == before.potential_eV
    assert after.kinetic_eV == pytest.approx(0.5 * (drawn**2 / 63.546).sum(), rel=1e-12)
    assert 0.5 < after.temperature_K / TEMPERATURE_K < 2.0

    at_rest = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)
    simulation = simulate(comm, at_rest)
    assert simulation.draw_velocities(TEMPERATURE_K, seed=4)
    assert np.abs(simulation.gather().get_momenta() - drawn).max() < 1e-12
    assert simulation.draw_velocities(0.0, seed=4, replace=True)
    assert not simulation.gather().get_momenta().any()
