"""Refresh, collect, fold and sum over ranks: values, adjoints, derivatives, and nobody left out.

The operations are linear, so each is known completely from a matrix. With all ranks' own rows in
one vector X, rank p's ``[own | ghost]`` rows are ``R_p X`` with a 0/1 matrix R_p; collect is
``sum_p R_pᵀ y_p`` and fold ``R_p sum_q R_qᵀ y_q``.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.context import DDContext, active
from nvdd_md.domain.exchange import TokenChain, collect, fold, refresh, sum_over_ranks
from nvdd_md.domain.routing import HaloRouting, build_routing
from nvdd_md.helpers import refresh_neighbors, scatter_to_owners
from nvdd_md.policies import HaloPolicy

CPU = torch.device("cpu")
TRAILING = [(), (5,), (3, 4)]
LAYOUTS = ["random", "one owner", "some own nothing", "few atoms"]


class Layout:
    """Random owners and ghosts of all ranks, known to every rank, and the routing of this one.

    Attributes
    ----------
    comm : Communicator
    routing : HaloRouting
    n_own : list of int
        Own rows by rank, a dummy row for who owns nothing.
    rows : list of (n_rows,) int arrays
        Where each rank's ``[own | ghost]`` rows are in the vector of all ranks' own rows.
    """

    def __init__(
        self, comm: Communicator, kind: str = "random", n_atoms: int = 12, seed: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, comm.size, LAYOUTS.index(kind)])
        n_atoms = 2 if kind == "few atoms" else n_atoms
        owners = rng.integers(0, comm.size, n_atoms)
        if kind == "one owner":
            owners[:] = comm.size - 1
        elif kind == "some own nothing":
            owners[:] = np.where(owners % 2 == 0, 0, comm.size - 1)
        needs = rng.uniform(size=(comm.size, n_atoms)) < 0.6
        needs[:, 0] = True  # one atom that everybody needs
        self.comm = comm
        self.owned = [np.flatnonzero(owners == rank) for rank in range(comm.size)]
        self.ghosts = []
        for rank in range(comm.size):
            ghosts = np.flatnonzero(needs[rank] & (owners != rank))
            self.ghosts.append(ghosts[np.lexsort((ghosts, owners[ghosts]))])
        mine = self.ghosts[comm.rank]
        self.routing = build_routing(comm, self.owned[comm.rank], mine, owners[mine], CPU)
        self.n_own = [max(len(owned), 1) for owned in self.owned]
        first = np.concatenate(([0], np.cumsum(self.n_own)))
        place = np.empty(n_atoms, dtype=np.int64)
        for rank, owned in enumerate(self.owned):
            place[owned] = first[rank] + np.arange(len(owned))
        self.rows = [
            np.concatenate((np.arange(first[rank], first[rank + 1]), place[self.ghosts[rank]]))
            for rank in range(comm.size)
        ]

    def matrix(self, rank: int) -> Tensor:
        """Return R_rank, (n_rows, all own rows)."""
        matrix = torch.zeros(len(self.rows[rank]), sum(self.n_own), dtype=torch.float64)
        matrix[torch.arange(len(self.rows[rank])), self.rows[rank]] = 1.0
        return matrix

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a vector of all own rows."""
        return whole.split(self.n_own)[self.comm.rank]

    def local(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a vector of all ranks' ``[own | ghost]`` rows."""
        return whole.split([len(rows) for rows in self.rows])[self.comm.rank]


def values(n_rows: int, trailing: tuple[int, ...], seed: int, dtype=torch.float64) -> Tensor:
    """Return the same random numbers on every rank; small integers, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (n_rows, *trailing), generator=generator).to(dtype)


def dot_over_ranks(x: Tensor, y: Tensor, comm: Communicator) -> float:
    return float(comm.sum((x.detach().double() * y.detach().double()).sum()))


OPERATIONS = ["refresh", "collect", "fold", "sum"]


def apply(name: str, x: Tensor, routing: HaloRouting, chain: TokenChain) -> Tensor:
    if name == "sum":
        return sum_over_ranks(x, routing.comm, chain)
    return {"refresh": refresh, "collect": collect, "fold": fold}[name](x, routing, chain)


def input_and_output_rows(name: str, routing: HaloRouting) -> tuple[int, int]:
    return {
        "refresh": (routing.n_own_rows, routing.n_rows),
        "collect": (routing.n_rows, routing.n_own_rows),
        "fold": (routing.n_rows, routing.n_rows),
        "sum": (7, 7),
    }[name]


# -- Values


def test_values_are_those_of_the_matrices(comm):
    for kind, trailing in product(LAYOUTS, TRAILING):
        layout = Layout(comm, kind)
        routing, chain = layout.routing, TokenChain()
        matrices = [layout.matrix(rank) for rank in range(comm.size)]
        whole = values(sum(layout.n_own), trailing, 1)
        refreshed = refresh(layout.own(whole), routing, chain)
        assert torch.equal(refreshed, torch.tensordot(matrices[comm.rank], whole, 1))

        blocks = [values(len(rows), trailing, 2 + rank) for rank, rows in enumerate(layout.rows)]
        total = sum(
            torch.tensordot(matrix.T, block, 1)
            for matrix, block in zip(matrices, blocks, strict=True)
        )
        assert torch.equal(collect(blocks[comm.rank], routing, chain), layout.own(total))
        folded = fold(blocks[comm.rank], routing, chain)
        assert torch.equal(folded, torch.tensordot(matrices[comm.rank], total, 1))

        parts = [values(6, trailing, 10 + rank) for rank in range(comm.size)]
        assert torch.equal(sum_over_ranks(parts[comm.rank], comm, chain), sum(parts))


def test_layouts_are_what_they_are_meant_to_be(comm):
    if comm.size == 1:
        assert Layout(comm).routing.n_ghost == 0
        return
    for kind in LAYOUTS:
        layout = Layout(comm, kind)
        needed_by = np.bincount(np.concatenate(layout.ghosts))
        assert needed_by.max() == comm.size - 1  # somebody is needed by all the others
        owns_nothing = [len(atoms) == 0 for atoms in layout.owned]
        if kind == "random":
            assert not any(owns_nothing)
        elif kind == "one owner":
            assert sum(owns_nothing) == comm.size - 1
        elif comm.size > 2:
            assert any(owns_nothing)


def test_rows_are_copied_bit_by_bit(comm):
    layout = Layout(comm)
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(sum(layout.n_own), 3, generator=generator, dtype=torch.float64)
    numbers[0, 0], numbers[1, 1], numbers[2, 2] = float("nan"), float("-inf"), -0.0
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        whole = numbers.to(dtype)
        refreshed = refresh(layout.own(whole), layout.routing, TokenChain())
        expected = whole[layout.rows[comm.rank]]
        assert refreshed.dtype == dtype
        assert torch.equal(refreshed.view(torch.uint8), expected.view(torch.uint8))


def test_whole_numbers_are_copied_too(comm):
    layout = Layout(comm)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        whole = values(sum(layout.n_own), (2,), 3).abs().to(dtype)
        refreshed = refresh(layout.own(whole), layout.routing, TokenChain())
        assert refreshed.dtype == dtype
        assert torch.equal(refreshed, whole[layout.rows[comm.rank]])
    counts = torch.arange(5) + comm.rank
    total = sum_over_ranks(counts, comm, TokenChain())
    assert total.tolist() == [comm.size * n + sum(range(comm.size)) for n in range(5)]


def test_refreshing_again_changes_nothing_and_zero_ghosts_fold_to_a_refresh(comm):
    for kind in LAYOUTS:
        layout = Layout(comm, kind)
        routing, chain = layout.routing, TokenChain()
        own = layout.own(values(sum(layout.n_own), (3,), 4))
        once = refresh(own, routing, chain)
        assert torch.equal(refresh(once[: routing.n_own_rows], routing, chain), once)
        without_partials = torch.cat((own, own.new_zeros(routing.n_ghost, 3)))
        assert torch.equal(fold(without_partials, routing, chain), once)


# -- Adjoints


@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_is_the_adjoint(comm, name):
    # Σ <A x, y> = Σ <x, Aᵀ y>, with anything in the ghost rows of x and y; small integers make it
    # exact in every dtype.
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for kind, trailing, dtype in product(LAYOUTS, TRAILING, dtypes):
        layout = Layout(comm, kind)
        n_in, n_out = input_and_output_rows(name, layout.routing)
        x = values(n_in, trailing, 20 + comm.rank, dtype).requires_grad_()
        y = values(n_out, trailing, 40 + comm.rank, dtype)
        result = apply(name, x, layout.routing, TokenChain(x))
        assert result.shape == y.shape
        (gradient,) = torch.autograd.grad(result, x, y)
        assert gradient.dtype == dtype
        assert dot_over_ranks(result, y, comm) == dot_over_ranks(x, gradient, comm) != 0.0


def test_complex_rows_have_gradients_too(comm):
    layout = Layout(comm)
    own = torch.complex(*(values(layout.routing.n_own_rows, (2,), seed) for seed in (1, 2)))
    own.requires_grad_()
    refreshed = refresh(own, layout.routing, TokenChain(own))
    (gradient,) = torch.autograd.grad(refreshed.real.sum(), own)
    copies = sum(layout.matrix(rank).sum(0) for rank in range(comm.size))
    assert torch.equal(gradient.real[:, 0], layout.own(copies))


# -- Derivatives
#
# `gradcheck` perturbs one number after the other and calls the function again, so all ranks must
# perturb the same number at the same time. It is therefore given a function from a replicated
# tensor to a replicated tensor: all ranks' rows in one. Each rank takes its own rows out of it, the
# operation under test runs, and the rows of all ranks are put together again. These two steps are
# each other's adjoint in the world of replicated tensors, where every rank holds the same values
# and the same gradients: taking rows has "put all ranks' gradients together" as its backward, and
# putting together has "take this rank's rows of the (same) gradient".


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: Tensor, counts: list[int], comm: Communicator) -> Tensor:
        ctx.counts, ctx.comm = counts, comm
        return whole.split(counts)[comm.rank].clone()

    @staticmethod
    def backward(ctx, g_rows: Tensor):
        return _PutTogether.apply(g_rows, ctx.counts, ctx.comm), None, None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, counts: list[int], comm: Communicator) -> Tensor:
        ctx.counts, ctx.comm = counts, comm
        return comm.gather_rows(rows.contiguous(), counts)

    @staticmethod
    def backward(ctx, g_whole: Tensor):
        return _TakeRows.apply(g_whole, ctx.counts, ctx.comm), None, None


def replicated(name: str, layout: Layout) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the operation on replicated tensors, made nonlinear, and its number of input rows."""
    comm = layout.comm
    own, both = layout.n_own, [len(rows) for rows in layout.rows]
    rows_in, rows_out = {
        "refresh": (own, both),
        "collect": (both, own),
        "fold": (both, both),
        "sum": ([2] * comm.size, [2] * comm.size),
    }[name]

    def function(whole: Tensor) -> Tensor:
        mine = _TakeRows.apply(whole, rows_in, comm)
        chain = TokenChain(mine)
        result = apply(name, torch.sin(mine) * mine, layout.routing, chain)
        return _PutTogether.apply(result * (1.0 + 0.3 * result), rows_out, comm)

    return function, sum(rows_in)


@pytest.mark.parametrize("name", OPERATIONS)
def test_first_and_second_derivatives(comm, name):
    for kind in ("random", "some own nothing"):
        function, n_rows = replicated(name, Layout(comm, kind, n_atoms=6))
        torch.manual_seed(0)
        x = torch.randn(n_rows, 1, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, x)
        seed = torch.randn_like(function(x)).requires_grad_()
        assert torch.autograd.gradgradcheck(function, x, seed)


def test_derivatives_through_several_exchanges(comm):
    layout = Layout(comm, n_atoms=6)
    routing, both = layout.routing, [len(rows) for rows in layout.rows]

    def function(whole: Tensor) -> Tensor:
        mine = _TakeRows.apply(whole, layout.n_own, comm)
        chain = TokenChain(mine)
        local = torch.tanh(refresh(mine, routing, chain))
        local = fold(local**2, routing, chain)
        total = sum_over_ranks(local[: routing.n_own_rows].sum(0), comm, chain)
        own = collect(local * total, routing, chain)
        return _PutTogether.apply(refresh(own, routing, chain), both, comm)

    torch.manual_seed(0)
    x = torch.randn(sum(layout.n_own), 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    seed = torch.randn_like(function(x)).requires_grad_()
    assert torch.autograd.gradgradcheck(function, x, seed, atol=1e-4)


# -- Every rank takes part in every exchange

# Small messages are sent whether or not anybody waits for them, and hide a rank that is missing.
LARGE = (1 << 15,)


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("bystander", [0, 1])
@pytest.mark.parametrize("cut_off", ["before the first exchange", "between the exchanges"])
def test_a_rank_whose_result_does_not_depend_on_the_leaf_takes_part(comm, bystander, cut_off):
    layout = Layout(comm)
    routing = layout.routing
    aside = comm.rank == bystander
    leaf = torch.ones(routing.n_own_rows, 1, dtype=torch.float64, requires_grad=True)
    chain = TokenChain(leaf)
    own = leaf * torch.ones(LARGE, dtype=torch.float64)
    if aside and cut_off == "before the first exchange":
        own = own.detach()
    middle = refresh(own, routing, chain)[: routing.n_own_rows]
    if aside:
        middle = middle.detach()
    energy = refresh(middle, routing, chain).mean(1).sum()
    if aside:
        energy = energy.detach()
    # What the engine does: the last token is differentiated too, with an empty seed.
    targets, seeds = [chain.token], [torch.zeros(0, dtype=torch.float64)]
    if energy.requires_grad:
        targets, seeds = [*targets, energy], [*seeds, torch.ones_like(energy)]
    before = comm.traffic.snapshot()
    (gradient,) = torch.autograd.grad(
        targets, [leaf], seeds, allow_unused=True, materialize_grads=True
    )
    sent = comm.traffic - before
    partners = sum(n > 0 for rank, n in enumerate(routing.recv_counts) if rank != comm.rank)
    assert sent.messages == 2 * partners  # the bystander's as well
    # A row counts once for each rank that looks at it.
    looks = [rank for rank in range(comm.size) if rank != bystander]
    if aside:
        assert not gradient.any()
    else:
        expected = sum(layout.matrix(rank).sum(0) for rank in looks)
        torch.testing.assert_close(gradient[:, 0], layout.own(expected), rtol=1e-13, atol=0)


@pytest.mark.time_limit(60)
def test_exchanges_are_visited_in_the_same_order_whatever_reaches_the_leaf(comm):
    # Two exchanges side by side; each rank's loss looks at one of them only.
    layout = Layout(comm)
    routing = layout.routing
    leaf = torch.ones(routing.n_own_rows, 1, dtype=torch.float64, requires_grad=True)
    chain = TokenChain(leaf)
    wide = leaf * torch.ones(LARGE, dtype=torch.float64)
    results = [refresh(wide, routing, chain), refresh(2.0 * wide, routing, chain)]
    energy = results[comm.rank % 2].mean(1).sum()
    (gradient,) = torch.autograd.grad(
        [chain.token, energy], [leaf], [torch.zeros(0, dtype=torch.float64), None]
    )
    expected = sum(layout.matrix(rank).sum(0) * (1.0 + rank % 2) for rank in range(comm.size))
    torch.testing.assert_close(gradient[:, 0], layout.own(expected), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_costs_what_forward_costs(comm, name):
    layout = Layout(comm)
    n_in, _ = input_and_output_rows(name, layout.routing)
    x = torch.ones(n_in, 3, dtype=torch.float32, requires_grad=True)
    chain = TokenChain(x)
    start = comm.traffic.snapshot()
    result = apply(name, x, layout.routing, chain)
    middle = comm.traffic.snapshot()
    torch.autograd.grad(
        [chain.token, result.sum()], [x], [torch.zeros(0, dtype=torch.float32), None]
    )
    end = comm.traffic.snapshot()
    fields = ("messages", "message_bytes", "collectives", "collective_bytes")
    forward, backward = (
        torch.tensor([getattr(traffic, field) for field in fields])
        for traffic in (middle - start, end - middle)
    )
    # What one rank sends forward comes back to it: the sums over ranks are the same.
    assert torch.equal(comm.sum(forward), comm.sum(backward))
    assert forward.any() == (comm.size > 1)


def test_nothing_to_differentiate_records_nothing(comm):
    layout = Layout(comm)
    chain = TokenChain()
    own = torch.ones(layout.routing.n_own_rows, 2)
    assert not refresh(own, layout.routing, chain).requires_grad
    assert not chain.token.requires_grad


# -- Through the verbs


def halo_context(layout: Layout) -> DDContext:
    return DDContext(
        comm=layout.comm,
        policy=HaloPolicy(),
        routing=layout.routing,
        n_owned=layout.routing.n_owned,
    )


@pytest.mark.parametrize("n_padding", [0, 4])
def test_padding_rows_pass_through(comm, n_padding):
    for kind in ("random", "some own nothing"):
        layout = Layout(comm, kind)
        routing = layout.routing
        whole = values(sum(layout.n_own), (3,), 1)
        # Anything may stand in ghost and padding rows, also NaN.
        ghosts = torch.full((routing.n_ghost, 3), float("nan"), dtype=torch.float64)
        padding = torch.full((n_padding, 3), float("nan"), dtype=torch.float64)
        padding[:, 1] = 7.0
        block = torch.cat((layout.own(whole), ghosts, padding)).requires_grad_()
        partials = torch.cat((values(routing.n_rows, (3,), 30 + comm.rank), padding))
        with active(halo_context(layout)):
            result = refresh_neighbors(block)
            (gradient,) = torch.autograd.grad(result.sum(), block)
            folded = scatter_to_owners(partials)
        expected = torch.cat((whole[layout.rows[comm.rank]], padding))
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        copies = sum(layout.matrix(rank).sum(0) for rank in range(comm.size))
        assert torch.equal(gradient[: routing.n_own_rows, 0], layout.own(copies))
        assert not gradient[routing.n_own_rows : routing.n_rows].any()  # overwritten rows
        assert (gradient[routing.n_rows :] == 1.0).all()
        totals = fold(partials[: routing.n_rows], routing, TokenChain())
        expected = torch.cat((totals, padding))
        torch.testing.assert_close(folded, expected, rtol=0, atol=0, equal_nan=True)


def test_own_rows_and_whole_blocks_refresh_alike(comm):
    layout = Layout(comm)
    own = layout.own(values(sum(layout.n_own), (2,), 1))
    whole_numbers = own.long()
    with active(halo_context(layout)):
        refreshed = refresh_neighbors(own)
        assert torch.equal(refresh_neighbors(refreshed), refreshed)
        assert torch.equal(refresh_neighbors(whole_numbers), refreshed.long())


@pytest.mark.parametrize("comm", [2, 3, 4], indirect=True)
def test_wrong_numbers_of_rows_are_refused_before_anything_is_sent(comm):
    layout = Layout(comm, seed=3)
    routing = layout.routing
    assert routing.n_ghost > 1
    before = comm.traffic.snapshot()
    with active(halo_context(layout)):
        for n_rows in (0, routing.n_own_rows - 1, routing.n_own_rows + 1, routing.n_rows - 1):
            if n_rows == routing.n_own_rows:
                continue
            with pytest.raises(ValueError, match=f"rank {comm.rank} .*got {n_rows} rows"):
                refresh_neighbors(torch.ones(n_rows, 2))
        for n_rows in (0, routing.n_own_rows, routing.n_rows - 1):
            with pytest.raises(ValueError, match=f"rank {comm.rank} .*got {n_rows} rows"):
                scatter_to_owners(torch.ones(n_rows, 2))
    assert comm.traffic.snapshot() == before


def test_routing_is_a_plan_that_can_be_used_again(comm):
    layout = Layout(comm)
    routing = layout.routing
    own = layout.own(values(sum(layout.n_own), (2,), 1))
    kept = own.clone()
    first = routing.ghosts(own)
    assert torch.equal(routing.ghosts(own), first)
    total = routing.collect(own, first)
    assert torch.equal(routing.collect(own, first), total)
    assert torch.equal(own, kept)
    assert sum(routing.send_counts) == len(routing.send_index)
    assert routing.send_counts[comm.rank] == routing.recv_counts[comm.rank] == 0
    with pytest.raises(AttributeError):
        routing.n_owned = 3
