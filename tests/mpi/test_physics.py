"""What holds for any potential, whatever the number of ranks: derivatives and invariances."""

import itertools

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import VOIGT, assert_agree, assert_near, assert_same_bits, edges, on_rank_0, outcome
from oracle import TwoHop as Reference
from structures import STRUCTURES

from nvdd_md.calculators import DistributedCalculator, LennardJones, TwoHop
from nvdd_md.comm import SerialCommunicator
from nvdd_md.helpers import Scope, system_sum
from nvdd_md.potential import OutputKind, Potential


class MeanField(Potential):
    """Sums over the whole system in the middle of the network, and a term of the energy is one.

    With the coordination c_i = sum_j (1 - (r/rc)²)³ and C its sum over the atoms, E_i = a c_i C and
    another term of the energy is -a C²/3.
    """

    def __init__(self):
        self.name = "mean field"
        self.cutoff = 4.0
        self.outputs = {"energies": OutputKind.PER_NODE, "field": OutputKind.SYSTEM_TOTAL}
        self.energy_terms = ("energies", "field")

    def forward(self, graph):
        window = (1.0 - (graph.edge_vectors**2).sum(1) / self.cutoff**2) ** 3
        coordination = window.new_zeros(graph.n_centre_rows)
        coordination = coordination.index_add(0, graph.edge_centre, window)
        total = system_sum(coordination, graph.system, graph.n_systems, Scope.OWNED)
        return {
            "energies": 1e-3 * coordination * total[graph.system],
            "field": -1e-3 / 3 * total**2,
        }


ADDITIVE = {
    "two-hop": TwoHop,
    "lj": lambda: LennardJones(2.2, 0.05, rc=4.0, smooth=True),
}
POTENTIALS = ADDITIVE | {"mean-field": MeanField}


@pytest.fixture(params=POTENTIALS)
def calculator(comm, request):
    return DistributedCalculator(POTENTIALS[request.param](), comm, device="cpu")


@pytest.fixture(params=ADDITIVE)
def additive_calculator(comm, request):
    return DistributedCalculator(ADDITIVE[request.param](), comm, device="cpu")


def energy_of(atoms: Atoms, calculator: DistributedCalculator) -> float:
    atoms.calc = calculator
    return atoms.get_potential_energy()


# -- Forces and stress are derivatives of the energy


def test_forces_are_minus_the_gradient(calculator):
    atoms = STRUCTURES["alloy"]()
    forces = outcome(atoms, calculator).forces
    for atom, axis in ((0, 0), (7, 1), (17, 2), (35, 0)):
        assert abs(numerical_force(atoms, calculator, atom, axis) - forces[atom, axis]) < 1e-7


def numerical_force(atoms, calculator, atom, axis, step=1e-4):
    """Return the central difference of fourth order, eV/Å."""
    energies = []
    for shift in (-2, -1, 1, 2):
        moved = atoms.copy()
        moved.positions[atom, axis] += shift * step
        energies.append(energy_of(moved, calculator))
    return -(energies[0] - 8 * energies[1] + 8 * energies[2] - energies[3]) / (12 * step)


@pytest.mark.parametrize("axis", [0, 2])
def test_an_atom_moves_through_the_faces_of_the_domains(comm, axis):
    """Energy and forces do not notice where the faces are, nor who owns the atom."""
    calculator = DistributedCalculator(TwoHop(), comm, cut_axes=(axis,), skin=0.2, device="cpu")
    atoms = bulk("Cu", "sc", a=2.7) * np.where(np.arange(3) == axis, 6, 2)
    atoms.rattle(0.05, seed=3)
    atoms += Atoms("H", [[1.35, 1.35, 1.35]])
    length = atoms.cell.lengths()[axis]
    # Through every face and through the face of the cell, out of the cell.
    path = 1.35 + np.linspace(0.0, length, 25)

    owners, energies, forces = [], [], []
    for place in path:
        atoms.positions[-1, axis] = place
        energies.append(energy_of(atoms, calculator))
        forces.append(atoms.get_forces()[-1, axis])
        owners.append(int(calculator.engine.decomposition.owners[-1]))
    assert set(owners) == set(range(comm.size))
    assert_same_bits(comm, owners, energies, forces)

    # The atom ends one cell length further: nothing has changed.
    assert abs(energies[-1] - energies[0]) < 1e-11
    assert abs(forces[-1] - forces[0]) < 1e-10
    for k in crossings(owners)[:2] or [12]:
        before, after = path[k], path[k + 1]
        for place in (before, after):
            atoms.positions[-1, axis] = place
            force = outcome(atoms, calculator).forces[-1, axis]
            assert abs(numerical_force(atoms, calculator, -1, axis) - force) < 1e-7
        # In the small around the face: no step, neither of the energy nor of the force.
        edge = face_between(before, after, axis, atoms, calculator)
        sides = []
        for place in (edge - 1e-7, edge + 1e-7):
            atoms.positions[-1, axis] = place
            sides.append((energy_of(atoms, calculator), atoms.get_forces()))
        (e_low, f_low), (e_high, f_high) = sides
        assert abs(e_high - e_low + 2e-7 * f_low[-1, axis]) < 1e-11
        assert np.abs(f_high - f_low).max() < 1e-4 * np.abs(f_low).max()


