"""What is counted and must not grow: ghosts, bytes, messages, collectives, edges per rank."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from domain_cases import OPEN, PERIODIC, UNEVEN, Case, Charged, Net, tree_edges

from nvdd_md.calculators import DistributedCalculator, LennardJones, TwoHop
from nvdd_md.comm import Communicator, Traffic
from nvdd_md.domain.decomposition import Decomposition, decompose
from nvdd_md.engine import ForceEngine
from nvdd_md.phase_times import PhaseTimes
from nvdd_md.potential import Potential
from nvdd_md.system import System

CUTOFF = 3.2

# Potential, width of what it refreshes (in numbers), layers.
POTENTIALS: dict[str, tuple[Callable[[], Potential], int, int]] = {
    "Lennard-Jones": (lambda: LennardJones(sigma=2.2, epsilon=0.01, rc=CUTOFF), 0, 1),
    "two-hop": (lambda: TwoHop(rc=CUTOFF), 1, 2),
    "network": (lambda: Net(layers=3, width=6, cutoff=CUTOFF), 24, 3),
    "network, float32": (lambda: Net(4, 5, CUTOFF, torch.float32), 20, 4),
}


def metal(repeat: tuple[int, int, int] = (5, 4, 4), pbc: object = True) -> Atoms:
    atoms = bulk("Cu", a=3.6, cubic=True) * repeat
    atoms.rattle(0.05, seed=1)
    atoms.pbc = pbc
    return atoms


def chain(n: int) -> Atoms:
    """Return a row of atoms along x in the open, each within reach of its next neighbours."""
    positions = np.zeros((n, 3))
    positions[:, 0] = 2.5 * np.arange(n)
    return Atoms("Cu" * n, positions, pbc=OPEN)


def traffic_of(comm: Communicator, action: Callable[[], object]) -> Traffic:
    before = comm.traffic.snapshot()
    action()
    return comm.traffic - before


def total_over_ranks(comm: Communicator, number: int) -> int:
    return int(comm.sum(torch.tensor(number)))


def true_ghosts(case: Case, current: Decomposition, rank: int) -> np.ndarray:
    """Return the atoms of others of which an image is within the cutoff of one that `rank` owns."""
    edges = tree_edges(case.positions, case.lattice, case.cutoff)
    centre, neighbour = edges[:, 0], edges[:, 1]
    owners = current.owners
    return np.unique(neighbour[(owners[centre] == rank) & (owners[neighbour] != rank)])


def decomposed(case: Case, comm: Communicator, skin: float = 0.0) -> Decomposition:
    return decompose(
        case.positions,
        case.lattice,
        comm,
        cutoff=case.cutoff,
        skin=skin,
        previous=None,
        cut_axes=(0, 1, 2),
        device=torch.device("cpu"),
        times=PhaseTimes(Traffic()),
    )


# -- R4: ghosts


def needle() -> Case:
    positions = np.random.default_rng(0).uniform(0.0, 1.0, (60, 3)) * [2.0, 2.2, 60.0]
    return Case(positions, np.diag([2.0, 2.2, 60.0]), PERIODIC, 5.0)


def tilted() -> Case:
    rng = np.random.default_rng(1)
    cell = np.array([[12.0, 0.0, 0.0], [9.0, 8.0, 0.0], [-4.0, 3.0, 14.0]])
    return Case(rng.uniform(-1.0, 2.0, (150, 3)) @ cell, cell, (True, True, False), 3.5)


def few() -> Case:
    return Case(np.diag([1.0, 2.0, 3.0]), np.eye(3) * 5.0, PERIODIC, 4.0)


@pytest.mark.parametrize("make", [*UNEVEN.values(), needle, tilted, few])
def test_ghosts_are_the_atoms_within_the_cutoff_and_no_others(comm, make):
    case = make()
    current = decomposed(case, comm)
    expected = true_ghosts(case, current, comm.rank)
    assert set(current.ghosts) == set(expected)
    assert len(current.ghosts) == len(expected) == current.routing.n_ghost
    # Sorted by owner, then id; owned by id.
    owners = current.owners[current.ghosts]
    np.testing.assert_array_equal(np.lexsort((current.ghosts, owners)), np.arange(len(owners)))
    np.testing.assert_array_equal(current.owned, np.flatnonzero(current.owners == comm.rank))


# -- R10: edges per rank, as decompose() divides them


@pytest.mark.parametrize("name", UNEVEN)
def test_decompose_balances_the_edges(comm, name):
    case = UNEVEN[name]()
    for skin in (0.0, 0.5):
        current = decomposed(case, comm, skin)
        edges = current.edges_per_rank
        assert edges.max() <= 1.05 * edges.mean()
        assert edges[comm.rank] == len(current.edge_centre)
        degree = np.bincount(current.owned[current.edge_centre], minlength=len(case.positions))
        everybody = comm.sum(torch.from_numpy(degree)).numpy()
        np.testing.assert_array_equal(current.weights, 1.0 + everybody[current.owned])
        np.testing.assert_array_equal(edges, np.bincount(current.owners, weights=everybody))
        for owners in comm.gather_objects(current.owners):
            np.testing.assert_array_equal(owners, current.owners)


# -- R5: bytes


@pytest.mark.parametrize("name", POTENTIALS)
def test_bytes_of_an_evaluation_are_the_minimum(comm, name):
    make, width, layers = POTENTIALS[name]
    potential, atoms = make(), metal()
    engine = ForceEngine(potential, comm, skin=0.0)
    system = System.from_atoms(atoms, potential)
    engine.evaluate(system)
    sent = traffic_of(comm, lambda: engine.evaluate(system))
    assert engine.n_rebuilds == 1

    case = Case(system.positions, system.cell, PERIODIC, CUTOFF)
    ghosts = len(true_ghosts(case, engine.decomposition, comm.rank))
    row = width * torch.empty(0, dtype=potential.dtype).element_size()
    # Features out to the ghosts, their gradients back; forces of ghosts in float64.
    minimum = total_over_ranks(comm, ghosts * ((layers - 1) * row * 2 + 24))
    counted = total_over_ranks(comm, sent.message_bytes)
    assert (minimum > 0) == (comm.size > 1)
    assert minimum <= counted <= 1.05 * minimum


@pytest.mark.parametrize("name", POTENTIALS)
def test_within_the_skin_only_rows_travel_and_no_indices(comm, name):
    make, width, layers = POTENTIALS[name]
    potential, atoms = make(), metal()
    engine = ForceEngine(potential, comm, skin=0.5)
    engine.evaluate(System.from_atoms(atoms, potential))
    routing = engine.decomposition.routing
    rng = np.random.default_rng(0)
    for _ in range(3):
        atoms.positions += rng.uniform(-0.03, 0.03, atoms.positions.shape)
        system = System.from_atoms(atoms, potential)
        sent = traffic_of(comm, lambda system=system: engine.evaluate(system))
        row = width * torch.empty(0, dtype=potential.dtype).element_size()
        forward = (layers - 1) * row * sum(routing.send_counts)
        backward = (layers - 1) * row * sum(routing.recv_counts)
        assert sent.message_bytes == forward + backward + 24 * sum(routing.recv_counts)
        assert sent.collectives == (comm.size > 1)  # the gather of the results
    assert engine.n_rebuilds == 1


@pytest.mark.parametrize("name", POTENTIALS)
def test_exchanges_of_an_evaluation(comm, name, monkeypatch):
    # L-1 refreshes forward, L-1 adjoints backward, one fold of forces, on every rank: also on one
    # that owns nothing.
    make, _, layers = POTENTIALS[name]
    shapes: list[tuple[int, ...]] = []

    def exchange_rows(rows, send_counts, recv_counts):
        shapes.append(tuple(rows.shape[1:]))
        return original(rows, send_counts, recv_counts)

    original = comm.exchange_rows
    for atoms in (metal(), metal()[:1]):
        potential = make()
        engine = ForceEngine(potential, comm, skin=0.0)
        system = System.from_atoms(atoms, potential)
        engine.evaluate(system)
        with monkeypatch.context() as patch:
            patch.setattr(comm, "exchange_rows", exchange_rows)
            shapes.clear()
            engine.evaluate(system)
        assert len(shapes) == 1 + (2 * (layers - 1) if comm.size > 1 else 0)
        assert shapes[-1] == (3,)
        assert len(set(shapes[:-1])) <= 1


# -- Messages


@pytest.mark.parametrize("comm", [2, 3, 4], indirect=True)
def test_messages_pass_only_between_ranks_that_share_ghosts(comm):
    potential, atoms = Net(layers=3, cutoff=CUTOFF), chain(24)
    engine = ForceEngine(potential, comm, skin=0.3)
    system = System.from_atoms(atoms, potential)
    engine.evaluate(system)
    sent = traffic_of(comm, lambda: engine.evaluate(system))
    # Domains follow each other along the row: the ends have one neighbour, the others two.
    partners = (comm.rank > 0) + (comm.rank < comm.size - 1)
    routing = engine.decomposition.routing
    assert sum(n > 0 for n in routing.send_counts) == partners
    assert sum(n > 0 for n in routing.recv_counts) == partners
    assert routing.n_ghost == partners
    assert sent.messages == (2 + 2 + 1) * partners


def test_ranks_without_common_ghosts_send_nothing(comm):
    lumps = [metal((2, 2, 2), pbc=False) for _ in range(comm.size)]
    for n, lump in enumerate(lumps):
        lump.positions[:, 0] += 100.0 * n
    atoms = sum(lumps[1:], lumps[0])
    potential = Charged(cutoff=CUTOFF)
    engine = ForceEngine(potential, comm, skin=0.3)
    system = System.from_atoms(atoms, potential)
    engine.evaluate(system)
    assert len(engine.decomposition.owned) == len(lumps[0])
    sent = traffic_of(comm, lambda: engine.evaluate(system))
    assert sent.messages == sent.message_bytes == 0
    # The charge forward and backward, and the results.
    assert sent.collectives == (3 if comm.size > 1 else 0)


# -- R6: collectives, through the calculator


@pytest.mark.parametrize("name", POTENTIALS)
def test_a_step_inside_the_skin_is_two_collectives(comm, name):
    atoms = metal()
    with DistributedCalculator(POTENTIALS[name][0](), comm, skin=0.5) as calculator:
        atoms.calc = calculator
        atoms.get_forces()
        rng = np.random.default_rng(0)
        for _ in range(4):
            atoms.positions += rng.uniform(-0.03, 0.03, atoms.positions.shape)
            sent = traffic_of(comm, atoms.get_forces)
            assert sent.collectives == (2 if comm.size > 1 else 0)
        assert calculator.engine.n_rebuilds == 1
        assert calculator.engine.n_evaluations == 5


def test_what_is_known_is_told_without_communication(comm):
    atoms = metal()
    with DistributedCalculator(Net(cutoff=CUTOFF), comm) as calculator:
        atoms.calc = calculator
        atoms.get_potential_energy()
        for known in (
            atoms.get_potential_energy,
            atoms.get_forces,
            atoms.get_stress,
            atoms.get_potential_energies,
            lambda: calculator.get_property("free_energy", atoms),
        ):
            assert traffic_of(comm, known) == Traffic()
        # Decided from what this rank submitted last: one rank alone may look again.
        if comm.rank == 0:
            assert traffic_of(comm, atoms.get_forces) == Traffic()
        assert calculator.engine.n_evaluations == 1

        first = traffic_of(comm, lambda: atoms.get_stresses(voigt=True))
        assert (first.collectives > 0) == (comm.size > 1)
        assert traffic_of(comm, lambda: atoms.get_stresses(voigt=True)) == Traffic()
        assert calculator.engine.n_evaluations == 1


def test_traffic_does_not_grow_with_the_system_but_with_its_surface(comm):
    # Twice as long at the same cross-section: the same ghosts, the same bytes.
    bytes_sent = []
    for length in (8, 16):
        potential, atoms = Net(cutoff=CUTOFF), metal((length, 2, 2))
        engine = ForceEngine(potential, comm, skin=0.0, cut_axes=(0,))
        # Perfect positions: the same cross-section everywhere.
        atoms.positions = (bulk("Cu", a=3.6, cubic=True) * (length, 2, 2)).positions
        system = System.from_atoms(atoms, potential)
        engine.evaluate(system)
        sent = traffic_of(comm, lambda engine=engine, system=system: engine.evaluate(system))
        bytes_sent.append(total_over_ranks(comm, sent.message_bytes))
    if comm.size in (2, 4):  # cuts between the same planes
        assert bytes_sent[0] == bytes_sent[1] > 0
    else:
        assert bytes_sent[1] <= 1.5 * bytes_sent[0]
