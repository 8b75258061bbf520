"""Systems, reference lists and small potentials that the tests of the domain code share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.geometry import cellpar_to_cell, complete_cell
from ase.neighborlist import primitive_neighbor_list
from scipy.spatial import cKDTree
from torch import Tensor

from nvdd_md.comm import SerialCommunicator
from nvdd_md.domain.lattice import Lattice
from nvdd_md.domain.neighbors import Box, Edges, find_edges
from nvdd_md.domain.partition import bisect
from nvdd_md.helpers import Scope, refresh_neighbors, system_sum
from nvdd_md.potential import LocalGraph, OutputKind, Potential

ALL_PBC = tuple((bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8))
PERIODIC, OPEN = (True, True, True), (False, False, False)


# -- Random cells and atoms


def random_cell(rng: np.random.Generator, shortest: float = 3.0) -> np.ndarray:
    """Return a random triclinic cell (3, 3) in Å, of either handedness, anywhere in space."""
    while True:
        cell = rng.normal(size=(3, 3))
        cell *= rng.uniform(shortest, 20.0, (3, 1)) / np.linalg.norm(cell, axis=1, keepdims=True)
        if (Lattice.from_cell(cell, np.ones(3, bool)).heights > 0.5 * shortest).all():
            return cell


def random_positions(rng: np.random.Generator, n: int, cell: np.ndarray, spread: float = 0.0):
    """Return positions (n, 3) up to `spread` cells outside of `cell`."""
    return rng.uniform(-spread, 1.0 + spread, (n, 3)) @ cell


def lattice_of(cell: np.ndarray, pbc: tuple[bool, bool, bool]) -> Lattice:
    return Lattice.from_cell(np.asarray(cell, dtype=float), np.array(pbc))


# -- Systems whose load is hard to divide


@dataclass(frozen=True)
class Case:
    """A system and a cutoff, Å."""

    positions: np.ndarray
    cell: np.ndarray
    pbc: tuple[bool, bool, bool]
    cutoff: float

    @property
    def lattice(self) -> Lattice:
        return lattice_of(self.cell, self.pbc)

    @property
    def ids(self) -> np.ndarray:
        return np.arange(len(self.positions))


def rattled(atoms: Atoms, rng: np.random.Generator, amount: float = 0.05) -> np.ndarray:
    return atoms.positions + rng.normal(0.0, amount, atoms.positions.shape)


def crystal() -> Case:
    atoms = bulk("Cu", a=3.6, cubic=True) * (7, 7, 7)
    positions = rattled(atoms, np.random.default_rng(1))
    return Case(positions, atoms.cell.array, PERIODIC, 5.0)


def slab() -> Case:
    """Half metal, half vacuum; the metal straddles the face of the cell."""
    atoms = bulk("Cu", a=3.6, cubic=True) * (8, 8, 6)
    positions = rattled(atoms, np.random.default_rng(2))
    cell = atoms.cell.array * [[1.0], [1.0], [2.0]]
    positions[:, 2] += 0.8 * cell[2, 2]
    return Case(positions, cell, PERIODIC, 5.0)


def droplet() -> Case:
    """A ball in vacuum, without a cell."""
    atoms = bulk("Cu", a=3.6, cubic=True) * (9, 9, 9)
    atoms.positions -= atoms.positions.mean(axis=0)
    atoms = atoms[np.linalg.norm(atoms.positions, axis=1) < 16.0]
    return Case(rattled(atoms, np.random.default_rng(3)), np.zeros((3, 3)), OPEN, 5.0)


def interface() -> Case:
    """Metal beside a dilute gas, atoms in random order."""
    rng = np.random.default_rng(4)
    atoms = bulk("Cu", a=3.6, cubic=True) * (6, 6, 8)
    width, _, height = atoms.cell.lengths()
    gas = rng.uniform(0.0, 1.0, (200, 3)) * [width, width, 1.2 * height] + [0.0, 0.0, height]
    positions = rng.permutation(np.concatenate((rattled(atoms, rng), gas)))
    return Case(positions, np.diag([width, width, 2.2 * height]), PERIODIC, 5.0)


UNEVEN: Mapping[str, Callable[[], Case]] = {
    "crystal": crystal,
    "slab": slab,
    "droplet": droplet,
    "interface": interface,
}


# -- Odd geometries for neighbour lists


def _odd_cases() -> dict[str, Case]:
    rng = np.random.default_rng(7)
    cases: dict[str, Case] = {}

    def add(name: str, n: int, cell, pbc, cutoff: float, spread: float = 0.0) -> None:
        cell = np.asarray(cell, dtype=float)
        inside = cell if abs(np.linalg.det(cell)) > 1e-9 else complete_cell(cell) * 1.0
        cases[name] = Case(random_positions(rng, n, inside, spread), cell, pbc, cutoff)

    tilted = cellpar_to_cell([7.0, 8.0, 9.0, 75.0, 95.0, 110.0])
    for pbc in ALL_PBC:
        letters = "".join("xyz"[axis] if pbc[axis] else "-" for axis in range(3))
        add(f"pbc {letters}", 24, tilted, pbc, 4.3)
        add(f"pbc {letters}, many atoms", 250, 2.0 * tilted, pbc, 3.1)
    for angle in (15.0, 30.0, 160.0):
        flat = cellpar_to_cell([9.0, 11.0, 10.0, 90.0, 90.0, angle])
        add(f"angle {angle:g}", 30, flat, PERIODIC, 3.7)
    sharp = cellpar_to_cell([10.0, 10.0, 10.0, 15.0, 15.0, 15.0])
    add("three angles of 15", 12, sharp, PERIODIC, 3.0)
    add("left-handed", 30, tilted[[1, 0, 2]], PERIODIC, 4.0)
    add("left-handed, mixed", 30, -tilted, (True, False, True), 4.0)
    add("needle", 40, np.diag([1.9, 2.3, 50.0]), PERIODIC, 5.0)
    add("plate", 40, np.diag([30.0, 2.0, 30.0]), PERIODIC, 5.0)
    add("unwrapped", 60, tilted, PERIODIC, 4.0, spread=6.0)
    add("unwrapped, mixed", 60, tilted, (True, True, False), 4.0, spread=3.0)
    add("one atom", 1, bulk("Al").cell.array, PERIODIC, 8.1)
    add("one atom, wire", 1, np.diag([2.5, 0.0, 0.0]), (True, False, False), 9.9)
    add("one atom, open", 1, np.zeros((3, 3)), OPEN, 5.0)

    primitive = bulk("Mg")
    cases["two atoms"] = Case(primitive.positions, primitive.cell.array, PERIODIC, 7.3)
    metal = bulk("Cu", a=3.6, cubic=True) * (4, 4, 4)
    cases["perfect crystal"] = Case(metal.positions, metal.cell.array, PERIODIC, 4.0)
    silicon = bulk("Si") * (3, 3, 3)
    for where in (1.0e3, 1.0e5):
        positions = rattled(silicon, rng) + where
        cases[f"{where:g} Å from the origin"] = Case(positions, silicon.cell.array, PERIODIC, 4.9)
    steep = np.array([[10.0, 0.0, 30.0], [0.0, 10.0, 0.0], [0.0, 0.0, 0.0]])
    thick = rng.uniform(0.0, 1.0, (400, 3)) @ np.array([steep[0], steep[1], [-30.0, 0.0, 60.0]])
    cases["steep slab"] = Case(thick, steep, (True, True, False), 2.5)
    oblique = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [9.0, 12.0, 8.0]])
    cases["oblique wire"] = Case(thick, oblique, (False, False, True), 2.5)
    cloud = rng.normal(0.0, 4.0, (80, 3))
    cases["open, no cell"] = Case(cloud, np.zeros((3, 3)), OPEN, 3.0)
    cases["open, far from the origin"] = Case(cloud + 1.0e5, np.zeros((3, 3)), OPEN, 3.0)
    cases["open, cell smaller than the atoms"] = Case(cloud, np.eye(3), OPEN, 3.0)
    slab_cell = np.array([[9.0, 0.0, 0.0], [2.0, 8.0, 0.0], [0.0, 0.0, 0.0]])
    cases["slab, no third vector"] = Case(cloud, slab_cell, (True, True, False), 3.0)
    slab_cell = np.array([[9.0, 0.0, 0.0], [2.0, 8.0, 0.0], [9.0, 0.0, 1.0e-3]])
    cases["slab, dummy third vector"] = Case(cloud, slab_cell, (True, True, False), 3.0)
    wire_cell = np.array([[0.0, 0.0, 0.0], [3.0, 4.0, 5.0], [3.0, 4.0, 5.0]])
    cases["wire, dummy third vector"] = Case(cloud, wire_cell, (False, True, False), 3.0)
    apart = np.concatenate((cloud[:20], cloud[:20] + np.array([0.0, 3.0e5, 0.0])))
    cases["far-away molecules"] = Case(apart, np.zeros((3, 3)), OPEN, 3.0)
    pile = np.repeat(cloud[:8], 3, axis=0)
    cases["atoms on top of each other"] = Case(pile, np.eye(3) * 6.0, PERIODIC, 3.0)
    return cases


ODD: Mapping[str, Case] = _odd_cases()


# -- Neighbour lists: ASE's, and ours over ranks simulated in one process


def ase_edges(positions: np.ndarray, lattice: Lattice, cutoff: float) -> np.ndarray:
    """Return ASE's full list as sorted rows (centre, neighbour, shift), (n_edges, 5) int64."""
    centre, neighbour, shift = primitive_neighbor_list(
        "ijS", lattice.pbc, lattice.vectors, positions, cutoff, self_interaction=False
    )
    return sorted_rows(np.column_stack((centre, neighbour, shift)).astype(np.int64))


