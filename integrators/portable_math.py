"""Square root, logarithm, exponential and normal quantile with the same bits everywhere.

Note [Same bits for every element]
----------------------------------
``torch.log`` may differ in the last bit between the vectorised body of a tensor and its tail, so
between one atom and the same atom on another rank; the C library's ``log`` may differ between
processors; ``torch.sqrt`` may be that of MKL on a CPU, which is not correctly rounded. Only
+ − × ÷ and the square root of IEEE 754 are the same everywhere. Everything here is made of
these, one operation per call: no ``addcmul`` and no ``alpha``, which a compiler may fuse into an
operation with one rounding, and no division by a number, which CUDA replaces by a
multiplication. The same lines serve float64 tensors and Python's floats: an augmented assignment
works in place on a tensor, always on one made in the same function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["exp", "log", "logs", "normal_quantile", "normal_quantiles", "square_roots"]

Real = TypeVar("Real", float, Tensor)

# Wichura, Applied Statistics 37, 477 (1988), algorithm AS 241, PPND16: numerator and denominator
# of each rational function, highest power first.
CENTRAL = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)
TAIL_BEGINS = 0.425
"""Distance of a probability from ½ beyond which it is in a tail."""

FAR_TAIL_BEGINS = 5.0
"""Square root of −log(probability)."""

SQRT_HALF = 0.7071067811865476
LOG2_HIGH = 0.6931471803691238
"""The upper 32 bits of log 2: its product with an exponent is exact."""

LOG2_LOW = 1.9082149292705877e-10
ATANH_SERIES = tuple(1.0 / power for power in range(21, 1, -2))
"""Of atanh(s)/s − 1 in powers of s², the constant left out; enough for |s| ≤ 0.172."""

EXP_SERIES = tuple(1.0 / math.factorial(n) for n in range(14, -1, -1))
EXP_UNDERFLOW = -746.0


def square_roots(x: Tensor) -> Tensor:
    """Return correctly rounded square roots of a float64 tensor of any shape."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return torch.sqrt(x)


def normal_quantiles(u: Tensor) -> Tensor:
    """Return the numbers that a standard normal number is below with given probabilities.

    Relative error below 2e-15. On a CUDA device the call waits for the device.

    Parameters
    ----------
    u : contiguous float64 tensor
        Odd multiples of 2⁻⁴³, 0 < u < 1.

    Returns
    -------
    contiguous float64 tensor
        Of the same shape, between −7.35 and 7.35.
    """
    q = u - 0.5
    z = _central(q)
    flat_q, flat_z = q.view(-1), z.view(-1)
    tail = torch.nonzero(flat_q.abs() > TAIL_BEGINS).squeeze(1)
    # Rows are picked and put with index_select and index_copy: the general indexing of torch splits
    # even short tensors over threads.
    q_tail = flat_q.index_select(0, tail)
    # The smaller of u and 1 − u, exactly for multiples of 2⁻⁴³.
    r = square_roots(-logs(0.5 - q_tail.abs()))
    z_tail = _rational(TAIL, r - 1.6)
    far = torch.nonzero(r > FAR_TAIL_BEGINS).squeeze(1)
    r_far = r.index_select(0, far) - FAR_TAIL_BEGINS
    z_tail.index_copy_(0, far, _rational(FAR_TAIL, r_far))
    flat_z.index_copy_(0, tail, torch.copysign(z_tail, q_tail))
    return z


def logs(x: Tensor) -> Tensor:
    """Return natural logarithms of normal positive numbers, within 2 units in the last place."""
    mantissa, exponent = torch.frexp(x)
    return _log_of_parts(mantissa, exponent.to(x.dtype))


def normal_quantile(u: float) -> float:
    """Return the normal quantile of a probability; as `normal_quantiles`, in every bit."""
    q = u - 0.5
    if abs(q) <= TAIL_BEGINS:
        return _central(q)
    r = math.sqrt(-log(0.5 - abs(q)))
    far = r > FAR_TAIL_BEGINS
    z = _rational(FAR_TAIL, r - FAR_TAIL_BEGINS) if far else _rational(TAIL, r - 1.6)
    return math.copysign(z, q)


def log(x: float) -> float:
    """Return the natural logarithm of a number > 0, as `logs`."""
    mantissa, exponent = math.frexp(x)
    return _log_of_parts(mantissa, float(exponent))


def exp(x: float) -> float:
    """Return e^x for x ≤ 0, within 4 units in the last place of a normal number; 0 below all."""
    if x < EXP_UNDERFLOW:
        return 0.0
    power = round(x / (LOG2_HIGH + LOG2_LOW))
    return math.ldexp(_polynomial(EXP_SERIES, x - power * LOG2_HIGH - power * LOG2_LOW), power)


# --------------------------------------------------------------- for tensors and for floats


def _central(q: Real) -> Real:
    """Return the normal quantile of ½ + q, for |q| up to `TAIL_BEGINS`."""
    return q * _rational(CENTRAL, 0.180625 - q * q)


def _rational(parts: tuple[Sequence[float], Sequence[float]], x: Real) -> Real:
    """Return the ratio of two polynomials."""
    return _polynomial(parts[0], x) / _polynomial(parts[1], x)


def _polynomial(coefficients: Sequence[float], x: Real) -> Real:
    """Return a polynomial by Horner's rule, highest power first; two coefficients or more."""
    y = x * coefficients[0]
    y += coefficients[1]
    for coefficient in coefficients[2:]:
        y *= x
        y += coefficient
    return y


def _log_of_parts(mantissa: Real, exponent: Real) -> Real:
    """Return the natural logarithm of mantissa·2^exponent, ½ ≤ mantissa < 1.

    With m = mantissa or twice that, whichever is nearer to 1, and s = (m − 1)/(m + 1),
    log m = 2 atanh s = 2s + 2s (s²/3 + s⁴/5 + …).
    """
    doubled = (mantissa < SQRT_HALF) * 1.0
    m = mantissa * (doubled + 1.0)
    power = exponent - doubled
    s = (m - 1.0) / (m + 1.0)
    s_squared = s * s
    s += s
    small = s * (s_squared * _polynomial(ATANH_SERIES, s_squared)) + power * LOG2_LOW
    return power * LOG2_HIGH + (s + small)
