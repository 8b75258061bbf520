"""Random numbers as a function of what they are for, not of how many were drawn before.

A number depends on the seed, its use (`Stream`), the absolute step and the atom's id alone. So it
is the same bit by bit on any number of ranks, in any order of the atoms, and after a restart, and
there is no generator state to store.

Note [Counter layout]
---------------------
One block of Philox gives four 32-bit words for a counter of four words and a key of two:

=======  =============================  ====================
word     `normals`, one block per atom  `ScalarNoise`
=======  =============================  ====================
0        atom id                        draw, from 0
1, 2     step, low word and high word   the same
3        stream                         stream + 2³¹
key      seed, low word and high word   the same
=======  =============================  ====================

The words become numbers with `nvdd_md.integrators.portable_math` alone, see its Note [Same bits
for every element].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from nvdd_md.integrators.portable_math import exp, log, normal_quantile, normal_quantiles

__all__ = ["ScalarNoise", "Stream", "checked_seed", "normals", "philox"]

Word = TypeVar("Word", int, Tensor)
FourWords = tuple[int | Tensor, int | Tensor, int | Tensor, int | Tensor]

WORD = 0xFFFFFFFF
"""Mask of a 32-bit word."""

# Salmon, Moraes, Dror and Shaw, SC'11 (2011), doi:10.1145/2063384.2063405.
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

SCALARS = 1 << 31
"""Added to the stream in word 3 for numbers that belong to no atom."""

BLOCK = 10240
"""Atoms worked on at a time on a CPU: the intermediate arrays stay in the cache.

