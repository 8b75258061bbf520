"""The calculator as ASE and its users meet it: caching, inputs, errors, ranks that disagree."""

import copy
import logging
import pickle
import random
from typing import ClassVar

import numpy as np
import oracle
import pytest
import torch
from ase.build import bulk
from ase.calculators.calculator import PropertyNotImplementedError
from ase.md.verlet import VelocityVerlet
from oracle import assert_agree, assert_near, assert_same_bits, on_rank_0, outcome
from structures import STRUCTURES

from nvdd_md.agreement import DisagreementError
from nvdd_md.calculators import DistributedCalculator, LennardJones, TwoHop
from nvdd_md.comm import SerialCommunicator
from nvdd_md.engine import ForceEngine
from nvdd_md.helpers import Scope, system_sum
from nvdd_md.potential import InfoKey, OutputKind
from nvdd_md.results import NonFiniteError

several_ranks = pytest.mark.parametrize("comm", [2, 3, 4], indirect=True, ids="ranks{}".format)


class Counted(TwoHop):
    """Counts its forward passes."""

    calls = 0

    def forward(self, graph):
        self.calls += 1
        return super().forward(graph)


@pytest.fixture
def calculator(comm):
    return DistributedCalculator(Counted(elements=[28, 29, 1, 6, 8]), comm, device="cpu")


@pytest.fixture
def atoms():
    atoms = bulk("Cu", cubic=True, a=3.6) * (3, 2, 2)
    atoms.rattle(0.05, seed=1)
    return atoms


def distributed(potential, comm, **options) -> DistributedCalculator:
    return DistributedCalculator(potential, comm, device="cpu", **options)


def assert_correct(comm, atoms, calculator):
    """Compare with the reference."""
    got = outcome(atoms, calculator)
    wanted = on_rank_0(comm, lambda: outcome(atoms.copy(), oracle.TwoHop()))
    assert_agree(got, wanted, 1e-12, 1e-11, 1e-12)
    assert_same_bits(comm, *got.arrays())


