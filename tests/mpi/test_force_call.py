"""One force call on every structure: n ranks give what the reference and what one rank give."""

import warnings
from functools import cache, partial

import numpy as np
import oracle
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators import lj
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.mixing import SumCalculator
from oracle import Outcome, assert_agree, assert_near, assert_same_bits, on_rank_0, outcome
from structures import STRUCTURES

from nvdd_md.calculators import DistributedCalculator, LennardJones, TwoHop
from nvdd_md.comm import Communicator, SerialCommunicator
from nvdd_md.potential import Potential

R11 = {"energy": 1e-12, "forces": 1e-11, "stress": 1e-12}
"""What n ranks may differ from one, in float64. Another program that does the same arithmetic in
another order may differ by no more. `oracle.assert_agree` has the measures."""

LJ = {"sigma": 2.2, "epsilon": 0.05, "rc": 4.0}
NOT_FOR_ASE_LJ = ("atoms_at_one_point", "no_atoms", "no_atoms_in_a_box")
FLOAT32 = ["alloy", "random_liquid", "unwrapped_atoms", "slab_across_the_face", "charged"]
DIAGONAL = [
    "crystal",
    "random_liquid",
    "pbc_TFT",
    "cluster_without_cell",
    "three_atoms",
    "no_atoms",
]


# These are asked for on rank 0 only: the others get them from there.


@cache
def by_reference(name: str) -> Outcome:
    return outcome(STRUCTURES[name](), oracle.TwoHop())


@cache
def by_one_rank(name: str) -> Outcome:
    return outcome(STRUCTURES[name](), distributed(TwoHop(), SerialCommunicator()))


@cache
def by_ase_lj(name: str, smooth: bool) -> Outcome:
    got = outcome(STRUCTURES[name](), lj.LennardJones(smooth=smooth, **LJ))
    if STRUCTURES[name]().pbc.any():
        return got
    return Outcome(got.energy, got.energies, got.forces, None, None)


def distributed(potential: Potential, comm: Communicator) -> DistributedCalculator:
    return DistributedCalculator(potential, comm, device="cpu")


@pytest.mark.parametrize("name", STRUCTURES)
def test_two_hop(comm, name):
    atoms = STRUCTURES[name]()
    before = atoms.copy()
    before_info = dict(atoms.info)
    got = outcome(atoms, distributed(TwoHop(), comm))

    assert_agree(got, on_rank_0(comm, lambda: by_reference(name)), **R11)
    assert_agree(got, on_rank_0(comm, lambda: by_one_rank(name)), **R11)
    assert_same_bits(comm, *got.arrays())
    if got.stress is not None:
        assert_near(got.stresses.sum(0), got.stress, 1e-13)
    assert atoms == before
    assert atoms.info == before_info
    assert all(np.array_equal(atoms.arrays[key], before.arrays[key]) for key in before.arrays)


@pytest.mark.parametrize(
    "backend_comm", [("mpi", 2), ("gloo", 1), ("gloo", 2), ("gloo", 3), ("gloo", 4)], indirect=True
)
def test_two_hop_over_each_backend(backend_comm):
    for name in DIAGONAL:
        got = outcome(STRUCTURES[name](), distributed(TwoHop(), backend_comm))
        wanted = on_rank_0(backend_comm, lambda name=name: by_one_rank(name))
        assert_agree(got, wanted, **R11, name=name)
        assert_same_bits(backend_comm, *got.arrays())


def test_each_rank_holds_its_own_part_only(comm):
    atoms = STRUCTURES["random_liquid"]()
    shapes = []

    class Watched(TwoHop):
        def forward(self, graph):
            shapes.append((graph.n_centre_rows, len(graph.neighbour_numbers), graph.n_owned))
            return super().forward(graph)

    calculator = distributed(Watched(), comm)
    outcome(atoms, calculator)
    load = calculator.partition_report(atoms)[comm.rank]
    assert shapes == [(load.owned, load.owned + load.ghosts, load.owned)]
    assert sum(n for ((n, _, _),) in comm.gather_objects(shapes)) == len(atoms)
    assert load.owned < 1.5 * len(atoms) / comm.size


