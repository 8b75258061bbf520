"""Models written with the verbs: on n ranks the same numbers as in one process, by right means."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from ase import Atoms
from domain_cases import OPEN, PERIODIC, Charged, Net, PartialSum, all_edges, random_matrix
from torch import Tensor, nn

from nvdd_md.adapters import MethodAdapter
from nvdd_md.comm import Communicator, SerialCommunicator
from nvdd_md.context import DDContext, active
from nvdd_md.domain import decomposition as decomposition_module
from nvdd_md.domain.exchange import TokenChain, sum_over_ranks
from nvdd_md.engine import ForceEngine
from nvdd_md.helpers import (
    Scope,
    distributed_method,
    neighbor_refresh_adapters,
    refresh_neighbors,
    system_sum,
)
from nvdd_md.policies import HaloPolicy
from nvdd_md.potential import LocalGraph, OutputKind, Potential
from nvdd_md.results import Results
from nvdd_md.shard import ShardTensor
from nvdd_md.system import System

SKIN = 0.4


def atoms_of(kind: str = "crystal") -> Atoms:
    """Return some atoms of two elements, in no order."""
    rng = np.random.default_rng(3)
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3, indexing="ij"), -1).reshape(-1, 3)
    positions = rng.permutation(2.6 * grid + rng.uniform(-0.3, 0.3, grid.shape))
    cell = np.array([[10.4, 0.0, 0.0], [0.7, 10.4, 0.0], [-0.5, 0.3, 10.4]])
    numbers = rng.choice([8, 14], len(positions))
    atoms = Atoms(numbers, positions, cell=cell, pbc=PERIODIC)
    if kind == "cluster":
        atoms = atoms[np.argsort(np.linalg.norm(atoms.positions - 5.0, axis=1))[:30]]
        atoms.cell, atoms.pbc = np.zeros((3, 3)), OPEN
    elif kind == "slab":
        atoms.cell[2] *= 3.0
        atoms.positions[:, 2] += 0.9 * atoms.cell[2, 2]
    elif kind == "three atoms":  # fewer than ranks: some own nothing
        atoms = atoms[:3]
        atoms.positions = [[0.0, 0.0, 0.0], [0.3, 2.0, 0.1], [1.9, 1.1, 0.4]]
    return atoms


def evaluate(
    potential: Potential, atoms: Atoms, comm: Communicator, skin: float = SKIN, **options: object
) -> Results:
    engine = ForceEngine(potential, comm, skin=skin, **options)
    return engine.evaluate(System.from_atoms(atoms, potential))


def alone(potential: Potential, atoms: Atoms) -> Results:
    return evaluate(potential, atoms, SerialCommunicator())


def check_same(results: Results, reference: Results, energy_scale: float) -> None:
    """Compare with R11 of the design, float64."""
    assert results.keys() == reference.keys()
    assert abs(results["energy"] - reference["energy"]) <= 1e-12 * energy_scale
    scale = max(1.0, np.abs(reference["forces"]).max())
    np.testing.assert_allclose(results["forces"], reference["forces"], rtol=0, atol=1e-11 * scale)
    if "stress" in reference:
        scale = max(1.0, np.abs(reference["stress"]).max())
        np.testing.assert_allclose(
            results["stress"], reference["stress"], rtol=0, atol=1e-12 * scale
        )


def energy_scale(potential: Net, atoms: Atoms) -> float:
    """Return Σ |e_i|."""
    plain = Net(len(potential.source), potential.width, potential.cutoff)
    return float(np.abs(alone(plain, atoms)["energies"]).sum())


POTENTIALS = {
    "network": Net,
    "partial sums": PartialSum,
    "total charge": Charged,
    "total charge, one value": lambda: Charged(OutputKind.GLOBAL),
}
KINDS = ["crystal", "three atoms"]


# -- n ranks and one process


@pytest.mark.parametrize("name", POTENTIALS)
def test_n_ranks_give_what_one_process_gives(comm, name):
    for kind in ("crystal", "cluster", "slab", "three atoms"):
        potential, atoms = POTENTIALS[name](), atoms_of(kind)
        reference = alone(potential, atoms)
        assert np.abs(reference["forces"]).max() > 0.01
        results = evaluate(potential, atoms, comm)
        check_same(results, reference, energy_scale(potential, atoms))
        for output in potential.outputs:
            np.testing.assert_allclose(results[output], reference[output], rtol=1e-11, atol=1e-12)
            assert np.shape(results[output]) == np.shape(reference[output])
        # And the same bits on every rank.
        for other in comm.gather_objects(results):
            for key, value in results.items():
                np.testing.assert_array_equal(value, other[key])


@pytest.mark.parametrize("name", ["network", "total charge"])
def test_float32_differs_by_no_more_than_the_order_of_atoms_does(comm, name):
    potential = {"network": Net, "total charge": Charged}[name](dtype=torch.float32)
    atoms = atoms_of()
    reference = alone(potential, atoms)["forces"]
    rng = np.random.default_rng(0)
    order_matters = 0.0
    for _ in range(4):
        order = rng.permutation(len(atoms))
        shuffled = np.empty_like(reference)
        shuffled[order] = alone(potential, atoms[order])["forces"]
        order_matters = max(order_matters, np.abs(shuffled - reference).max())
    results = evaluate(potential, atoms, comm)
    limit = min(3.0 * order_matters, 1e-5 * np.abs(reference).max())
    assert limit > 0.0
    assert np.abs(results["forces"] - reference).max() <= limit


@pytest.mark.parametrize("name", ["network", "total charge", "total charge, one value"])
def test_forces_and_stress_are_derivatives_of_the_energy(comm, name):
    potential, atoms = POTENTIALS[name](), atoms_of()
    results = evaluate(potential, atoms, comm)

    def slope(change: Callable[[Atoms, float], None]) -> float:
        """Return dE/dt of one process by a fourth-order finite difference."""
        energies = []
        for step in (2.0, 1.0, -1.0, -2.0):
            changed = atoms.copy()
            change(changed, step * 1e-3)
            energies.append(float(alone(potential, changed)["energy"]))
        return float(np.dot([-1.0, 8.0, -8.0, 1.0], energies) / (12.0 * 1e-3))

    def displace(atom: int, axis: int, changed: Atoms, t: float) -> None:
        changed.positions[atom, axis] += t

    def strain(row: int, column: int, changed: Atoms, t: float) -> None:
        matrix = np.eye(3)
        matrix[row, column] += 0.5 * t
        matrix[column, row] += 0.5 * t
        changed.set_cell(atoms.cell.array @ matrix, scale_atoms=True)

    for atom, axis in ((5, 0), (17, 1), (40, 2), (63, 0)):
        force = -slope(partial(displace, atom, axis))
        assert abs(force - results["forces"][atom, axis]) < 1e-7
    for component, place in enumerate(((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))):
        stress = slope(partial(strain, *place)) / atoms.get_volume()
        assert abs(stress - results["stress"][component]) < 1e-8


def test_the_charge_feeds_every_atom(comm):
    # Otherwise the sum in the middle of the network would be tested by nothing.
    potential, atoms = Charged(), atoms_of("cluster")
    atoms.positions[0] += 40.0  # beyond every cutoff
    near, far = (evaluate(potential, a, comm)["energies"] for a in (atoms_of("cluster"), atoms))
    assert np.abs(near - far)[1:].min() > 0.0
    assert abs(evaluate(potential, atoms, comm)["coulomb"]) > 1e-3


def test_an_old_list_gives_what_a_fresh_one_gives(comm):
    potential, atoms = Net(), atoms_of()
    engine = ForceEngine(potential, comm, skin=SKIN)
    rng = np.random.default_rng(5)
    for _ in range(4):
        results = engine.evaluate(System.from_atoms(atoms, potential))
        check_same(results, alone(potential, atoms), energy_scale(potential, atoms))
        atoms.positions += rng.uniform(-0.03, 0.03, atoms.positions.shape)
    assert engine.n_rebuilds == 1


@pytest.mark.parametrize("comm", [1], indirect=True)
@pytest.mark.parametrize("name", POTENTIALS)
def test_the_halo_path_on_one_rank_gives_the_same_bits(comm, name):
    potential, atoms = POTENTIALS[name](), atoms_of()
    plain = evaluate(potential, atoms, comm)
    forced = evaluate(potential, atoms, comm, force_halo=True)
    for key, value in plain.items():
        np.testing.assert_array_equal(forced[key], value)


# -- By right means: nothing is replicated


class Watched(Net):
    """A network that remembers the graphs it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[LocalGraph] = []

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Remember the graph, and return the energies."""
        self.graphs.append(graph)
        return super().forward(graph)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_computes_its_own_rows_and_edges_only(comm, kind, monkeypatch):
    asked_for = []

    def find_edges(positions, ids, n_owned, *rest):
        asked_for.append((ids[:n_owned], ids[n_owned:]))
        return original(positions, ids, n_owned, *rest)

    original = decomposition_module.find_edges
    monkeypatch.setattr(decomposition_module, "find_edges", find_edges)
    potential, atoms = Watched(), atoms_of(kind)
    engine = ForceEngine(potential, comm, skin=0.0)
    system = System.from_atoms(atoms, potential)
    engine.evaluate(system)
    (graph,), current = potential.graphs, engine.decomposition

    # Rows: own atoms, or one dummy; neighbours are these and the ghosts.
    assert graph.n_owned == len(current.owned)
    assert graph.n_centre_rows == max(len(current.owned), 1)
    assert len(graph.neighbour_numbers) == graph.n_centre_rows + len(current.ghosts)
    if len(current.owned):
        np.testing.assert_array_equal(graph.numbers, atoms.numbers[current.owned])
        np.testing.assert_array_equal(graph.neighbour_numbers, atoms.numbers[current.local_ids])
    else:
        assert len(graph.edge_centre) == 0
    # Each atom has one owner, and the load is shared.
    owned = np.concatenate(comm.gather_objects(current.owned))
    np.testing.assert_array_equal(np.sort(owned), np.arange(len(atoms)))
    assert len(current.owned) <= -(-len(atoms) // comm.size) + 2
    # The list was asked for owned centres only: once, or again after counting.
    assert 1 <= len(asked_for) <= 2
    np.testing.assert_array_equal(asked_for[-1][0], current.owned)
    assert not set(asked_for[-1][0]) & set(asked_for[-1][1])

    # Edges: those of the owned centres, each once over all ranks, with the right vectors.
    if len(graph.edge_centre):
        assert int(graph.edge_centre.max()) < graph.n_owned
        assert int(graph.edge_neighbour.max()) < len(graph.neighbour_numbers)
        assert (graph.edge_centre.diff() >= 0).all()
    everything = all_edges(system.positions, system.lattice, potential.cutoff)
    mine = current.owners[everything.centre] == comm.rank
    vectors = system.positions[everything.neighbour] - system.positions[everything.centre]
    vectors += everything.shift @ system.lattice.vectors
    np.testing.assert_array_equal(graph.edge_vectors.detach(), vectors[mine])
    if len(current.owned):
        np.testing.assert_array_equal(
            current.local_ids[graph.edge_neighbour], everything.neighbour[mine]
        )
    assert sum(comm.gather_objects(len(graph.edge_centre))) == len(everything)


# -- Third-party models: adapters


class Embedding(nn.Module):
    """Somebody else's message-passing block: knows nothing of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = random_matrix(np.random.default_rng(0), width, width)

    def forward(self, h: Tensor, centre: Tensor, neighbour: Tensor, window: Tensor) -> Tensor:
        message = (h @ self.weight)[neighbour] * window
        return h.new_zeros((self.n_rows(h), h.shape[1])).index_add(0, centre, message)

    def n_rows(self, h: Tensor) -> int:
        return len(h)