def assert_fails_alike(comm, call, kind, *words):
    """Demand the same error on all ranks, of this very kind and with these words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind
    for word in words:
        assert word in message
    assert comm.gather_objects(message) == [message] * comm.size


# -- One evaluation per configuration


def test_one_evaluation_serves_all_properties(calculator, atoms):
    atoms.calc = calculator
    atoms.get_forces()
    atoms.get_potential_energy()
    for _ in range(2):
        atoms.get_stress()
        atoms.get_potential_energies()
        atoms.get_stresses()
    assert calculator.potential.calls == 1
    assert calculator.engine.n_evaluations == 1

    dynamics = VelocityVerlet(atoms, 0.2)
    dynamics.attach(
        lambda: (atoms.get_potential_energy(), atoms.get_stress(), atoms.get_stresses())
    )
    dynamics.run(10)
    assert calculator.potential.calls == 11


def test_stresses_first(calculator, atoms):
    atoms.calc = calculator
    stresses = atoms.get_stresses()
    assert_near(stresses.sum(0), atoms.get_stress(), 1e-13)
    assert calculator.potential.calls == 1


def test_what_is_cached_needs_no_other_rank(comm, calculator, atoms):
    atoms.calc = calculator
    energy = outcome(atoms, calculator).energy
    before = comm.traffic.snapshot()
    if comm.rank == 0:
        assert atoms.get_potential_energy() == energy
        assert atoms.get_forces().shape == (48, 3)
        assert atoms.get_stresses().shape == (48, 6)
        assert calculator.get_property("energy") == energy
        with pytest.raises(PropertyNotImplementedError):
            atoms.get_dipole_moment()
    assert comm.traffic == before
    assert calculator.potential.calls == 1
    if comm.rank == 0:
        atoms.positions[0] += 0.01
        assert calculator.get_property("energy", atoms, allow_calculation=False) is None
    assert comm.traffic == before


def test_a_molecule_asked_for_its_stress_stays_cached(comm, calculator):
    atoms = STRUCTURES["cluster_without_cell"]()
    atoms.calc = calculator
    atoms.get_forces()
    before = comm.traffic.snapshot()
    if comm.rank == 0:
        with pytest.raises(PropertyNotImplementedError):
            atoms.get_stress()
    assert comm.traffic == before
    assert calculator.potential.calls == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda atoms: atoms.positions.__setitem__((3, 1), atoms.positions[3, 1] + 1e-14),
        lambda atoms: atoms.numbers.__setitem__(0, 28),
        lambda atoms: atoms.set_pbc((True, False, True)),
        lambda atoms: atoms.cell.__setitem__((2, 2), atoms.cell[2, 2] * 1.001),
        lambda atoms: atoms.info.update(charge=1),
        lambda atoms: atoms.pop(-1),
    ],
    ids=["positions", "numbers", "pbc", "cell", "info", "natoms"],
)
def test_every_change_is_noticed(comm, calculator, atoms, change):
    assert_correct(comm, atoms, calculator)
    change(atoms)
    assert_correct(comm, atoms, calculator)
    assert calculator.potential.calls == 2


def test_what_the_model_does_not_read_is_no_change(calculator, atoms):
    outcome(atoms, calculator)
    atoms.set_velocities(np.ones((48, 3)))
    atoms.set_tags(range(48))
    atoms.info["comment"] = "new"
    outcome(atoms, calculator)
    assert calculator.potential.calls == 1


def test_results_are_the_callers_own(calculator, atoms):
    atoms.calc = calculator
    forces = atoms.get_forces()
    wanted = forces.copy()
    forces[:] = 0.0
    assert np.array_equal(atoms.get_forces(), wanted)


# -- Inputs beside the geometry


def test_charge_reaches_the_model_and_info_stays_as_it_is(comm, calculator):
    atoms = STRUCTURES["charged"]()
    atoms.numbers[:] = 29
    assert atoms.info == {"charge": -2}
    assert_correct(comm, atoms, calculator)
    charged = atoms.get_potential_energy()
    assert atoms.info == {"charge": -2}

    del atoms.info["charge"]
    assert_correct(comm, atoms, calculator)
    assert atoms.info == {}
    assert abs(atoms.get_potential_energy() - charged) > 1e-3
    assert calculator.potential.calls == 2


def test_a_default_is_told_once_by_rank_0(comm, calculator, atoms, caplog):
    with caplog.at_level(logging.WARNING, "nvdd_md"):
        for _ in range(3):
            atoms.rattle(0.01, seed=2)
            outcome(atoms, calculator)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (1 if comm.rank == 0 else 0)
    assert all("charge" in message and "0 is used" in message for message in told)

    caplog.clear()
    atoms.info["charge"] = 0
    with caplog.at_level(logging.WARNING, "nvdd_md"):
        outcome(atoms, distributed(TwoHop(), comm))
    assert not caplog.records


def test_a_charge_that_is_none(comm, calculator, atoms):
    atoms.calc = calculator
    for value, words in (
        (0.5, "whole number"),
        (np.nan, "whole number"),
        ("one", "must be a number"),
        (True, "must be a number"),
        (None, "must be a number"),
    ):
        atoms.info["charge"] = value
        assert_fails_alike(comm, atoms.get_forces, ValueError, "charge", words, repr(value))
        assert atoms.info["charge"] is value
    atoms.info["charge"] = np.int64(1)
    assert_correct(comm, atoms, calculator)


def test_conflicting_charges(comm, calculator, atoms):
    atoms.set_initial_charges([0.5, 0.5] + [0.0] * 46)
    atoms.calc = calculator
    assert_fails_alike(comm, atoms.get_forces, ValueError, "conflicting", "0", "add up to 1")
    atoms.info["charge"] = -1
    assert_fails_alike(comm, atoms.get_forces, ValueError, "conflicting", "-1", "add up to 1")
    atoms.info["charge"] = 1
    assert_correct(comm, atoms, calculator)


class Weighted(Counted):
    """Adds a value of each atom, and a field, to the energies; tells more than energies."""

    def __init__(self):
        super().__init__()
        self.array_keys = ("offset",)
        self.info_keys = self.info_keys | {"field": InfoKey(default=0.25)}
        self.outputs = {
            "energies": OutputKind.PER_NODE,
            "vectors": OutputKind.PER_NODE,
            "partial": OutputKind.SYSTEM_PARTIAL,
            "total": OutputKind.SYSTEM_TOTAL,
            "constant": OutputKind.GLOBAL,
        }

    def forward(self, graph):
        energies = super().forward(graph)["energies"]
        offset, field = graph.arrays["offset"], graph.info["field"]
        numbers = graph.numbers.to(self.dtype)
        return {
            "energies": energies + field[graph.system] * offset,
            "vectors": torch.stack((numbers, offset), dim=1),
            "partial": system_sum(numbers, graph.system, graph.n_systems, Scope.LOCAL),
            "total": system_sum(offset, graph.system, graph.n_systems, Scope.OWNED),
            "constant": field,
        }


def test_arrays_and_outputs_of_every_kind(comm, atoms):
    offset = np.linspace(-1.0, 2.0, len(atoms))
    plain = outcome(atoms.copy(), distributed(TwoHop(), comm))
    atoms.set_array("offset", offset.copy())
    atoms.calc = calculator = distributed(Weighted(), comm)
    assert abs(atoms.get_potential_energy() - plain.energy - 0.25 * offset.sum()) < 1e-11
    assert_near(atoms.get_potential_energies(), plain.energies + 0.25 * offset, 1e-13)
    results = calculator.results
    assert np.array_equal(results["vectors"], np.stack((atoms.numbers, offset), axis=1))
    assert results["partial"] == atoms.numbers.sum()
    assert abs(results["total"] - offset.sum()) < 1e-12
    assert results["constant"] == 0.25
    assert_same_bits(comm, *(results[name] for name in sorted(results)))

    atoms.arrays["offset"][17] += 1.0
    atoms.info["field"] = 0.5
    energy = atoms.get_potential_energy()
    assert abs(energy - plain.energy - 0.5 * (offset.sum() + 1.0)) < 1e-11
    assert calculator.potential.calls == 2

    del atoms.arrays["offset"]
    assert_fails_alike(comm, atoms.get_forces, ValueError, "offset", "missing")


def test_arrays_where_ranks_own_nothing(comm):
    atoms = STRUCTURES["two_atoms"]()
    atoms.set_array("offset", np.array([1.0, 2.0]))
    atoms.calc = calculator = distributed(Weighted(), comm)
    atoms.get_forces()
    assert calculator.results["vectors"].tolist() == [[29.0, 1.0], [28.0, 2.0]]
    assert calculator.results["partial"] == 57
    assert calculator.results["total"] == 3.0


# -- Errors are the same everywhere, and are not the end


def test_unknown_element(comm, calculator, atoms):
    bad = atoms.copy()
    bad.numbers[-1] = 92
    bad.numbers[-2] = 94
    bad.calc = calculator
    words = ("two-hop", "Pu, U", "index 46", "H, C, O, Ni, Cu")
    assert_fails_alike(comm, bad.get_forces, ValueError, *words)
    assert_correct(comm, atoms, calculator)


def test_no_element_at_all(comm, atoms):
    atoms.numbers[5] = 0
    atoms.calc = calculator = distributed(TwoHop(), comm)
    assert_fails_alike(comm, atoms.get_forces, ValueError, "X", "index 5")
    atoms.numbers[5] = 29
    assert_correct(comm, atoms, calculator)


def test_positions_that_are_none(comm, calculator, atoms):
    for value in (np.nan, np.inf, -np.inf, 1e12, -1e300):
        for pbc in (True, False):
            bad = atoms.copy()
            bad.pbc = pbc
            bad.numbers[17] = 28
            bad.positions[17, 1] = value
            bad.calc = calculator
            words = ("positions of 1 atom(s)", "atom 17 (Ni)", f"{value}")
            assert_fails_alike(comm, bad.get_forces, ValueError, *words)
    assert_correct(comm, atoms, calculator)


@several_ranks
def test_positions_that_are_none_on_one_rank(comm, calculator, atoms):
    good = atoms.copy()
    if comm.rank == 1:
        atoms.positions[17, 1] = np.nan
    atoms.calc = calculator
    words = ("rank 1", "atom 17 (Cu)")
    assert_fails_alike(comm, atoms.get_forces, ValueError, *words)
    assert_correct(comm, good, calculator)


def test_cells_that_are_none(comm, calculator, atoms):
    for cell, pbc, *words in (
        (np.diag([0.0, 8.0, 8.0]), True, "singular", "0, 8, 8"),
        (np.diag([1e-200, 8.0, 8.0]), True, "singular", "1e-200, 8, 8"),
        (np.zeros((3, 3)), (False, False, True), "singular", "0, 0, 0"),
        ([[8, 0, 0], [0, 8, 0], [8, 8, 0]], True, "singular", "8, 8, 11.3137"),
        ([[8, 0, 0], [8, 1e-12, 0], [0, 0, 8]], True, "singular", "8, 8, 8"),
        (np.diag([0.002, 0.8, 0.8]), True, "too thin", "0.002, 0.8, 0.8"),
        ([[8, 0, 0], [8, 0.001, 0], [0, 0, 8]], True, "too thin", "8, 8, 8"),
        (np.diag([8.0, np.nan, 8.0]), True, "not finite", "nan"),
        (np.diag([8.0, np.inf, 8.0]), (True, False, True), "not finite", "inf"),
        (np.diag([8.0, 8.0, 1e12]), True, "too large", "8, 8, 1e+12"),
        (np.diag([1e200, 8.0, 8.0]), False, "too large", "1e+200, 8, 8"),
    ):
        bad = atoms.copy()
        bad.set_cell(cell)
        bad.pbc = pbc
        bad.calc = calculator
        assert_fails_alike(comm, bad.get_forces, ValueError, *words)
    assert_correct(comm, atoms, calculator)


class Broken(TwoHop):
    """Fails numerically for one element."""

    def __init__(self, value, where):
        super().__init__()
        self.value, self.where = value, where

    def forward(self, graph):
        energies = super().forward(graph)["energies"]
        bad = torch.where(graph.numbers == 79, self.value, 0.0)
        return {"energies": energies + bad if self.where == "energies" else energies * (1.0 + bad)}


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["energies", "forces"])
def test_a_model_that_returns_nonsense(comm, atoms, value, where):
    calculator = distributed(Broken(value, where), comm)
    bad = atoms.copy()
    bad.numbers[31] = 79
    bad.calc = calculator
    words = [where, "not finite", "owned by rank"]
    if where == "energies":
        words += ["1 atom(s)", "atom 31 (Au)", f"rank {calculator.owners(bad)[31]}"]
    assert_fails_alike(comm, bad.get_forces, NonFiniteError, *words)
    assert "energy" not in calculator.results
    assert_correct(comm, atoms, calculator)


def test_atoms_at_one_point(comm, atoms):
    """A pair potential has no energy there; that is no reason to hang or to go on."""
    calculator = distributed(LennardJones(2.2, 0.05, rc=4.0), comm)
    good = outcome(atoms.copy(), calculator)
    bad = atoms.copy()
    bad.positions[20] = bad.positions[11]
    bad.calc = calculator
    words = ("forces", "2 atom(s)", "atom 11 (Cu)", f"rank {calculator.owners(bad)[11]}")
    assert_fails_alike(comm, bad.get_stress, NonFiniteError, *words)
    assert_agree(outcome(atoms.copy(), calculator), good, 1e-12, 1e-11, 1e-12)


def test_options_that_make_no_sense(comm):
    for options in ({"skin": -0.1}, {"skin": np.nan}, {"cut_axes": ()}, {"cut_axes": (3,)}):
        (name,) = options
        with pytest.raises(ValueError, match=name):
            distributed(TwoHop(), comm, **options)


# -- Ranks that do not hold the same atoms


def test_equal_atoms_are_never_touched(comm, calculator, atoms, caplog):
    atoms.info["charge"] = 0
    before, array = atoms.copy(), atoms.arrays["positions"]
    array.flags.writeable = False
    outcome(atoms, calculator)
    assert atoms.arrays["positions"] is array
    assert atoms == before
    assert not caplog.records


@several_ranks
def test_round_off_follows_rank_0(comm, calculator, atoms, caplog):
    atoms.info["charge"] = 0
    atoms.set_momenta(np.random.default_rng(0).normal(size=(48, 3)))
    leader, array = atoms.copy(), atoms.arrays["positions"]
    for step in range(3):
        for copied in (leader, atoms):
            copied.positions[step] += 0.01
        atoms.positions += 1e-10 * comm.rank
        atoms.cell[:] *= 1 + 1e-13 * comm.rank
        atoms.arrays["momenta"] *= 1 + 1e-12 * comm.rank
        assert_correct(comm, atoms, calculator)
        assert atoms.arrays["positions"] is array
        now = atoms.positions, atoms.cell.array, atoms.get_momenta()
        assert_same_bits(comm, *now)
        wanted = leader.positions, leader.cell.array, leader.get_momenta()
        assert all(np.array_equal(*pair) for pair in zip(now, wanted, strict=True))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (1 if comm.rank == 0 else 0)
    assert all("follow rank 0" in message for message in told)


@several_ranks
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda atoms: atoms.positions.__setitem__((5, 0), 0.3), ("positions", "atom 5")),
        (lambda atoms: atoms.positions.__iadd__(2e-8), ("positions", "3.46e-08")),
        (lambda atoms: atoms.numbers.__setitem__(7, 28), ("numbers",)),
        (lambda atoms: atoms.set_pbc((True, True, False)), ("pbc",)),
        (lambda atoms: atoms.cell.__setitem__((0, 0), atoms.cell[0, 0] + 1e-7), ("the cell",)),
        (lambda atoms: atoms.info.update(charge=1), ("info", "charge")),
        (lambda atoms: atoms.pop(-1), ("number of atoms", "47 and 48")),
        (lambda atoms: atoms.__delitem__(slice(None)), ("number of atoms", "0 and 48")),
    ],
    ids=["positions", "offset", "numbers", "pbc", "cell", "info", "natoms", "no atoms"],
)
def test_different_systems_are_refused(comm, calculator, atoms, change, words):
    good = atoms.copy()
    if comm.rank == comm.size - 1:
        change(atoms)
    before = atoms.copy()
    atoms.calc = calculator
    words = (*words, f"rank {comm.size - 1}", "rank 0")
    assert_fails_alike(comm, atoms.get_forces, DisagreementError, *words)
    assert atoms == before
    assert_correct(comm, good, calculator)
    assert calculator.potential.calls == 1


@several_ranks
def test_different_arrays_are_refused(comm, atoms):
    atoms.set_array("offset", np.full(len(atoms), 1.0 + comm.rank))
    atoms.calc = distributed(Weighted(), comm)
    assert_fails_alike(comm, atoms.get_forces, DisagreementError, "rank 1", "arrays['offset']")


@several_ranks
def test_different_requests_are_refused(comm, calculator, atoms):
    atoms.calc = calculator
    ask = atoms.get_stresses if comm.rank == 0 else atoms.get_potential_energy
    assert_fails_alike(
        comm, ask, DisagreementError, "different calls", "rank 0 in an evaluation with stresses"
    )
    assert_correct(comm, atoms, calculator)


# -- Several calculators, several groups of ranks


@several_ranks
def test_two_halves_of_the_ranks_evaluate_different_systems(comm):
    half = 2 * comm.rank // comm.size
    names = (["random_liquid", "one_atom", "pbc_TFT"], ["alloy", "no_atoms"])[half]
    with comm.split(half) as part:
        calculator = distributed(TwoHop(), part)
        for name in names * 2:
            got = outcome(STRUCTURES[name](), calculator)
            wanted = outcome(STRUCTURES[name](), oracle.TwoHop())
            assert_agree(got, wanted, 1e-12, 1e-11, 1e-12, name)
            assert_same_bits(part, *got.arrays())
    assert comm.gather_objects(half)[0] == 0


def test_two_calculators_take_turns(comm, atoms):
    one, other = Counted(), Counted(rc=3.2, A=0.3)
    calculators = [distributed(one, comm), distributed(other, comm, skin=0.0)]
    wanted = [
        on_rank_0(comm, lambda: outcome(atoms.copy(), oracle.TwoHop())),
        on_rank_0(comm, lambda: outcome(atoms.copy(), oracle.TwoHop(rc=3.2, A=0.3))),
    ]
    for _ in range(2):
        for calculator, right in zip(calculators, wanted, strict=True):
            assert_agree(outcome(atoms, calculator), right, 1e-12, 1e-11, 1e-12)
    assert one.calls == other.calls == 1


def test_float32_and_float64_take_turns(comm, atoms):
    single = distributed(TwoHop(dtype=torch.float32), comm)
    double = distributed(TwoHop(), comm)
    energies = []
    for calculator in (single, double, single, double):
        atoms.positions[0] += 0.1
        atoms.positions[0] -= 0.1
        calculator.reset()
        energies.append(outcome(atoms, calculator).energy)
    assert energies[0] == energies[2]
    assert energies[1] == energies[3]
    assert 0 < abs(energies[0] - energies[1]) < 1e-4


def test_a_deep_copy_is_independent(comm, calculator, atoms):
    outcome(atoms, calculator)
    twin = copy.deepcopy(atoms)
    assert twin.calc is not calculator
    assert twin.calc.comm is comm
    twin.positions[0] += 0.1
    assert_correct(comm, twin, twin.calc)
    calls = calculator.potential.calls
    assert_correct(comm, atoms, calculator)
    assert calculator.potential.calls == calls


def test_close(comm, calculator, atoms):
    with calculator as opened:
        assert opened is calculator
        assert_correct(comm, atoms, calculator)
    for call in (atoms.get_forces, lambda: calculator.partition_report(atoms)):
        assert_fails_alike(comm, call, RuntimeError, "closed")
    calculator.close()
    assert_correct(comm, atoms, distributed(TwoHop(), comm))


def test_trajectories_can_describe_it(calculator):
    assert calculator.todict() == {"potential": "two-hop", "skin": calculator.engine.skin}


# -- The state of the program is the user's


def global_state():
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "grad": torch.is_grad_enabled(),
        "torch rng": torch.random.get_rng_state().tolist(),
        "numpy rng": np.random.get_state()[1].tolist(),
        "python rng": random.getstate(),
        "numpy errors": np.geterr(),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_no_global_state_is_changed(comm, atoms, dtype):
    before = global_state()
    calculator = distributed(TwoHop(dtype=dtype, elements=[29]), comm)
    assert global_state() == before
    outcome(atoms, calculator)
    assert global_state() == before
    atoms.numbers[0] = 92
    with pytest.raises(ValueError, match="U"):
        outcome(atoms, calculator)
    assert global_state() == before
    atoms.numbers[0] = 79
    with pytest.raises(NonFiniteError):
        outcome(atoms, distributed(Broken(torch.nan, "energies"), comm))
    assert global_state() == before


def test_the_users_default_dtype_changes_nothing(comm, atoms):
    wanted = outcome(atoms.copy(), distributed(TwoHop(), comm))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            got = outcome(atoms.copy(), distributed(TwoHop(), comm))
            assert_agree(got, wanted, 0.0, 0.0, 0.0)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forces_without_the_users_gradients(comm, calculator, atoms, mode):
    wanted = outcome(atoms.copy(), distributed(TwoHop(), comm))
    with mode():
        calculator.partition_report(atoms)
        got = outcome(atoms, calculator)
    assert_agree(got, wanted, 0.0, 0.0, 0.0)
    atoms.positions[0] += 0.01
    assert_correct(comm, atoms, calculator)


def test_the_users_default_device_changes_nothing(comm, atoms):
    wanted = outcome(atoms.copy(), distributed(TwoHop(), comm))
    with torch.device("meta"):
        got = outcome(atoms.copy(), distributed(TwoHop(), comm))
    assert_agree(got, wanted, 0.0, 0.0, 0.0)


def test_looking_at_another_partition_leaves_results_alone(comm, calculator, atoms):
    wanted = outcome(atoms.copy(), distributed(TwoHop(), comm))
    atoms.calc = calculator
    atoms.get_forces()
    calculator.partition_report(STRUCTURES["molecule_in_a_huge_box"]())
    assert_near(atoms.get_stresses(), wanted.stresses, 1e-12)


def test_refused_at_the_start(comm):
    class Named(TwoHop):
        outputs: ClassVar = {"energies": OutputKind.PER_NODE, "forces": OutputKind.PER_NODE}

    with pytest.raises(ValueError, match=r"declares outputs named \['forces'\]"):
        distributed(Named(), comm)
    with pytest.raises(TypeError, match="potential must be an object"):
        DistributedCalculator("7net-0", comm)
    with pytest.raises(TypeError, match=r"no parameters to set, got \['skin'\]"):
        distributed(TwoHop(), comm).set(skin=1.0)
    with pytest.raises(ValueError, match="rc must be a length > 0"):
        TwoHop(rc=0.0)
    for skin in (-0.1, np.nan, "wide"):
        with pytest.raises(ValueError, match="skin must be a length"):
            DistributedCalculator(TwoHop(), comm, skin=skin)
    for limit in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="watchdog_s must be seconds > 0"):
            DistributedCalculator(TwoHop(), comm, watchdog_s=limit)
    with pytest.raises(ValueError, match="cut_axes must name"):
        DistributedCalculator(TwoHop(), comm, cut_axes=(3,))


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_forwards_that_break_the_contract(comm, atoms):
    class Detached(TwoHop):
        def forward(self, graph):
            return {"energies": super().forward(graph)["energies"].detach()}

    class Undeclared(TwoHop):
        def forward(self, graph):
            return {**super().forward(graph), "charges": graph.edge_vectors.new_zeros(len(atoms))}

    class Missing(TwoHop):
        outputs: ClassVar = {"energies": OutputKind.PER_NODE, "charges": OutputKind.PER_NODE}

    atoms.calc = distributed(Missing(), comm)
    with pytest.raises(ValueError, match=r"declares \['charges'\] but its forward returned"):
        atoms.get_forces()
    atoms.calc = distributed(Detached(), comm)
    with pytest.raises(ValueError, match=r"no energy of two-hop depends on graph\.edge_vectors"):
        atoms.get_forces()
    atoms.calc = distributed(Undeclared(), comm)
    with pytest.raises(ValueError, match=r"outputs it does not declare: \['charges'\]"):
        atoms.get_forces()


def test_a_shallow_copy_is_a_calculator_of_its_own(comm, atoms):
    calculator = distributed(TwoHop(), comm)
    other = atoms.copy()
    other.positions[0] += 0.3
    atoms.calc, other.calc = calculator, copy.copy(calculator)
    stress = atoms.get_stress()
    other.get_stress()
    assert_near(atoms.get_stresses().sum(0), stress, 1e-13)


def test_pickle(comm, calculator, atoms):
    atoms.calc = calculator
    with pytest.raises(TypeError, match=r"cannot be pickled; pickle atoms\.copy"):
        pickle.dumps(atoms)
    atoms.calc = DistributedCalculator(TwoHop(), SerialCommunicator(), device="cpu")
    energy = atoms.get_potential_energy()
    again = pickle.loads(pickle.dumps(atoms))
    assert again.get_potential_energy() == energy
    again.positions[0] += 0.1
    assert again.get_potential_energy() != energy
    again.calc.close()


def test_stresses_of_nothing(comm):
    engine = ForceEngine(TwoHop(), comm, skin=0.5)
    with pytest.raises(RuntimeError, match="no evaluation with a volume"):
        engine.per_atom_stresses()


def test_no_atoms_to_evaluate(comm):
    with pytest.raises(ValueError, match="no atoms"):
        distributed(TwoHop(), comm).calculate(None)