def test_ranks_without_atoms(comm):
    load = distributed(TwoHop(), comm).partition_report(STRUCTURES["two_atoms"]())
    assert sorted(rank.owned for rank in load)[::-1][:2] == [1, 1] if comm.size > 1 else [2]
    assert [rank.owned for rank in load].count(0) == max(0, comm.size - 2)


# -- Lennard-Jones


@pytest.mark.parametrize("smooth", [False, True])
def test_lennard_jones_is_that_of_ase(comm, smooth):
    for name in sorted(STRUCTURES.keys() - set(NOT_FOR_ASE_LJ)):
        if name == "pairs_at_the_cutoff" and not smooth:
            continue  # where the force jumps; ASE takes the value on the near side
        got = outcome(STRUCTURES[name](), distributed(LennardJones(smooth=smooth, **LJ), comm))
        wanted = on_rank_0(comm, lambda name=name: by_ase_lj(name, smooth))
        assert_agree(got, wanted, **R11, name=name)
        assert_same_bits(comm, *got.arrays())


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_lennard_jones_has_the_defaults_of_ase(comm):
    atoms = STRUCTURES["random_liquid"]()
    for given in ({"sigma": 1.3}, {"sigma": 1.3, "smooth": True}, {"epsilon": 2.0, "rc": 3.3}):
        got = outcome(atoms.copy(), distributed(LennardJones(**given), comm))
        assert_agree(got, outcome(atoms.copy(), lj.LennardJones(**given)), **R11)
        assert got.forces.any()


def test_lennard_jones_parameters_that_make_no_sense():
    for given, words in (
        ({"sigma": 0.0}, "sigma must be positive"),
        ({"sigma": np.nan, "rc": 4.0}, "sigma must be positive"),
        ({"epsilon": -1.0}, "epsilon must be positive"),
        ({"epsilon": {"H": 1.0, "O": np.inf}}, "epsilon must be positive"),
        ({"sigma": {"Xy": 1.0}}, "chemical symbols"),
        ({"sigma": {}}, "chemical symbols"),
        ({"sigma": {"H": 1.0}, "epsilon": {"H": 1.0, "O": 1.0}}, r"different elements: \['O'\]"),
        ({"rc": -1.0}, "ro < rc"),
        ({"rc": np.nan}, "ro < rc"),
        ({"rc": 3.0, "ro": 3.0}, "ro < rc"),
    ):
        with pytest.raises(ValueError, match=words):
            LennardJones(**given)


@pytest.mark.parametrize("smooth", [False, True])
def test_lennard_jones_mixture_is_a_direct_sum(comm, smooth):
    atoms = STRUCTURES["random_liquid_in_a_skewed_cell"]()
    atoms.symbols[::3], atoms.symbols[1::3], atoms.symbols[2::3] = "H", "O", "Cu"
    sigma = {"H": 1.2, "O": 2.0, "Cu": 2.4}
    epsilon = {"H": 0.01, "O": 0.03, "Cu": 0.09}
    potential = LennardJones(sigma, epsilon, rc=4.5, smooth=smooth)
    assert potential.elements == {1, 8, 29}
    got = outcome(atoms, distributed(potential, comm))
    energies, forces, stress = on_rank_0(comm, lambda: pair_sum(atoms, sigma, epsilon, 4.5, smooth))
    assert_near(got.energies, energies, 1e-12)
    assert_near(got.forces, forces, 1e-11)
    assert_near(got.stress, stress, 1e-12)