@distributed_method
def refresh_first(ctx, original, instance, h, *edges):
    """Refresh the features, run the block, and keep the rows of this rank."""
    return original(instance, refresh_neighbors(h), *edges)[: len(h)]


class Adapted(Net):
    """A wrapper that reaches the exchange of its blocks through adapters only."""

    def __init__(self) -> None:
        super().__init__(layers=3, width=4)
        self.name = "adapted"
        self.blocks = [Embedding(4), Embedding(4)]

    def adapters(self) -> Sequence[MethodAdapter]:
        """Return the refresh before each block."""
        return [MethodAdapter(Embedding, "forward", refresh_first)]

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_centre_rows,)."""
        window = self.window(graph)
        h = self.embedding[graph.numbers]
        for block in self.blocks:
            h = torch.tanh(h + block(h, graph.edge_centre, graph.edge_neighbour, window))
        return {"energies": h @ self.readout}

    def window(self, graph: LocalGraph) -> Tensor:
        distance = torch.linalg.vector_norm(graph.edge_vectors, dim=1, keepdim=True)
        return (1.0 - (distance / self.cutoff) ** 2) ** 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_reached_through_adapters(comm, kind):
    potential, atoms = Adapted(), atoms_of(kind)
    before = dict(Embedding.__dict__)
    reference = alone(potential, atoms)
    results = evaluate(potential, atoms, comm)
    check_same(results, reference, np.abs(reference["energies"]).sum())
    assert dict(Embedding.__dict__) == before


def test_classes_are_adapted_only_where_something_is_distributed(comm):
    original = Embedding.__dict__["forward"]
    seen = []

    class Looking(Adapted):
        def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
            seen.append(Embedding.__dict__["forward"] is original)
            return super().forward(graph)

    atoms = atoms_of()
    evaluate(Looking(), atoms, comm)
    alone(Looking(), atoms)
    evaluate(Looking(), atoms, SerialCommunicator(), force_halo=True)
    assert seen == [comm.size == 1, True, False]
    assert Embedding.__dict__["forward"] is original


class ToNeighbours(nn.Module):
    """A block that sums messages at the *neighbours*: on ghost rows the sums are partial."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = random_matrix(np.random.default_rng(1), width, width)

    def forward(self, h: Tensor, graph: LocalGraph, window: Tensor) -> tuple[Tensor, str]:
        message = (h @ self.weight)[graph.edge_centre] * window
        rows = h.new_zeros((len(graph.neighbour_numbers), h.shape[1]))
        return rows.index_add(0, graph.edge_neighbour, message), "something else"


