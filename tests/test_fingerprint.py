"""What two ranks must have in common to compute with one model."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from nvdd_md.calculators import TwoHop


@dataclass(slots=True)
class Slots:
    layer: object


class Holder:
    """Neither a module nor a container."""

    def __init__(self, layer: object) -> None:
        self.layer = layer
        self.slots = Slots(torch.ones(2))
        self.myself = self
        self.rank = id(self)  # no weight: may differ between ranks

    def apply(self) -> object:
        return self.layer


class Learned(TwoHop):
    """Has weights and settings of every kind."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layer = nn.Linear(3, 2)
        for weights in self.layer.parameters():
            weights.data = torch.rand(weights.shape, generator=generator)
        self.table = torch.arange(4)
        self.charges = np.arange(3.0)
        self.layers = [nn.BatchNorm1d(2), {"scale": torch.ones(2)}]
        self.widths = (1, 2.5, "x")
        self.function = (lambda: None,)
        self.holder = Holder(nn.Linear(2, 2))
        self.holder.layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        closed_over = torch.ones(3)
        self.closure = lambda: closed_over
        self.part = functools.partial(torch.add, torch.ones(4))
        self.method = Holder(torch.ones(5)).apply
        self.other = object()


def set_weight(model):
    with torch.no_grad():
        model.layer.weight[1, 2] += 1e-7


CHANGES = {
    "weight": set_weight,
    "buffer in a list": lambda model: model.layers[0].running_mean.add_(1e-6),
    "tensor in a dictionary": lambda model: model.layers[1]["scale"].mul_(2),
    "shape": lambda model: setattr(model, "table", model.table.reshape(2, 2)),
    "dtype of a tensor": lambda model: setattr(model, "table", model.table.to(torch.int32)),
    "array": lambda model: model.charges.__setitem__(0, -1.0),
    "tuple": lambda model: setattr(model, "widths", (1, 2.5, "y")),
    "module in an object": lambda model: model.holder.layer.bias.data.add_(1),
    "tensor in slots": lambda model: model.holder.slots.layer.add_(1),
    "tensor in a closure": lambda model: model.closure().add_(1),
    "tensor in a partial": lambda model: model.part.args[0].add_(1),
    "tensor behind a method": lambda model: model.method.__self__.layer.add_(1),
    "cutoff": lambda model: setattr(model, "cutoff", 4.5),
    "dtype": lambda model: setattr(model, "dtype", torch.float32),
    "elements": lambda model: setattr(model, "elements", frozenset({1})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_shows(change):
    model = Learned()
    before = model.fingerprint()
    assert Learned().fingerprint() == before
    change(model)
    after = model.fingerprint()
    assert len([key for key in before | after if before.get(key) != after.get(key)]) == 1


def test_what_does_not_count():
    model, other = Learned(), Learned()
    other.name, other.device = "/another/folder", torch.device("cuda", 3)
    other.other, other.function = object(), (lambda: 1,)
    assert other.fingerprint() == model.fingerprint()


def test_a_digest_given_by_the_wrapper_stands_for_the_weights():
    model = Learned()
    model.weights_digest = b"file"
    before = model.fingerprint()
    set_weight(model)
    assert model.fingerprint() == before
    model.weights_digest = b"other"
    assert model.fingerprint() != before


def test_a_potential_that_is_a_module():
    class Module(TwoHop, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            TwoHop.__init__(self)
            self.layer = nn.Linear(2, 1)

    model = Module()
    before = model.fingerprint()
    assert model.fingerprint() == before
    with torch.no_grad():
        model.layer.bias += 1
    assert model.fingerprint() != before
