"""A small two-layer potential, the example of how to bring your own model.

Layer 1 sums a density over the neighbours of each atom, layer 2 a function of the neighbours'
densities: an atom feels others up to twice the cutoff away, and one refresh between the layers is
all the communication there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nvdd_md.helpers import refresh_neighbors
from nvdd_md.potential import InfoKey, LocalGraph, Potential


class TwoHop(Potential):
    """Two-layer potential for any element, with a dependence on ``atoms.info['charge']``.

    With ``x = r/rc`` and ``f(r) = (1 - x²)³``::

        rho_i = sum_j (0.5 + 0.02 Z_j) f(r_ij)        t_i = tanh(0.3 rho_i)
        m_i   = sum_j t_j f(r_ij)
        E_i   = -sqrt(1 + rho_i) - 0.01 Z_i + k m_i²/2 + 0.1 q t_i
                + 1/2 sum_j A exp(-3 (r_ij - 2.2)) f(r_ij)

    Parameters
    ----------
    rc : float, Å
    k, A : float, eV
    elements : sequence of int, or None
        Atomic numbers to accept; None: all.
    dtype : torch.dtype

    Raises
    ------
    ValueError
        If ``rc`` is not positive.
    """

    def __init__(
        self,
        rc: float = 4.0,
        k: float = 0.05,
        A: float = 0.5,
        *,
        elements: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not rc > 0.0:
            raise ValueError(f"rc must be a length > 0 Å, got {rc}")
        self.name = "two-hop"
        self.cutoff = rc
        self.exchanges = 1
        self.dtype = dtype
        self.elements = None if elements is None else frozenset(elements)
        self.info_keys = {"charge": InfoKey(default=0.0, integer=True)}
        self.k, self.A = k, A

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_centre_rows,) in eV."""
        distance = torch.linalg.vector_norm(graph.edge_vectors, dim=1)
        window = (1.0 - (distance / self.cutoff) ** 2) ** 3
        weight = 0.5 + 0.02 * graph.neighbour_numbers[graph.edge_neighbour].to(self.dtype)
        rho = _sum_to_centres(weight * window, graph)
        t = torch.tanh(0.3 * rho)

        t_of_neighbours = refresh_neighbors(t)[graph.edge_neighbour]
        m = _sum_to_centres(t_of_neighbours * window, graph)

        repulsion = self.A * torch.exp(-3.0 * (distance - 2.2)) * window
        charge = graph.info["charge"][graph.system]
        energies = (
            -torch.sqrt(1.0 + rho)
            - 0.01 * graph.numbers.to(self.dtype)
            + 0.5 * self.k * m**2
            + 0.1 * charge * t
            + 0.5 * _sum_to_centres(repulsion, graph)
        )
        return {"energies": energies}


def _sum_to_centres(per_edge: Tensor, graph: LocalGraph) -> Tensor:
    """Sum ``per_edge`` (n_edges,) over the edges of each centre, (n_centre_rows,)."""
    return per_edge.new_zeros(graph.n_centre_rows).index_add(0, graph.edge_centre, per_edge)