class Folded(Adapted):
    """Blocks whose output is folded by `neighbor_refresh_adapters`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [ToNeighbours(4), ToNeighbours(4)]

    def adapters(self) -> Sequence[MethodAdapter]:
        """Return the fold after each block."""
        return neighbor_refresh_adapters(self.blocks, output=0, always=True)

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_centre_rows,)."""
        window = self.window(graph)
        h = self.embedding[graph.numbers]
        for block in self.blocks:
            sums, other = block(h, graph, window)
            assert other == "something else"
            # After the fold ghosts hold the totals too: reading them gives the same.
            totals = refresh_neighbors(sums)
            assert torch.allclose(totals, sums, rtol=1e-14, atol=1e-14)
            h = torch.tanh(h + totals[: len(h)])
        return {"energies": h @ self.readout}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_scatters_to_ghosts(comm, kind):
    potential, atoms = Folded(), atoms_of(kind)
    reference = alone(potential, atoms)
    results = evaluate(potential, atoms, comm)
    check_same(results, reference, np.abs(reference["energies"]).sum())


# -- Another strategy, without touching the verbs


class EverybodyHasAll:
    """Node rows are replicated for reading: every rank gets all atoms' rows, in the caller's order.

    Parameters
    ----------
    owners : (n_atoms,) int array
    """

    def __init__(self, owners: np.ndarray) -> None:
        self.owners = torch.from_numpy(owners)

    def replicate(self, x: Tensor, context: DDContext) -> Tensor:
        """Return all rows: each rank's in their places, added over ranks."""
        mine = torch.nonzero(self.owners == context.rank)[:, 0]
        rows = x.new_zeros((len(self.owners), *x.shape[1:])).index_add(0, mine, x[: len(mine)])
        return sum_over_ranks(rows, context.comm, context.chain)

    def fold(self, out: Tensor, context: DDContext) -> Tensor:
        """Return ``out``: sums over edges of owned centres are complete."""
        return out


