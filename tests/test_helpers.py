"""The intent verbs in one process, and the context that they read."""

import threading
from collections import namedtuple
from contextvars import copy_context

import numpy as np
import pytest
import torch
from torch import nn

from nvdd_md import helpers
from nvdd_md.adapters import MethodAdapter, installed
from nvdd_md.comm import SerialCommunicator
from nvdd_md.context import DDContext, active, current_dd_context
from nvdd_md.domain.routing import build_routing
from nvdd_md.helpers import (
    Scope,
    distributed_method,
    localize,
    neighbor_refresh_adapters,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvdd_md.policies import HaloPolicy

ANYTHING = [
    torch.arange(6.0).reshape(3, 2),
    torch.arange(3),
    torch.zeros(0, 4),
    torch.ones(3, requires_grad=True),
    torch.tensor([True, False]),
]


class Doubling:
    """A policy that leaves a mark: whoever calls it can be seen to."""

    def replicate(self, x, context):
        return 2 * x

    def fold(self, out, context):
        return 3 * out


def distributed(**fields: object) -> DDContext:
    return DDContext(comm=SerialCommunicator(), policy=Doubling(), **fields)


class Field:
    """Something with a `to_local`, as a `ShardTensor` or a `DTensor` has."""

    def __init__(self, local):
        self.local = local

    def to_local(self):
        return self.local


# -- The context


def test_outside_a_forward_nothing_is_distributed():
    context = current_dd_context()
    assert not context.is_distributed
    assert (context.rank, context.world_size, context.n_systems) == (0, 1, 1)
    assert context.policy is context.routing is context.comm is context.n_owned is None
    assert context.owned_offset == 0


def test_contexts_nest_and_are_restored():
    outer, inner = distributed(), DDContext()
    with active(outer) as given:
        assert given is outer
        assert current_dd_context() is outer
        with active(inner):
            assert current_dd_context() is inner
            with active(outer):
                assert current_dd_context() is outer
            assert current_dd_context() is inner
        assert current_dd_context() is outer
    assert not current_dd_context().is_distributed


def test_context_is_restored_after_an_exception():
    outer = distributed()
    with active(outer):
        with pytest.raises(ZeroDivisionError), active(DDContext()):
            raise ZeroDivisionError
        assert current_dd_context() is outer
    with pytest.raises(ZeroDivisionError), active(outer):
        raise ZeroDivisionError
    assert not current_dd_context().is_distributed


def test_another_thread_has_another_context():
    seen = {}

    def look(name):
        seen[name] = current_dd_context()

    with active(distributed()) as mine:
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
        copy_context().run(look, "copy")
    assert not seen["thread"].is_distributed
    assert seen["copy"] is mine


def test_a_forward_on_one_rank_is_not_distributed():
    # The engine gives a communicator and a routing on one rank too, but no policy.
    context = DDContext(comm=SerialCommunicator(), n_owned=2)
    assert not context.is_distributed
    x = torch.ones(3)
    with active(context):
        assert refresh_neighbors(x) is x
        assert scatter_to_owners(x) is x
        assert system_sum(x, torch.zeros(3, dtype=torch.int64), 1).item() == 3.0


# -- to_local, localize


@pytest.mark.parametrize("x", [None, 3, "text", ANYTHING[0], np.ones(3), {"a": 1}], ids=repr)
def test_to_local_passes_what_is_local(x):
    assert to_local(x) is x


def test_to_local_asks_what_is_not():
    local = torch.ones(3)
    assert to_local(Field(local)) is local


def test_to_local_ignores_an_attribute_that_is_no_method():
    field = Field(None)
    field.to_local = 5
    assert to_local(field) is field


def test_localize_is_a_shallow_copy():
    local, other = torch.ones(3), [1, 2]
    data = {"field": Field(local), "list": other, "none": None}
    result = localize(data)
    assert result is not data
    assert result["field"] is local
    assert result["list"] is other
    assert result["none"] is None
    assert isinstance(data["field"], Field)


# -- refresh_neighbors, scatter_to_owners


@pytest.mark.parametrize("x", ANYTHING, ids=str)
def test_outside_a_forward_a_verb_returns_its_argument(x):
    assert refresh_neighbors(x) is x
    assert scatter_to_owners(x) is x


def test_inside_a_forward_the_policy_is_asked():
    x = torch.ones(3)
    with active(distributed()):
        assert refresh_neighbors(x).tolist() == [2.0, 2.0, 2.0]
        assert scatter_to_owners(x).tolist() == [3.0, 3.0, 3.0]
    assert refresh_neighbors(x) is x


def test_exported_names():
    assert set(helpers.__all__) == {
        "Scope",
        "distributed_method",
        "localize",
        "neighbor_refresh_adapters",
        "refresh_neighbors",
        "scatter_to_owners",
        "system_sum",
        "to_local",
    }


def test_halo_policy_without_a_routing_says_so():
    with active(DDContext(comm=SerialCommunicator(), policy=HaloPolicy())):
        with pytest.raises(RuntimeError, match="routing"):
            refresh_neighbors(torch.ones(2))
        with pytest.raises(RuntimeError, match="routing"):
            scatter_to_owners(torch.ones(2))


def test_one_rank_on_the_halo_path_gives_the_same_as_none():
    comm = SerialCommunicator()
    nobody = np.zeros(0, dtype=np.int64)
    routing = build_routing(comm, np.arange(3), nobody, nobody, torch.device("cpu"))
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    with active(DDContext(comm=comm, policy=HaloPolicy(), routing=routing, n_owned=3)):
        assert current_dd_context().is_distributed
        for verb in (refresh_neighbors, scatter_to_owners):
            torch.testing.assert_close(verb(x), x, rtol=0, atol=0)
            (gradient,) = torch.autograd.grad(verb(x).pow(2).sum(), x)
            torch.testing.assert_close(gradient, 2 * x.detach(), rtol=0, atol=0)


# -- system_sum


def test_sum_per_system():
    vals = torch.arange(8.0).reshape(4, 2)
    idx = torch.tensor([2, 0, 2, 0])
    expected = torch.tensor([[8.0, 10.0], [0.0, 0.0], [4.0, 6.0]])
    # System 1 is empty.
    torch.testing.assert_close(system_sum(vals, idx, 3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("trailing", [(), (5,), (3, 4)])
@pytest.mark.parametrize("scope", Scope)
def test_sum_keeps_trailing_shapes(trailing, scope):
    vals = torch.randn(6, *trailing, dtype=torch.float64)
    total = system_sum(vals, torch.tensor([0, 1, 1, 3, 3, 3]), 4, scope)
    assert total.shape == (4, *trailing)
    torch.testing.assert_close(total[3], vals[3:].sum(0), rtol=1e-15, atol=1e-15)
    assert not total[2].any()


def test_sum_of_nothing():
    empty = torch.zeros(0, dtype=torch.int64)
    assert system_sum(torch.zeros(0, 2), empty, 3).tolist() == [[0.0, 0.0]] * 3
    assert system_sum(torch.zeros(0, 2), empty, 0).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_owned_sums_have_the_dtype_of_the_values_and_local_ones_are_float64(dtype):
    vals = torch.ones(5, dtype=dtype)
    idx = torch.zeros(5, dtype=torch.int64)
    assert system_sum(vals, idx, 1).dtype == dtype
    assert system_sum(vals, idx, 1, Scope.LOCAL).dtype == torch.float64
    whole = torch.ones(5, dtype=torch.int64)
    assert system_sum(whole, idx, 1, Scope.LOCAL).dtype == torch.int64
    assert system_sum(whole, idx, 1).tolist() == [5]


def test_sums_are_added_in_float64():
    # In float32 the ones would be lost one by one.
    vals = torch.cat((torch.tensor([2.0**24]), torch.ones(64)))
    idx = torch.zeros(65, dtype=torch.int64)
    assert system_sum(vals, idx, 1).item() == 2.0**24 + 64
    half = torch.ones(4096, dtype=torch.bfloat16)
    assert system_sum(half, torch.zeros(4096, dtype=torch.int64), 1).item() == 4096


@pytest.mark.parametrize("idx", [[0, 1, 2], [-1, 0, 1], [7, 0, 0]])
def test_systems_out_of_range_are_refused(idx):
    with pytest.raises(IndexError, match=r"expected \[0, 2\)"):
        system_sum(torch.ones(3), torch.tensor(idx), 2)


def test_systems_of_rows_that_do_not_count_are_not_looked_at():
    vals, idx = torch.ones(4), torch.tensor([9, 0, 1, -9])
    with active(distributed(n_owned=2, owned_offset=1)):
        assert system_sum(vals, idx, 2).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("n_idx", [2, 4])
@pytest.mark.parametrize("context", [DDContext(), distributed(n_owned=1)], ids=["alone", "halo"])
def test_lengths_must_agree(n_idx, context):
    # Also where only rows that do not count are missing: every strategy refuses the same calls.
    with active(context), pytest.raises(ValueError, match=f"3 rows but idx has {n_idx}"):
        system_sum(torch.ones(3), torch.zeros(n_idx, dtype=torch.int64), 1)


def test_missing_owned_rows_are_refused():
    with active(distributed(n_owned=4)), pytest.raises(ValueError, match="4 owned rows"):
        system_sum(torch.ones(3), torch.zeros(3, dtype=torch.int64), 1)


@pytest.mark.parametrize("scope", Scope)
def test_only_owned_rows_count_and_others_may_be_anything(scope):
    vals = torch.tensor([float("nan"), 1.0, 2.0, float("inf")], requires_grad=True)
    with active(distributed(n_owned=2, owned_offset=1)):
        total = system_sum(vals, torch.zeros(4, dtype=torch.int64), 1, scope)
        assert total.item() == 3.0
        (gradient,) = torch.autograd.grad(total.sum(), vals)
    assert gradient.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_sum_is_differentiable_twice():
    vals = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    idx = torch.tensor([0, 2, 2, 0, 0])

    def total(x):
        return system_sum(x**3, idx, 3) ** 2

    assert torch.autograd.gradcheck(total, vals)
    assert torch.autograd.gradgradcheck(total, vals)


# -- distributed_method


class Model:
    def energy(self, x, *, scale=1):
        """Return the energy."""
        return x * scale


def test_distributed_method_runs_the_original_where_nothing_is_distributed():
    def body(ctx, original, instance, *args, **kwargs):
        pytest.fail("the body ran")

    with installed([MethodAdapter(Model, "energy", distributed_method(body))]):
        assert Model().energy(2, scale=5) == 10


def test_distributed_method_gives_the_body_the_context():
    seen = []

    def body(ctx, original, instance, *args, **kwargs):
        seen.append((ctx, instance, args, kwargs))
        return original(instance, *args, **kwargs) + 1

    model = Model()
    with (
        installed([MethodAdapter(Model, "energy", distributed_method(body))]),
        active(distributed()) as context,
    ):
        assert model.energy(2, scale=5) == 11
    assert seen == [(context, model, (2,), {"scale": 5})]


def test_distributed_method_keeps_name_and_docstring():
    @distributed_method
    def exchange_densities(ctx, original, instance):
        """Exchange densities."""

    assert exchange_densities.__name__ == "exchange_densities"
    assert exchange_densities.__doc__ == "Exchange densities."


# -- neighbor_refresh_adapters


Pair = namedtuple("Pair", ["first", "second"])


class Plain(nn.Module):
    def forward(self, x):
        return x


class Tupled(nn.Module):
    def forward(self, x):
        return x, 10 * x


class Named(nn.Module):
    def forward(self, x):
        return Pair(x, 10 * x)


class Derived(Plain):
    pass


class CallsSuper(Plain):
    def forward(self, x):
        return super().forward(x) + 1


def run(module: nn.Module, modules: list[nn.Module], **options: object):
    with installed(neighbor_refresh_adapters(modules, **options)), active(distributed()):
        return module(torch.ones(2))


def test_one_adapter_per_distinct_class():
    modules = [Plain(), Tupled(), Plain(), Derived(), Tupled()]
    adapters = neighbor_refresh_adapters(modules)
    assert [adapter.cls for adapter in adapters] == [Plain, Tupled, Derived]
    assert {adapter.name for adapter in adapters} == {"forward"}
    assert neighbor_refresh_adapters(iter(modules))[0].cls is Plain
    assert neighbor_refresh_adapters([]) == []


def test_whole_output_is_folded_where_it_is_no_tuple():
    assert run(Plain(), [Plain()], always=True).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("output", "expected"), [(0, (3.0, 10.0)), (1, (1.0, 30.0)), (-1, (1.0, 30.0))]
)
@pytest.mark.parametrize("cls", [Tupled, Named])
def test_one_output_is_folded_and_the_type_is_kept(cls, output, expected):
    result = run(cls(), [cls()], output=output, always=True)
    assert type(result) is (Pair if cls is Named else tuple)
    assert tuple(x[0].item() for x in result) == expected


def test_an_output_that_is_no_tensor_is_refused():
    class Strange(nn.Module):
        def forward(self, x):
            return [x]

    with pytest.raises(TypeError, match="list"):
        run(Strange(), [Strange()], always=True)


def test_in_eager_mode_nothing_is_folded_unless_always():
    assert run(Plain(), [Plain()]).tolist() == [1.0, 1.0]


def test_outside_a_distributed_forward_nothing_is_folded():
    with installed(neighbor_refresh_adapters([Plain()], always=True)):
        x = torch.ones(2)
        assert Plain()(x) is x


@pytest.mark.parametrize("modules", [[Plain(), Derived()], [Derived(), Plain()]], ids=repr)
def test_nothing_is_folded_twice(modules):
    assert run(Plain(), modules, always=True).tolist() == [3.0, 3.0]
    assert run(Derived(), modules, always=True).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_that_calls_its_base_class_is_folded_once(order):
    modules = [Plain(), CallsSuper()][::order]
    assert run(CallsSuper(), modules, always=True).tolist() == [6.0, 6.0]


def test_classes_that_are_not_listed_are_left_alone():
    assert run(Derived(), [Plain()], always=True).tolist() == [1.0, 1.0]
