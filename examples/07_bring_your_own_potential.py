"""A potential of your own: a small network of two message-passing layers, on any number of ranks.

What a potential has to be is written in ``nvdd_md/potential.py``. In short: energies per atom from
the edge vectors, no forces (they come from the gradient), and between two layers one line,
``refresh_neighbors``, that brings what other ranks know of the neighbours. The weights are random
here; a trained network would be loaded in the constructor instead.
"""

import numpy as np
import torch
from ase.build import bulk
from torch import nn

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator
from nvdd_md.helpers import refresh_neighbors
from nvdd_md.potential import Potential

STEP = 1e-4  # Å, of finite differences


class TwoLayers(Potential):
    """Two layers on Gaussians of distances: an atom feels others up to twice the cutoff away."""

    def __init__(self, cutoff=4.5, width=16, n_basis=8, seed=0):
        self.name = "two-layers"
        self.cutoff = cutoff
        self.exchanges = 1  # layers - 1
        self.dtype = torch.float64
        self.elements = frozenset({28, 29})
        self.network = random_network(n_basis, width, seed).to(self.dtype)
        self.centres = torch.linspace(1.5, cutoff, n_basis, dtype=self.dtype)  # Å

    def to(self, device):
        """Move the model to ``device``."""
        super().to(device)
        self.network.to(device)
        self.centres = self.centres.to(device)

    def forward(self, graph):
        """Return ``energies`` (n_centre_rows,) in eV. Collective."""
        distance = torch.linalg.vector_norm(graph.edge_vectors, dim=1)
        window = (1.0 - (distance / self.cutoff) ** 2) ** 3  # smooth at the cutoff
        basis = window[:, None] * torch.exp(-2.0 * (distance[:, None] - self.centres) ** 2)

        # Layer 1. The numbers of elements are known of all neighbours, without any exchange.
        net = self.network
        element = net["embedding"](graph.neighbour_numbers)[graph.edge_neighbour]
        features = net["layer 1"](sum_over_edges(net["radial 1"](basis) * element, graph))

        # Layer 2 reads the features of neighbours, which may belong to other ranks.
        read = refresh_neighbors(features)[graph.edge_neighbour]
        messages = sum_over_edges(net["radial 2"](basis) * read, graph)

        # What an atom reads of itself is in its own rows.
        own = torch.cat((features, messages, net["embedding"](graph.numbers)), dim=1)
        return {"energies": net["readout"](own).squeeze(1)}


def sum_over_edges(per_edge, graph):
    """Add the rows of ``per_edge`` (n_edges, n) to the centres of the edges."""
    total = per_edge.new_zeros(graph.n_centre_rows, per_edge.shape[1])
    return total.index_add(0, graph.edge_centre, per_edge)


def random_network(n_basis, width, seed):
    """Return modules with the same weights on every rank; ranks that differ are refused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "embedding": nn.Embedding(119, width),
            "radial 1": nn.Linear(n_basis, width, bias=False),
            "radial 2": nn.Linear(n_basis, width, bias=False),
            "layer 1": nn.Sequential(nn.Linear(width, width), nn.Tanh()),
            "readout": nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, 1)),
        }
        return nn.ModuleDict(modules).requires_grad_(False)


def main():
    atoms = bulk("Cu", cubic=True, a=3.6) * (3, 3, 3)
    atoms.numbers[::4] = 28
    atoms.rattle(0.1, seed=2)
    atoms.calc = DistributedCalculator(TwoLayers())

    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    print0(f"energy = {energy:.10f} eV")
    print0(f"sum of squares of forces = {np.sum(forces**2):.10f} (eV/Å)²")
    print0(f"largest force component = {np.abs(forces).max():.6f} eV/Å")
    print0(f"largest sum of forces = {np.abs(forces.sum(0)).max():.1e} eV/Å")

    # The first thing to check of a potential of your own: forces are minus the slope of the energy.
    errors = [
        force_from_energies(atoms, atom, axis) - forces[atom, axis]
        for atom in (0, 31, 77)
        for axis in range(3)
    ]
    print0(f"largest difference from finite differences = {np.abs(errors).max():.1e} eV/Å")


def force_from_energies(atoms, atom, axis):
    energies = []
    for step in (-STEP, STEP):
        moved = atoms.copy()
        moved.calc = atoms.calc
        moved.positions[atom, axis] += step
        energies.append(moved.get_potential_energy())
    return (energies[0] - energies[1]) / (2.0 * STEP)


if __name__ == "__main__":
    main()