def energy_and_edge_gradient(
    potential: Charged, graph: LocalGraph, context: DDContext, comm: Communicator
) -> tuple[float, Tensor]:
    """Return the energy, and its gradient for this rank's edges, as the engine takes it."""
    with active(context):
        outputs = potential.forward(graph)
        energies, coulomb = outputs["energies"][: graph.n_owned], outputs["coulomb"]
        seeds = [torch.ones_like(energies), torch.full_like(coulomb, float(comm.rank == 0))]
        token = context.chain.token
        (gradient,) = torch.autograd.grad(
            [token, energies, coulomb], [graph.edge_vectors], [torch.zeros_like(token), *seeds]
        )
    energy = float(comm.sum(energies.detach().sum())) + float(coulomb.detach())
    return energy, gradient


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_strategy_is_a_new_policy_and_nothing_else(comm, kind):
    potential, atoms = Charged(), atoms_of(kind)
    system = System.from_atoms(atoms, potential)
    engine = ForceEngine(potential, comm, skin=0.0)
    halo = engine.evaluate(system)
    current = engine.decomposition
    vectors = engine._evaluator._edges.vectors
    own, ids = current.routing.n_own_rows, current.local_ids
    dummy = np.zeros(own - len(current.owned), dtype=np.int64)
    graph = LocalGraph(
        numbers=torch.from_numpy(atoms.numbers[np.concatenate((current.owned, dummy))]),
        neighbour_numbers=torch.from_numpy(atoms.numbers).long(),
        edge_centre=current.edge_centre,
        # The rows that this policy's refresh returns have the index of the caller.
        edge_neighbour=torch.from_numpy(ids[current.edge_neighbour] if len(ids) else ids),
        edge_vectors=vectors.clone().requires_grad_(),
        n_owned=len(current.owned),
        system=torch.zeros(own, dtype=torch.int64),
        n_systems=1,
        info={},
        arrays={},
        cell=torch.from_numpy(system.cell),
        pbc=torch.from_numpy(system.pbc),
    )
    context = DDContext(
        comm=comm,
        policy=EverybodyHasAll(current.owners),
        n_owned=graph.n_owned,
        chain=TokenChain(graph.edge_vectors),
    )
    energy, gradient = energy_and_edge_gradient(potential, graph, context, comm)
    assert abs(energy - halo["energy"]) <= 1e-12 * energy_scale(potential, atoms)
    expected = engine._evaluator._edges.gradients
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)