def pair_sum(atoms, sigma, epsilon, rc, smooth):
    """Return energies, forces and stress of a Lorentz-Berthelot mixture, pair by pair."""
    energies, forces, virial = np.zeros(len(atoms)), np.zeros((len(atoms), 3)), np.zeros((3, 3))
    onset = 0.66 * rc
    for i, j, r, vector in zip(*oracle.edges(atoms, rc), strict=True):
        one, other = atoms.symbols[i], atoms.symbols[j]
        s = (sigma[one] + sigma[other]) / 2
        e = np.sqrt(epsilon[one] * epsilon[other])
        u = 4 * e * ((s / r) ** 12 - (s / r) ** 6)
        slope = 4 * e * (-12 * s**12 / r**13 + 6 * s**6 / r**7)
        if not smooth:
            u -= 4 * e * ((s / rc) ** 12 - (s / rc) ** 6)
        elif r > onset:
            width = (rc**2 - onset**2) ** 3
            switch = (rc**2 - r**2) ** 2 * (rc**2 + 2 * r**2 - 3 * onset**2) / width
            falling = 12 * r * (rc**2 - r**2) * (onset**2 - r**2) / width
            u, slope = u * switch, slope * switch + u * falling
        energies[i] += u / 2
        forces[i] += slope * vector / r
        virial += slope / 2 * np.outer(vector, vector) / r
    return energies, forces, virial[oracle.VOIGT] / atoms.cell.volume


# -- Single precision


@pytest.mark.parametrize("make", [TwoHop, partial(LennardJones, **LJ)], ids=["two-hop", "lj"])
def test_float32(comm, make):
    for name in FLOAT32:
        atoms = STRUCTURES[name]()
        got = outcome(atoms, distributed(make(dtype=torch.float32), comm))
        alone = outcome(atoms, distributed(make(dtype=torch.float32), SerialCommunicator()))
        largest = np.abs(alone.forces).max()
        noise = permutation_noise(atoms, alone, make(dtype=torch.float32))
        assert np.abs(got.forces - alone.forces).max() <= min(3 * noise, 1e-5 * largest), name
        assert abs(got.energy - alone.energy) <= 1e-7 * np.abs(alone.energies).sum(), name
        assert_near(got.stress, alone.stress, 1e-7, name)
        assert all(array.dtype == np.float64 for array in got.arrays())
        assert_same_bits(comm, *got.arrays())
        # Single precision of the powers and exponentials in the models, nothing worse.
        exact = outcome(atoms, distributed(make(), SerialCommunicator()))
        assert_agree(got, exact, 2e-6, 1e-5, 2e-6, name)


def permutation_noise(atoms: Atoms, plain: Outcome, potential: Potential) -> float:
    """Return what renumbering the atoms does to the forces of the same model in one process."""
    noise = 0.0
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(atoms))
        renumbered = atoms[order]
        renumbered.info = dict(atoms.info)
        forces = outcome(renumbered, distributed(potential, SerialCommunicator())).forces
        noise = max(noise, np.abs(forces - plain.forces[order]).max())
    return noise


def test_float32_sums_are_float64(comm):
    atoms = bulk("Cu", cubic=True, a=3.6) * (8, 8, 8)
    atoms.rattle(0.05, seed=9)
    atoms.calc = distributed(TwoHop(dtype=torch.float32), comm)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    assert type(energy) is float
    assert forces.dtype == np.float64
    assert np.abs(forces.sum(0)).max() < 1e-10  # each edge's force is added and subtracted

    assert_same_bits(comm, energy, forces)
    copy = atoms.copy()
    copy.calc = distributed(TwoHop(dtype=torch.float32), SerialCommunicator())
    assert abs(energy - copy.get_potential_energy()) < 1e-7 * len(atoms)
    exact = on_rank_0(comm, lambda: outcome(atoms, oracle.TwoHop()).energy)
    assert abs(energy - exact) < 1e-7 * len(atoms)


# -- What ASE expects


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_shapes_and_dtypes(comm, dtype):
    atoms = STRUCTURES["alloy"]()
    n = len(atoms)
    atoms.calc = calculator = distributed(TwoHop(dtype=dtype), comm)
    assert type(atoms.get_potential_energy()) is float
    assert type(atoms.get_potential_energy(force_consistent=True)) is float
    shapes = {"energies": (n,), "forces": (n, 3), "stress": (6,), "stresses": (n, 6)}
    for name, shape in shapes.items():
        value = calculator.get_property(name, atoms)
        assert isinstance(value, np.ndarray)
        assert value.dtype == np.float64
        assert value.shape == shape
    assert set(calculator.results) == {"energy", "free_energy", *shapes}
    assert calculator.results["free_energy"] == calculator.results["energy"]
    assert set(calculator.implemented_properties) == set(calculator.results)


