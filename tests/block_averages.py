"""Statistics of correlated samples: means with block errors, and ratios of distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

FloatArray = NDArray[np.float64]

N_BLOCKS = 20


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.6g} ± {self.error:.2g}"

    def agrees_with(self, expected: float) -> bool:
        """The rule of all tests with statistics: within 4 standard errors."""
        return abs(self.value - expected) <= 4.0 * self.error


def mean(samples: ArrayLike, n_blocks: int = N_BLOCKS) -> Estimate:
    """Return the mean of a time series; its error is that of the means of consecutive blocks.

    Blocks have to be long against the correlation time.
    """
    blocks = np.array([block.mean() for block in np.array_split(np.asarray(samples), n_blocks)])
    return Estimate(float(blocks.mean()), float(blocks.std(ddof=1) / np.sqrt(n_blocks)))


def jackknife(
    estimator: Callable[..., float], *series: ArrayLike, n_blocks: int = N_BLOCKS
) -> Estimate:
    """Return what a function makes of time series, with an error from leaving out blocks.

    The k-th block is left out of all series at once.
    """
    split = [np.array_split(np.asarray(samples), n_blocks) for samples in series]
    without = np.array(
        [
            estimator(*(np.concatenate(blocks[:k] + blocks[k + 1 :]) for blocks in split))
            for k in range(n_blocks)
        ]
    )
    error = np.sqrt((n_blocks - 1) * without.var())
    return Estimate(float(estimator(*map(np.asarray, series))), float(error))


def log_ratio(first: FloatArray, second: FloatArray, degree: int) -> FloatArray:
    """Return the polynomial in x, lowest power first, that is ln p₂(x)/p₁(x) + constant.

    ``first`` and ``second`` are samples of the densities p₁ and p₂. The polynomial is the one of
    maximum likelihood for which of the two a sample belongs to (Shirts, J. Chem. Theory Comput. 9,
    909, 2013, eq. 13), found by Newton's method: no bins, and no weights to choose.
    """
    x = np.concatenate((first, second))
    label = np.repeat([0.0, 1.0], [len(first), len(second)])
    centre, width = x.mean(), x.std()
    powers = np.vander((x - centre) / width, degree + 1, increasing=True)
    coefficients = np.zeros(degree + 1)
    for _ in range(50):
        chance = expit(powers @ coefficients)
        curvature = powers.T @ (powers * (chance * (1.0 - chance))[:, None])
        step = np.linalg.solve(curvature, powers.T @ (label - chance))
        coefficients += step
        if np.abs(step).max() < 1e-10:
            break
    else:
        raise RuntimeError("two distributions without overlap")
    return (
        np.polynomial.Polynomial(
            coefficients, domain=[centre - width, centre + width], window=[-1, 1]
        )
        .convert()
        .coef
    )