# -- system_sum with several systems, the context built by hand


def by_hand(comm: Communicator, n_owned: int, leaf: Tensor) -> DDContext:
    return DDContext(
        comm=comm, policy=HaloPolicy(), n_owned=n_owned, n_systems=4, chain=TokenChain(leaf)
    )


def test_several_systems_and_an_empty_one(comm):
    # 4 systems, of which number 2 is empty; rank 1 owns nothing and has a dummy row.
    rng = np.random.default_rng(0)
    system = torch.from_numpy(rng.choice([0, 1, 3], 20))
    values = torch.from_numpy(rng.normal(size=(20, 3)))
    owners = torch.arange(20) % comm.size
    owners[owners == 1] = 0
    mine = torch.nonzero(owners == comm.rank)[:, 0]
    # Rows behind the owned ones are ghosts or dummies: anything may stand there.
    rest = torch.full((2, 3), float("nan"), dtype=torch.float64)
    x = torch.cat((values[mine], rest)).requires_grad_()
    idx = torch.cat((system[mine], torch.tensor([99, -1])))

    whole = values.clone().requires_grad_()
    expected = system_sum(whole, system, 4)
    assert not expected[2].any()
    with active(by_hand(comm, len(mine), x)) as context:
        total = system_sum(x, idx, 4)
        partial = system_sum(x, idx, 4, Scope.LOCAL)
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(comm.sum(partial.detach()), expected, rtol=1e-14, atol=1e-14)
        for other in comm.gather_objects(total.detach()):
            assert torch.equal(other, total)

        # Q of its system feeds every row, and E = Σ e_i + Σ_s f(Q_s).
        rows = x[: len(mine)]
        per_row = (rows * total[idx[: len(mine)]]).sum()
        f = torch.sin(total).sum()
        token = context.chain.token
        seeds = [torch.zeros_like(token), torch.ones_like(f), torch.full_like(f, comm.rank == 0)]
        (gradient,) = torch.autograd.grad([token, per_row, f], [x], seeds)
    energy = (whole * expected[system]).sum() + torch.sin(expected).sum()
    (reference,) = torch.autograd.grad(energy, whole)
    torch.testing.assert_close(gradient[: len(mine)], reference[mine], rtol=1e-12, atol=1e-12)
    assert not gradient[len(mine) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partial_sums_are_added_in_float64(comm, dtype):
    # In the dtype of the values the ones of a rank would be lost beside rank 0's large number.
    large = 2.0**24 if dtype == torch.float32 else 256.0
    x = torch.ones(64, dtype=dtype)
    if comm.rank == 0:
        x[0] = large
    with active(by_hand(comm, 64, x)):
        total = system_sum(x, torch.zeros(64, dtype=torch.int64), 1)
    assert total.dtype == dtype
    exact = torch.tensor(large + 64.0 * comm.size - 1.0, dtype=torch.float64)
    assert total.item() == exact.to(dtype).item()


# -- Fields that stay distributed


@pytest.mark.parametrize("kind", KINDS)
def test_shard_tensor(comm, kind):
    potential, atoms = Net(), atoms_of(kind)
    engine = ForceEngine(potential, comm, skin=SKIN)
    engine.evaluate(System.from_atoms(atoms, potential))
    current = engine.decomposition
    routing = current.routing
    full = torch.from_numpy(np.random.default_rng(0).normal(size=(len(atoms), 2)))
    shard = ShardTensor.from_full(full, current)
    assert len(shard.to_local()) == routing.n_rows
    assert torch.equal(shard.owned, full[current.owned])
    assert torch.equal(shard.full_tensor(), full)
    own_only = ShardTensor(shard.local[: routing.n_own_rows], current)
    assert torch.equal(own_only.full_tensor(), full)
    # Its rows are those that a refresh of its own rows gives.
    context = DDContext(comm=comm, policy=HaloPolicy(), routing=routing, n_owned=routing.n_owned)
    with active(context):
        assert torch.equal(refresh_neighbors(own_only.to_local()), shard.local)
    for n_rows in {0, routing.n_own_rows + 1, routing.n_rows + 1} - {routing.n_rows}:
        with pytest.raises(ValueError, match=f"got {n_rows}"):
            ShardTensor(torch.zeros(n_rows), current)