def test_stress_is_positive_under_tension(comm):
    for scale, sign in ((0.94, -1), (1.06, 1)):
        atoms = bulk("Cu", cubic=True, a=3.6 * scale) * (2, 2, 2)
        atoms.calc = distributed(TwoHop(), comm)
        assert (np.sign(atoms.get_stress()[:3]) == sign).all()


def test_order_of_stress_components(comm):
    for row, column, voigt in ((1, 2, 3), (0, 2, 4), (0, 1, 5)):
        atoms = bulk("Cu", cubic=True, a=3.6) * (2, 2, 2)
        cell = atoms.cell.array.copy()
        cell[row, column] += 0.4
        atoms.set_cell(cell, scale_atoms=True)
        atoms.calc = distributed(TwoHop(), comm)
        stress = atoms.get_stress()
        others = [component for component in (3, 4, 5) if component != voigt]
        assert abs(stress[voigt]) > 10 * np.abs(stress[others]).max()
        assert atoms.get_stress(voigt=False)[row, column] == stress[voigt]


def test_sum_of_two_calculators(comm):
    atoms = STRUCTURES["alloy"]()
    single = outcome(atoms, distributed(TwoHop(), comm))
    atoms.calc = SumCalculator([distributed(TwoHop(), comm), distributed(TwoHop(), comm)])
    assert atoms.get_potential_energy() == 2 * single.energy
    assert np.array_equal(atoms.get_forces(), 2 * single.forces)
    assert np.array_equal(atoms.get_stress(), 2 * single.stress)


def test_no_stress_without_a_volume(comm):
    without = [
        name for name, make in STRUCTURES.items() if make().cell.rank < 3 or not any(make().pbc)
    ]
    assert len(without) > 10
    for name in without:
        atoms = STRUCTURES[name]()
        atoms.calc = distributed(TwoHop(), comm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for ask in (atoms.get_stress, atoms.get_stresses):
                with pytest.raises(PropertyNotImplementedError, match="three cell vectors"):
                    ask()
            assert np.isfinite(atoms.get_potential_energy()), name
            assert np.isfinite(atoms.get_forces()).all(), name
        assert not {"stress", "stresses"} & set(atoms.calc.results), name


# -- What a structure without neighbours is worth


def test_zero_atoms(comm):
    for name in ("no_atoms", "no_atoms_in_a_box"):
        atoms = STRUCTURES[name]()
        atoms.calc = distributed(TwoHop(), comm)
        assert atoms.get_potential_energy() == 0.0
        assert atoms.get_forces().shape == (0, 3)
        assert atoms.get_potential_energies().shape == (0,)
    assert not atoms.get_stress().any()
    assert atoms.get_stresses().shape == (0, 6)


def test_isolated_atoms_add_up(comm):
    calculator = distributed(TwoHop(), comm)
    oxygen = outcome(Atoms("O"), calculator).energy
    pair = outcome(Atoms("O2", [[0, 0, 0], [0, 0, 10]]), calculator)
    assert abs(pair.energy - 2 * oxygen) < 1e-12
    assert not pair.forces.any()

    methane = outcome(molecule("CH4"), calculator).energy
    argon = outcome(Atoms("Ar"), calculator).energy
    both = outcome(STRUCTURES["last_atom_isolated"](), calculator)
    assert abs(both.energy - methane - argon) < 1e-12 * np.abs(both.energies).sum()
    assert not both.forces[-1].any()

    box = outcome(STRUCTURES["isolated_atoms_in_a_box"](), calculator)
    assert abs(box.energy - 3 * argon) < 1e-12
    assert not box.stress.any()


def test_open_axes_do_not_see_cell_or_origin(comm):
    calculator = distributed(TwoHop(), comm)
    wanted = outcome(molecule("CH3CH2OH"), calculator)
    for length in (0.5, 1.0, 40.0):
        for shift, tolerance in ((0.0, 1e-12), (11.3, 1e-11), (-5000.0, 1e-9)):
            moved = molecule("CH3CH2OH")
            moved.set_cell([length] * 3)
            moved.positions += shift
            assert_agree(outcome(moved, calculator), wanted, 1e-11, tolerance, 1e-12)