def crossings(owners):
    """Return after which places the atom changed its owner."""
    return [k for k, (old, new) in enumerate(itertools.pairwise(owners)) if old != new]


def face_between(before, after, axis, atoms, calculator):
    """Return a place where a decomposition made afresh changes the owner of the last atom."""

    def owner(place):
        atoms.positions[-1, axis] = place
        calculator.engine.decomposition = None
        energy_of(atoms, calculator)
        return int(calculator.engine.decomposition.owners[-1])

    low, high = before, after
    first = owner(low)
    while high - low > 1e-7:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if owner(middle) == first else (low, middle)
    return 0.5 * (low + high)


def test_stress_is_the_derivative_by_strain(calculator):
    for name in ("alloy", "random_liquid_in_a_skewed_cell", "pbc_TFT"):
        atoms = STRUCTURES[name]()
        stress = outcome(atoms, calculator).stress
        numerical = [
            numerical_stress(atoms, calculator, row, column)
            for row, column in zip(*VOIGT, strict=True)
        ]
        assert np.abs(numerical - stress).max() < 1e-8, name


def numerical_stress(atoms, calculator, row, column, step=1e-4):
    """Return the derivative by a symmetric strain of one component, eV/Å³."""
    energies = []
    for shift in (-2, -1, 1, 2):
        strain = np.eye(3)
        strain[row, column] += 0.5 * shift * step
        strain[column, row] += 0.5 * shift * step
        strained = atoms.copy()
        strained.set_cell(atoms.cell.array @ strain)
        strained.positions = atoms.positions @ strain
        energies.append(energy_of(strained, calculator))
    difference = energies[0] - 8 * energies[1] + 8 * energies[2] - energies[3]
    return difference / (12 * step) / atoms.get_volume()


def test_a_replicated_term_counts_once(comm):
    for name in ("random_liquid", "pbc_TFT", "three_atoms", "isolated_atoms"):
        atoms = STRUCTURES[name]()
        calculators = [
            DistributedCalculator(MeanField(), group, device="cpu")
            for group in (comm, SerialCommunicator())
        ]
        got, wanted = (outcome(atoms.copy(), calculator) for calculator in calculators)
        assert_agree(got, wanted, 1e-12, 1e-11, 1e-12, name)
        assert_same_bits(comm, *got.arrays())
        _, _, d, _ = edges(atoms, 4.0)
        total = ((1 - (d / 4.0) ** 2) ** 3).sum()
        assert abs(got.energy - 1e-3 * 2 / 3 * total**2) <= 1e-12 * np.abs(got.energies).sum()


# -- Invariances


def test_forces_add_up_to_nothing(calculator):
    for name in ("random_liquid", "pbc_TFT", "cluster_without_cell", "unwrapped_atoms"):
        forces = outcome(STRUCTURES[name](), calculator).forces
        assert np.abs(forces.sum(0)).max() < 1e-12 * len(forces) * max(1, np.abs(forces).max())


def test_nothing_depends_on_where_or_how_the_system_lies(calculator):
    for name in ("alloy", "random_liquid_in_a_skewed_cell", "pbc_TFT", "cluster_without_cell"):
        atoms = STRUCTURES[name]()
        wanted = outcome(atoms, calculator)
        for variant in (shifted(atoms), by_lattice_vectors(atoms)):
            assert_agree(outcome(variant, calculator), wanted, 1e-12, 1e-11, 1e-12, name)

        order = np.random.default_rng(1).permutation(len(atoms))
        permuted = outcome(atoms[order], calculator)
        assert abs(permuted.energy - wanted.energy) < 1e-12 * np.abs(wanted.energies).sum()
        assert_near(permuted.energies, wanted.energies[order], 1e-12)
        assert_near(permuted.forces, wanted.forces[order], 1e-11)

        rotation = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))[0]
        turned = atoms.copy()
        turned.set_cell(atoms.cell.array @ rotation)
        turned.positions = atoms.positions @ rotation
        got = outcome(turned, calculator)
        assert abs(got.energy - wanted.energy) < 1e-12 * np.abs(wanted.energies).sum()
        assert_near(got.forces, wanted.forces @ rotation, 1e-11)