def tree_edges(positions: np.ndarray, lattice: Lattice, cutoff: float) -> np.ndarray:
    """Return the full list as `ase_edges` does, from search trees: for large and empty boxes."""
    images = np.where(lattice.pbc, np.floor(lattice.fractional(positions)), 0).astype(int)
    wrapped = positions - images @ lattice.vectors
    reach = np.where(lattice.pbc, np.ceil(cutoff / lattice.heights), 0).astype(int)
    tree = cKDTree(wrapped)
    parts = [np.zeros((0, 5), dtype=int)]
    for shift in product(*(range(-n, n + 1) for n in reach)):
        moved = cKDTree(wrapped + np.array(shift) @ lattice.vectors)
        pairs = tree.sparse_distance_matrix(moved, cutoff, output_type="ndarray")
        centre, neighbour = pairs["i"], pairs["j"]
        shifts = np.array(shift) + images[centre] - images[neighbour]
        rows = np.column_stack((centre, neighbour, shifts))
        parts.append(rows if any(shift) else rows[centre != neighbour])
    return sorted_rows(np.concatenate(parts))


def rows_of(edges: Edges) -> np.ndarray:
    """Return edges as rows (centre, neighbour, shift), (n_edges, 5), in their order."""
    return np.column_stack((edges.centre, edges.neighbour, edges.shift))


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def all_edges(positions: np.ndarray, lattice: Lattice, cutoff: float) -> Edges:
    """Return the edges of all centres, as one rank finds them."""
    ids = np.arange(len(positions))
    return find_edges(positions, ids, len(ids), lattice, cutoff)


