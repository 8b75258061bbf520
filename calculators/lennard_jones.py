"""Lennard-Jones potential, equal to ASE's for one kind of atom, with mixing rules for several."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from ase.data import atomic_numbers
from torch import Tensor

from nvdd_md.potential import LocalGraph, Potential

PerElement = float | Mapping[str, float]


class LennardJones(Potential):
    """Pair potential ``u(r) = 4 ε [(σ/r)¹² - (σ/r)⁶]`` below a cutoff, strictly local.

    ``smooth=False`` shifts the pair energy to zero at the cutoff (forces jump there).
    ``smooth=True`` multiplies it by a switching function of ``r²`` that falls from 1 at the onset
    to 0 at the cutoff with a continuous first derivative:
    ``(rc² - r²)² (rc² + 2 r² - 3 ro²) / (rc² - ro²)³``. Parameters, defaults and conventions are
    those of :class:`ase.calculators.lj.LennardJones`. Unlike elements are mixed with
    ``σ_ij = (σ_i + σ_j)/2`` and ``ε_ij = sqrt(ε_i ε_j)`` (Lorentz 1881, Berthelot 1898).

    Parameters
    ----------
    sigma : float or mapping of symbol to float, Å
    epsilon : float or mapping of symbol to float, eV
    rc : float or None, Å
        Cutoff for all pairs. None: three times the largest sigma.
    ro : float or None, Å
        Onset of the switching function. None: 0.66 rc.
    smooth : bool
    dtype : torch.dtype

    Raises
    ------
    ValueError
        If a parameter is not positive and finite, ``ro`` is not below ``rc``, a symbol is unknown,
        or the two mappings name different elements.
    """

    def __init__(
        self,
        sigma: PerElement = 1.0,
        epsilon: PerElement = 1.0,
        rc: float | None = None,
        ro: float | None = None,
        *,
        smooth: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        sigmas, epsilons = _table(sigma, "sigma"), _table(epsilon, "epsilon")
        named = [set(p) for p in (sigma, epsilon) if isinstance(p, Mapping)]
        if len(named) == 2 and named[0] != named[1]:
            raise ValueError(
                f"sigma and epsilon name different elements: {sorted(named[0] ^ named[1])} "
                "stand in only one of them"
            )
        self.name = "Lennard-Jones"
        self.cutoff = 3.0 * float(sigmas.max()) if rc is None else rc
        self.onset = 0.66 * self.cutoff if ro is None else ro
        if not 0.0 <= self.onset < self.cutoff:
            raise ValueError(f"need 0 <= ro < rc, got ro = {self.onset} Å and rc = {self.cutoff} Å")
        self.smooth = smooth
        self.dtype = dtype
        self.elements = frozenset(atomic_numbers[s] for s in named[0]) if named else None
        self._sigma, self._epsilon = sigmas.to(dtype), epsilons.to(dtype)

    def to(self, device: torch.device) -> None:
        """Move the parameter tables to ``device``."""
        super().to(device)
        self._sigma, self._epsilon = self._sigma.to(device), self._epsilon.to(device)

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_centre_rows,) in eV: half of each pair energy to either atom."""
        z_i = graph.numbers[graph.edge_centre]
        z_j = graph.neighbour_numbers[graph.edge_neighbour]
        sigma2 = (0.5 * (self._sigma[z_i] + self._sigma[z_j])) ** 2
        epsilon = torch.sqrt(self._epsilon[z_i] * self._epsilon[z_j])
        r2 = (graph.edge_vectors**2).sum(1)
        pair = _pair_energy(r2, sigma2, epsilon)
        if self.smooth:
            pair = pair * self._switch(r2)
        else:
            pair = pair - _pair_energy(torch.full_like(r2, self.cutoff**2), sigma2, epsilon)
        energies = pair.new_zeros(graph.n_centre_rows)
        return {"energies": energies.index_add(0, graph.edge_centre, 0.5 * pair)}

    def _switch(self, r2: Tensor) -> Tensor:
        rc2, ro2 = self.cutoff**2, self.onset**2
        falling = (rc2 - r2) ** 2 * (rc2 + 2.0 * r2 - 3.0 * ro2) / (rc2 - ro2) ** 3
        return torch.where(r2 < ro2, torch.ones_like(r2), falling)


def _pair_energy(r2: Tensor, sigma2: Tensor, epsilon: Tensor) -> Tensor:
    c6 = (sigma2 / r2) ** 3
    return 4.0 * epsilon * (c6**2 - c6)


def _table(values: PerElement, name: str) -> Tensor:
    """Return ``values`` by atomic number, (119,) float64."""
    if not isinstance(values, Mapping):
        table = torch.full((119,), float(values), dtype=torch.float64, device="cpu")
        given = [float(values)]
    else:
        unknown = sorted(set(values) - set(atomic_numbers))
        if unknown or not values:
            raise ValueError(f"{name} must map chemical symbols to numbers, got {dict(values)}")
        table = torch.zeros(119, dtype=torch.float64, device="cpu")
        for symbol, value in values.items():
            table[atomic_numbers[symbol]] = value
        given = [float(value) for value in values.values()]
    if not all(0.0 < value < float("inf") for value in given):
        raise ValueError(f"{name} must be positive and finite, got {values}")
    return table