def shifted(atoms: Atoms) -> Atoms:
    copy = atoms.copy()
    copy.positions += [3.7, -12.9, 8.3]
    return copy


def by_lattice_vectors(atoms: Atoms) -> Atoms:
    """Move each atom by lattice vectors of its own along the periodic axes."""
    copy = atoms.copy()
    shifts = np.random.default_rng(0).integers(-3, 4, (len(atoms), 3)) * atoms.pbc
    copy.positions += shifts @ atoms.cell.array
    return copy


def test_equivalent_cells(calculator):
    atoms = bulk("Al", a=3.9) * (3, 3, 3)
    atoms.rattle(0.05, seed=2)
    wanted = outcome(atoms, calculator)
    for k in (1, 3, -5):
        skewed = atoms.copy()
        cell = atoms.cell.array.copy()
        cell[1] += k * cell[0]
        cell[2] -= k * cell[1]
        skewed.set_cell(cell, scale_atoms=False)
        assert_agree(outcome(skewed, calculator), wanted, 1e-12, 1e-11, 1e-12, f"k = {k}")


def test_a_supercell_is_so_many_cells(additive_calculator):
    atoms = bulk("NaCl", "rocksalt", a=4.6)
    atoms.rattle(0.1, seed=4)
    wanted = outcome(atoms, additive_calculator)
    got = outcome(atoms * (3, 2, 2), additive_calculator)
    assert abs(got.energy - 12 * wanted.energy) < 1e-12 * np.abs(got.energies).sum()
    assert_near(got.forces, np.tile(wanted.forces, (12, 1)), 1e-11)
    assert_near(got.stress, wanted.stress, 1e-12)


def test_far_fragments_add_up(additive_calculator):
    one, other = STRUCTURES["three_atoms"](), STRUCTURES["cluster_without_cell"]()
    other.positions += [0.0, 40.0, 0.0]
    apart = [outcome(part.copy(), additive_calculator) for part in (one, other)]
    together = outcome(one + other, additive_calculator)
    assert abs(together.energy - sum(part.energy for part in apart)) < 1e-11
    assert_near(together.forces, np.concatenate([part.forces for part in apart]), 1e-11)


# -- Anything at all


@st.composite
def systems(draw):
    """Any cell that is not flat, any pbc, up to 30 atoms anywhere, also outside the cell."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 30))
    lengths = [draw(st.floats(1.5, 14.0)) for _ in range(3)]
    cell = np.diag(lengths) @ (np.eye(3) + draw(st.floats(0.0, 1.2)) * rng.uniform(-1, 1, (3, 3)))
    if abs(np.linalg.det(cell)) < 0.2 * np.prod(lengths):
        cell = np.diag(lengths)
    atoms = Atoms(
        numbers=rng.choice(draw(st.sampled_from([[29], [1, 6, 8], [11, 17]])), n),
        cell=cell if draw(st.booleans()) else cell[rng.permutation(3)],
        pbc=[draw(st.booleans()) for _ in range(3)],
    )
    spread = draw(st.sampled_from([0.2, 1.0, 3.0]))
    atoms.set_scaled_positions(rng.uniform(-spread, spread, (n, 3)))
    if draw(st.booleans()):
        atoms.info["charge"] = draw(st.integers(-2, 2))
    return atoms


# Hypothesis may draw other examples on another rank (it takes constants from the modules that are
# loaded there), and then would shrink differently too: rank 0's counts, and is not shrunk.
@settings(max_examples=30, phases=[Phase.generate])
@given(atoms=systems())
def test_any_system(comm, atoms):
    atoms = comm.broadcast_object(atoms)
    wanted = on_rank_0(comm, lambda: outcome(atoms.copy(), Reference()))
    for potential_skin in (0.0, 0.7):
        calculator = DistributedCalculator(TwoHop(), comm, skin=potential_skin, device="cpu")
        got = outcome(atoms.copy(), calculator)
        assert_agree(got, wanted, 1e-12, 1e-11, 1e-12)
        assert_same_bits(comm, *got.arrays())