def candidates(case: Case, owned: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
    """Return the atoms among `others` that may be within `reach` of an owned one."""
    box = Box.around(case.positions[owned], case.lattice)
    return others[box.near(case.positions[others], case.lattice, reach)]


def edges_of(case: Case, owned: np.ndarray, nearby: np.ndarray) -> Edges:
    """Return the edges of the owned centres."""
    ids = np.concatenate((owned, nearby))
    return find_edges(case.positions[ids], ids, len(owned), case.lattice, case.cutoff)


def owners_of(case: Case, n_ranks: int, weights: np.ndarray | None = None) -> np.ndarray:
    if weights is None:
        weights = np.ones(len(case.positions))
    bricks = bisect(case.positions, case.ids, weights, case.lattice, SerialCommunicator(), n_ranks)
    return bricks.owners(case.positions, case.ids, case.lattice)


def edges_by_rank(case: Case, owners: np.ndarray, n_ranks: int) -> list[Edges]:
    """Return what each rank finds from its owned atoms and its candidates."""
    found = []
    for rank in range(n_ranks):
        owned, others = case.ids[owners == rank], case.ids[owners != rank]
        nearby = candidates(case, owned, others, case.cutoff)
        found.append(edges_of(case, owned, nearby))
    return found


# -- Small potentials


def random_matrix(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(0.0, 1.0 / np.sqrt(shape[-1]), shape))


class Net(Potential):
    """Message-passing network with random weights; scalar and vector features.

    Layer 1 reads only species; each later one refreshes one tensor (n, 4, width): scalars and
    vectors together.

    Parameters
    ----------
    layers, width : int
    cutoff : float, Å
    dtype : torch.dtype
    """

    def __init__(
        self,
        layers: int = 3,
        width: int = 6,
        cutoff: float = 3.5,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        rng = np.random.default_rng(11)
        self.name = "random network"
        self.cutoff = cutoff
        self.exchanges = layers - 1
        self.dtype = dtype
        self.width = width
        self.embedding = random_matrix(rng, 119, width).to(dtype)
        self.source = [random_matrix(rng, width, width).to(dtype) for _ in range(layers)]
        self.radial = [random_matrix(rng, 3, width).to(dtype) for _ in range(layers)]
        self.keep = [random_matrix(rng, width, width).to(dtype) for _ in range(layers)]
        self.readout = random_matrix(rng, width).to(dtype)

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_centre_rows,) in eV."""
        return {"energies": self.energies_of(self.features(graph))}

    def energies_of(self, features: Tensor) -> Tensor:
        return features[:, 0] @ self.readout + 0.1 * (features[:, 1:] ** 2).sum((1, 2))

    def features(self, graph: LocalGraph) -> Tensor:
        """Return the features after the last layer, (n_centre_rows, 4, width)."""
        own = self._embed(graph.numbers)
        for layer in range(len(self.source)):
            sources = refresh_neighbors(own) if layer else self._embed(graph.neighbour_numbers)
            own = self._layer(layer, own, sources, graph)
        return own

    def _embed(self, numbers: Tensor) -> Tensor:
        scalars = self.embedding[numbers]
        return torch.cat((scalars[:, None], scalars.new_zeros((len(scalars), 3, self.width))), 1)

    def _layer(self, layer: int, own: Tensor, sources: Tensor, graph: LocalGraph) -> Tensor:
        vectors = graph.edge_vectors
        distance = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        window = (1.0 - (distance / self.cutoff) ** 2) ** 3
        basis = torch.cat((window, window**2, window * distance), 1) @ self.radial[layer]
        sent = (sources @ self.source[layer])[graph.edge_neighbour]
        scalar, vector = sent[:, 0] * basis, sent[:, 1:] * basis[:, None]
        scalar = scalar + (sent[:, 1:] * vectors[:, :, None]).sum(1) * window
        vector = vector + scalar[:, None] * vectors[:, :, None]
        message = torch.cat((scalar[:, None], vector), 1)
        total = torch.zeros_like(own).index_add(0, graph.edge_centre, message)
        mixed = own @ self.keep[layer] + total
        scalars = torch.tanh(mixed[:, :1] + 0.2 * (mixed[:, 1:] ** 2).sum(1, keepdim=True))
        return torch.cat((scalars, 0.3 * mixed[:, 1:]), 1)


class Charged(Net):
    """A network with the total charge in its middle: Q feeds every atom, and E = Σ e_i + f(Q).

    Parameters
    ----------
    kind : OutputKind
        How f(Q) is given back: ``SYSTEM_TOTAL`` or ``GLOBAL``.
    """

    def __init__(self, kind: OutputKind = OutputKind.SYSTEM_TOTAL, **settings: object) -> None:
        super().__init__(**settings)
        self.name = "charged network"
        self.outputs = {"energies": OutputKind.PER_NODE, "coulomb": kind}
        self.energy_terms = ("energies", "coulomb")
        self.kind = kind

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_centre_rows,) and ``coulomb``, eV."""
        features = self.features(graph)
        charges = torch.tanh(features[:, 0].sum(1))
        total = system_sum(charges, graph.system, graph.n_systems)
        scale = 1.0 + 0.3 * torch.sin(0.1 * total)[graph.system]
        energies = self.energies_of(features) * scale + 0.05 * charges * total[graph.system]
        coulomb = 0.02 * total**2 + torch.cos(total)
        if self.kind is OutputKind.GLOBAL:
            coulomb = coulomb.sum()
        return {"energies": energies, "coulomb": coulomb}


class PartialSum(Net):
    """A network that returns this rank's part of the energy, not that of each atom."""

    outputs: Mapping[str, OutputKind] = {"partial": OutputKind.SYSTEM_PARTIAL}
    energy_terms = ("partial",)

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``partial`` (n_systems,) in eV."""
        energies = self.energies_of(self.features(graph))
        return {"partial": system_sum(energies, graph.system, graph.n_systems, Scope.LOCAL)}