Three numbers for each are fewer than torch's grain of 32768: hundreds of short operations are not
each split over threads and joined again.
"""


class Stream(IntEnum):
    """What random numbers are for. Numbers of different streams are independent.

    A value is part of what a seed means: never change one or use it again. Below 2³¹.
    """

    VELOCITIES = 1
    THERMOSTAT = 2
    BAROSTAT = 3


# ------------------------------------------------------------------------------- per atom


def philox(counter: Tensor, key: Sequence[int]) -> Tensor:
    """Return blocks of the counter-based generator Philox4x32-10.

    Salmon, Moraes, Dror and Shaw, SC'11 (2011).

    Parameters
    ----------
    counter : (..., 4) int64 tensor
        Words of 32 bits.
    key : sequence of 2 int
        Words of 32 bits.

    Returns
    -------
    (..., 4) int64 tensor
        Words of 32 bits.

    Raises
    ------
    ValueError
        If counter or key has another shape or another dtype, or is out of range.
    """
    if counter.dtype != torch.int64 or counter.shape[-1:] != (4,) or bool((counter >> 32).any()):
        raise ValueError(
            f"expected a counter of four 32-bit words in int64, got {tuple(counter.shape)}, "
            f"{counter.dtype}"
        )
    if len(key) != 2 or any(not 0 <= word <= WORD for word in key):
        raise ValueError(f"expected a key of two 32-bit words, got {key!r}")
    c0, c1, c2, c3 = counter.unbind(-1)
    words = _rounds((c0, c1, c2, c3), (key[0], key[1]))
    return torch.stack([torch.as_tensor(word) for word in words], -1)


def normals(seed: int, stream: Stream, step: int, ids: Tensor) -> Tensor:
    """Return standard normal random numbers for atoms, three each.

    Row i depends on ``seed``, ``stream``, ``step`` and ``ids[i]`` alone, in every bit. Each number
    is the normal quantile of one of 2⁴² equally likely probabilities, so none exceeds 7.35.
    On a CUDA device the call waits for the device.

    Parameters
    ----------
    seed : int
        0 ≤ seed < 2⁶⁴.
    stream : Stream
    step : int
        0 ≤ step < 2⁶³.
    ids : (n,) int64 tensor
        0 ≤ id < 2³².

    Returns
    -------
    (n, 3) float64 tensor
        On the device of ``ids``.

    Raises
    ------
    ValueError
        If an argument is out of range or of another type.
    """
    key, (low, high) = _seed_words(seed), _step_words(step)
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"expected ids (n,) int64, got {tuple(ids.shape)}, {ids.dtype}")
    z = torch.empty((len(ids), 3), dtype=torch.float64, device=ids.device)
    n_block = BLOCK if ids.device.type == "cpu" else max(len(ids), 1)
    for rows, some in zip(z.split(n_block), ids.split(n_block), strict=True):
        _check_range(some)
        words = _rounds((some, low, high, int(stream)), key)
        k = torch.stack(_three_integers([torch.as_tensor(word) for word in words]))
        rows.copy_(normal_quantiles((k.to(torch.float64) + 0.5) * 2.0**-42).T)
    return z


def _rounds(counter: FourWords, key: tuple[int, int]) -> FourWords:
    """Return one block, or one per element, for words that are integers or int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        high1 ^= c1
        high1 ^= k0
        high0 ^= c3
        high0 ^= k1
        c0, c1, c2, c3 = high1, low1, high0, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def _product(multiplier: int, word: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    """Return the high and the low word of a product of two words, the first ≥ 2³¹.

    The product itself does not fit into an int64; that with ``multiplier`` − 2³² does. It has the
    same low word, and a high word (rounded down, negative) that is too small by ``word``.
    """
    high = word * (multiplier - (1 << 32))
    low = high & WORD
    high >>= 32
    high += word
    return high, low


def _three_integers(words: Sequence[Word]) -> tuple[Word, Word, Word]:
    """Return three integers of 42 bits: a word each, and above it ten bits of the fourth."""
    first, second, third, shared = words
    return (
        first | ((shared & 0x3FF) << 32),
        second | (((shared >> 10) & 0x3FF) << 32),
        third | (((shared >> 20) & 0x3FF) << 32),
    )


# ------------------------------------------------------------------------- one for all atoms


class ScalarNoise:
    """Random numbers that belong to no atom, one after the other: the same on all ranks.

    Parameters
    ----------
    seed : int
        0 ≤ seed < 2⁶⁴.
    stream : Stream
    step : int
        0 ≤ step < 2⁶³.

    Attributes
    ----------
    draw : int
        Uniform numbers used so far, one block of Philox each.

    Raises
    ------
    ValueError
        If an argument is out of range or of another type.
    """

    draw: int

    def __init__(self, seed: int, stream: Stream, step: int) -> None:
        self._key = _seed_words(seed)
        self._step = _step_words(step)
        self._stream = int(stream)
        self.draw = 0

    def normal(self) -> float:
        """Return a standard normal random number."""
        return normal_quantile(self._uniform())

    def gamma(self, shape: float) -> float:
        """Return a random number with the density x^(shape − 1) e^(−x) / Γ(shape).

        The sum of the squares of n standard normal numbers is distributed as twice the result for
        ``shape`` = n/2. That is 0 for n = 0, and so is the result.

        Marsaglia and Tsang, ACM Trans. Math. Softw. 26, 363 (2000).

        Raises
        ------
        ValueError
            If ``shape`` is negative or not finite.
        """
        if not (math.isfinite(shape) and shape >= 0.0):
            raise ValueError(f"the shape of a gamma distribution must be >= 0, got {shape!r}")
        if shape == 0.0:
            return 0.0
        if shape < 1.0:
            return self._gamma(shape + 1.0) * exp(log(self._uniform()) / shape)
        return self._gamma(shape)

    def _gamma(self, shape: float) -> float:
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        while True:
            x = self.normal()
            v = 1.0 + c * x
            if v <= 0.0:
                continue
            v = v * v * v
            if log(self._uniform()) < 0.5 * x * x + d - d * v + d * log(v):
                return d * v

    def _uniform(self) -> float:
        """Return one of the 2⁴² equally likely (k + ½)·2⁻⁴²."""
        words = _rounds((self.draw, *self._step, self._stream + SCALARS), self._key)
        self.draw += 1
        return (_three_integers([int(word) for word in words])[0] + 0.5) * 2.0**-42


# ----------------------------------------------------------------------------- arguments


def checked_seed(seed: object) -> int:
    """Return a seed.

    Raises
    ------
    ValueError
        If it is no integer, or not in 0 ≤ seed < 2⁶⁴.
    """
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed is an integer with 0 <= seed < 2**64, got {seed!r}")
    return seed


def _seed_words(seed: object) -> tuple[int, int]:
    number = checked_seed(seed)
    return number & WORD, number >> 32


def _step_words(step: object) -> tuple[int, int]:
    if not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise ValueError(f"a step is an integer with 0 <= step < 2**63, got {step!r}")
    return step & WORD, step >> 32


def _check_range(ids: Tensor) -> None:
    if bool((ids >> 32).any()):
        raise ValueError(
            f"atom ids must be in 0 <= id < 2**32, got {int(ids.min())} to {int(ids.max())}"
        )
