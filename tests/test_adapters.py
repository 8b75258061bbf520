"""Adapters: methods of third-party classes, replaced for one forward and always restored."""

import inspect

import pytest

from nvdd_md.adapters import MethodAdapter, installed


class Block:
    """A class of somebody else's package."""

    def forward(self, x: int, *, scale: int = 1) -> int:
        """Return x, scaled."""
        return x * scale

    def energy(self) -> str:
        return "energy"

    limit = 3


class Inherits(Block):
    pass


class Overrides(Block):
    def forward(self, x, *, scale=1):
        return -super().forward(x, scale=scale)


def add_100(original, instance, *args, **kwargs):
    return original(instance, *args, **kwargs) + 100


def times_2(original, instance, *args, **kwargs):
    return original(instance, *args, **kwargs) * 2


@pytest.fixture(autouse=True)
def _classes_are_left_as_they_were():
    before = {cls: dict(cls.__dict__) for cls in (Block, Inherits, Overrides)}
    yield
    for cls, attributes in before.items():
        assert dict(cls.__dict__) == attributes


def test_replacement_gets_the_original_the_instance_and_all_arguments():
    seen = []

    def spy(original, instance, *args, **kwargs):
        seen.append((original, instance, args, kwargs))
        return original(instance, *args, **kwargs)

    block, original = Block(), Block.__dict__["forward"]
    with installed([MethodAdapter(Block, "forward", spy)]):
        assert block.forward(3, scale=2) == 6
        assert Block.forward is not original
    assert seen == [(original, block, (3,), {"scale": 2})]
    assert Block.__dict__["forward"] is original
    assert block.forward(3) == 3
    assert len(seen) == 1


def test_name_docstring_and_signature_are_kept():
    with installed([MethodAdapter(Block, "forward", add_100)]):
        assert Block.forward.__name__ == "forward"
        assert Block.forward.__qualname__ == "Block.forward"
        assert Block.forward.__doc__ == "Return x, scaled."
        assert list(inspect.signature(Block.forward).parameters) == ["self", "x", "scale"]


def test_nothing_to_install():
    with installed([]):
        assert Block().forward(1) == 1


class Trouble(Exception):
    pass


def test_restored_after_an_exception_in_the_block():
    with pytest.raises(Trouble), installed([MethodAdapter(Block, "forward", add_100)]):
        raise Trouble


def test_restored_after_an_exception_in_the_replacement():
    def fails(original, instance, *args):
        raise Trouble

    with pytest.raises(Trouble), installed([MethodAdapter(Block, "forward", fails)]):
        Block().forward(1)
    assert Block().forward(1) == 1


def test_an_inherited_method_is_deleted_again():
    with installed([MethodAdapter(Inherits, "forward", add_100)]):
        assert "forward" in Inherits.__dict__
        assert Inherits().forward(1) == 101
        assert Block().forward(1) == 1
    assert "forward" not in Inherits.__dict__
    assert Inherits().forward(1) == 1


def test_blocks_may_be_nested():
    with installed([MethodAdapter(Block, "forward", add_100)]):
        with installed([MethodAdapter(Block, "forward", times_2)]):
            assert Block().forward(1) == 202
        assert Block().forward(1) == 101
        with pytest.raises(Trouble), installed([MethodAdapter(Block, "energy", add_100)]):
            raise Trouble
        assert Block().forward(1) == 101
    assert Block().forward(1) == 1


def test_several_adapters_of_one_method_wrap_each_other():
    adapters = [MethodAdapter(Block, "forward", add_100), MethodAdapter(Block, "forward", times_2)]
    with installed(adapters):
        assert Block().forward(1) == 202
    with installed(adapters[::-1]):
        assert Block().forward(1) == 102


@pytest.mark.parametrize("order", [(Block, Inherits), (Inherits, Block)])
def test_a_subclass_does_not_inherit_a_replacement(order):
    # Twice replaced would be twice folded: a wrong number, and not an error.
    with installed([MethodAdapter(cls, "forward", add_100) for cls in order]):
        assert Block().forward(1) == 101
        assert Inherits().forward(1) == 101


def test_a_missing_method_is_refused_and_nothing_stays_installed():
    adapters = [
        MethodAdapter(Block, "forward", add_100),
        MethodAdapter(Inherits, "energy", add_100),
        MethodAdapter(Block, "no_such_method", add_100),
    ]
    refused = pytest.raises(AttributeError, match=r"Block\.no_such_method: there is no such method")
    with refused, installed(adapters):
        pytest.fail("entered")
    assert Block().forward(1) == 1


def test_what_is_no_method_is_refused():
    refused = pytest.raises(AttributeError, match=r"Block\.limit")
    with refused, installed([MethodAdapter(Block, "limit", add_100)]):
        pytest.fail("entered")


def test_a_class_that_cannot_be_changed_leaves_the_others_alone():
    adapters = [MethodAdapter(Block, "forward", add_100), MethodAdapter(int, "bit_length", add_100)]
    with pytest.raises(TypeError), installed(adapters):
        pytest.fail("entered")
    assert Block().forward(1) == 1
