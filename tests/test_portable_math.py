"""Functions with the same bits for every element, length and kind of number.

Python's floats are the reference: each of their operations is one correctly rounded IEEE
operation, so a tensor operation that is fused or otherwise rounded shows as another last bit.
"""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from scipy.special import ndtri

from nvdd_md.integrators.portable_math import (
    exp,
    log,
    logs,
    normal_quantile,
    normal_quantiles,
    square_roots,
)

FLOAT = torch.float64
# Lengths around the widths of vector registers, and around torch's grain of work per thread.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 1000, 4097]


def uniforms(n: int, seed: int = 0) -> torch.Tensor:
    """Return odd multiples of 2⁻⁴³, a quarter of them deep in both tails."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 2**42, (n,), generator=generator)
    k[::8] >>= torch.randint(5, 43, (n,), generator=generator)[::8]
    k[1::8] = 2**42 - 1 - (k[1::8] >> torch.randint(5, 43, (n,), generator=generator)[1::8])
    return (k.to(FLOAT) + 0.5) * 2.0**-42


def positive_numbers(n: int) -> torch.Tensor:
    """Return numbers of all sizes, many of them near 1."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, generator=generator, dtype=FLOAT)
    wide = torch.exp((x - 0.5) * 1400.0)
    near_1 = 1.0 + (x - 0.5) * 10.0 ** torch.randint(-14, 0, (n,), generator=generator)
    return torch.cat((wide, near_1, x, torch.tensor([0.5, 1.0, 2.0, 2.0**-1022])))


def ulps(value: float, exact: Decimal) -> float:
    return float(abs(Decimal(value) - exact)) / math.ulp(float(exact))


def test_square_roots_are_correctly_rounded():
    x = positive_numbers(5000)
    assert square_roots(x).tolist() == [math.sqrt(value) for value in x.tolist()]
    assert square_roots(x.view(2, 2, -1)).shape == (2, 2, len(x) // 4)


def test_logarithms_are_within_two_units_in_the_last_place():
    with localcontext() as context:
        context.prec = 40
        errors = [ulps(log(x), Decimal(x).ln()) for x in positive_numbers(2000).tolist() if x != 1]
    assert max(errors) < 2.0
    assert log(1.0) == 0.0


def test_exponentials_are_within_four_units_in_the_last_place():
    numbers = [
        -(10.0**power) * factor for power in range(-17, 3) for factor in np.arange(1, 7, 0.1)
    ]
    with localcontext() as context:
        context.prec = 40
        errors = [ulps(exp(x), Decimal(x).exp()) for x in numbers]
    assert max(errors) < 4.0
    assert (exp(0.0), exp(-1e4), exp(-math.inf)) == (1.0, 0.0, 0.0)


def test_quantiles_agree_with_scipy():
    u = uniforms(100_000)
    np.testing.assert_allclose(normal_quantiles(u).numpy(), ndtri(u.numpy()), rtol=2e-15)


def test_quantiles_are_odd_and_bounded():
    u = torch.cat((uniforms(10_000), torch.tensor([2.0**-43], dtype=FLOAT)))
    z = normal_quantiles(u)
    assert torch.equal(normal_quantiles(1.0 - u), -z)
    assert z.abs().max() == -z[-1] < 7.35


@pytest.mark.parametrize("border", [0.075, math.exp(-25.0)])
def test_quantiles_increase_where_one_approximation_gives_way_to_the_next(border):
    step = 2.0**-42
    below = torch.arange(60, dtype=FLOAT).flip(0)
    z = normal_quantiles((torch.floor(border / step - below) + 0.5).clamp(min=0.5) * step)
    z_above = normal_quantiles((torch.floor(border / step + below.flip(0) + 1.0) + 0.5) * step)
    # At the inner border neighbours are as near to each other as round-off.
    slack = 2e-15 if border == 0.075 else 0.0
    assert torch.cat((z, z_above)).diff().min() > -slack
    assert z_above[-1] > z[0]


@pytest.mark.parametrize("n_threads", [1, 2])
def test_tensors_and_floats_have_the_same_bits(n_threads):
    x, u = positive_numbers(20_000), uniforms(60_000)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        of_tensors = logs(x).tolist(), normal_quantiles(u).tolist()
    finally:
        torch.set_num_threads(before)
    assert of_tensors[0] == [log(value) for value in x.tolist()]
    assert of_tensors[1] == [normal_quantile(value) for value in u.tolist()]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("function", [logs, normal_quantiles, square_roots])
def test_bits_do_not_depend_on_length_or_place(function, length):
    u = uniforms(5000)
    all_at_once = function(u)
    for offset in (0, 1, 2, 3, 5, 11, 900):
        part = slice(offset, offset + length)
        assert torch.equal(function(u[part]), all_at_once[part])
        assert torch.equal(function(u[part].clone()), all_at_once[part])


def test_arguments_are_not_changed():
    u = uniforms(100)
    before = u.clone()
    for function in (logs, normal_quantiles, square_roots):
        function(u)
        assert torch.equal(u, before)
