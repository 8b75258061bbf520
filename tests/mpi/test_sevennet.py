"""SevenNet on n ranks: what sevenn itself computes, with one exchange per layer and no more."""

import importlib.util
import sys
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import Calculator
from oracle import Outcome, assert_agree, assert_near, assert_same_bits, on_rank_0, outcome
from structures import STRUCTURES

from nvdd_md.calculators import DistributedCalculator
from nvdd_md.calculators.blocked_convolution import Convolution
from nvdd_md.calculators.sevennet import SevenNet
from nvdd_md.comm import Communicator, SerialCommunicator
from nvdd_md.potential import Potential

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sevenn") is None, reason="the package sevenn is not installed"
)

R11 = {"energy": 1e-12, "forces": 1e-11, "stress": 1e-12}

ON_ALL_RANK_COUNTS = [
    "slab_with_vacuum",
    "random_liquid",
    "cluster_without_cell",
    "primitive_cell_of_two_atoms",
    "three_atoms",
    "last_atom_isolated",
    "isolated_atoms",
    "one_atom_in_a_box",
    "no_atoms",
]


@cache
def sevennet(name: str, dtype: torch.dtype, modal: str | None = None) -> SevenNet:
    return SevenNet(name, dtype=dtype, modal=modal)


def distributed(potential: Potential, comm: Communicator) -> DistributedCalculator:
    return DistributedCalculator(potential, comm, device="cpu")


@cache
def untouched(name: str, modal: str | None = None) -> "Untouched":
    return Untouched(name, torch.float64, modal)


class Untouched(Potential):
    """The modules of sevenn, called in their order on one rank."""

    def __init__(self, name: str, dtype: torch.dtype, modal: str | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sevenn.util import load_checkpoint
        self.model = load_checkpoint(name).build_model().to(dtype).eval()
        self.model.set_is_batch_data(False)
        self.name, self.dtype, self.modal = name, dtype, modal
        self.cutoff, self.elements = self.model.cutoff, frozenset(self.model.type_map)

    def forward(self, graph):
        species = self.model.type_map
        data = {
            "x": torch.tensor([species[z] for z in graph.numbers.tolist()]),
            "edge_vec": graph.edge_vectors,
            "edge_index": torch.stack((graph.edge_centre, graph.edge_neighbour)),
        }
        if self.modal:
            data["modal_type"] = torch.tensor(self.model.modal_map[self.modal])
        for name, module in self.model.named_children():
            if name in ("reduce_total_enegy", "force_output"):
                continue
            data = module(data)
            if "one" in name and "hot" in name:  # sevenn makes them float32
                hot = {key for key in ("x", "node_attr", "modal_attr") if key in data}
                data |= {key: data[key].to(self.dtype) for key in hot}
        return {"energies": data["atomic_energy"].flatten()}


@cache
def by_untouched(structure: str, name: str, modal: str | None = None) -> Outcome:
    calculator = distributed(untouched(name, modal), SerialCommunicator())
    return outcome(STRUCTURES[structure](), calculator)


@pytest.mark.parametrize("structure", ON_ALL_RANK_COUNTS)
def test_float64(comm, structure):
    calculator = distributed(sevennet("7net-0", torch.float64), comm)
    got = outcome(STRUCTURES[structure](), calculator)
    wanted = on_rank_0(comm, lambda: by_untouched(structure, "7net-0"))
    assert_agree(got, wanted, **R11, name=structure)
    assert_same_bits(comm, *got.arrays())


@pytest.mark.parametrize("comm", [2], indirect=True)
@pytest.mark.parametrize(("name", "modal"), [("7net-l3i5", None), ("7net-mf-0", "PBE")])
def test_other_models(comm, name, modal):
    calculator = distributed(sevennet(name, torch.float64, modal), comm)
    got = outcome(STRUCTURES["primitive_cell_of_two_atoms"](), calculator)
    wanted = on_rank_0(comm, lambda: by_untouched("primitive_cell_of_two_atoms", name, modal))
    assert_agree(got, wanted, **R11)


# -- Single precision


def sevenn_calculator() -> Calculator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sevenn.calculator import SevenNetCalculator

        return SevenNetCalculator("7net-0", device="cpu")


@cache
def by_sevenn_calculator(structure: str) -> tuple[Outcome, float]:
    """Return sevenn's own answer, and how much its forces change if the atoms are renumbered."""
    calculator = sevenn_calculator()
    atoms = STRUCTURES[structure]()
    atoms.calc = calculator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forces = atoms.get_forces()
        results, noise = dict(calculator.results), 0.0
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(len(atoms))
            renumbered = atoms[order]
            renumbered.calc = calculator
            noise = max(noise, np.abs(renumbered.get_forces() - forces[order]).max())
    stress = results["stress"] if atoms.pbc.any() else None
    return Outcome(results["energy"], results["energies"], forces, stress, None), noise


@pytest.mark.parametrize("structure", ["alloy", "slab_with_vacuum"])
def test_float32(comm, structure):
    calculator = distributed(sevennet("7net-0", torch.float32), comm)
    got = outcome(STRUCTURES[structure](), calculator)
    wanted, noise = on_rank_0(comm, lambda: by_sevenn_calculator(structure))
    largest = np.abs(wanted.forces).max()
    assert np.abs(got.forces - wanted.forces).max() <= min(3 * noise, 1e-5 * largest)
    assert abs(got.energy - wanted.energy) <= 1e-7 * np.abs(wanted.energies).sum()
    if wanted.stress is not None:
        assert_near(got.stress, wanted.stress, 1e-6)
    assert_same_bits(comm, *got.arrays())


# -- What is computed, and what is sent


def test_layers_compute_own_rows_only(comm):
    potential = sevennet("7net-0", torch.float32)
    atoms = STRUCTURES["slab_with_vacuum"]()
    calculator = distributed(potential, comm)
    rows, gathered = [], []

    def count(_module, _inputs, data):
        rows.append(len(data["x"]))

    def count_sums(_module, inputs, out):
        features, n_rows = inputs[0], inputs[-1]
        gathered.append(len(features))
        rows.extend((n_rows, len(out)))

    handles = [
        layer.register_forward_hook(count_sums if isinstance(layer, Convolution) else count)
        for layer in potential.network.layers
    ]
    outcome(atoms, calculator)
    for handle in handles:
        handle.remove()

    load = calculator.partition_report(atoms)[comm.rank]
    assert set(rows) == {load.owned}
    assert len(rows) > 20
    assert gathered == [len(potential.elements)] + 4 * [load.owned + load.ghosts]
    assert (load.ghosts > 0) == (comm.size > 1)


def pair_in_list_but_not_in_reach() -> Atoms:
    return Atoms("CuNi", [[0, 0, 0], [0, 0, 5.2]])


@pytest.mark.parametrize("comm", [2], indirect=True)
@pytest.mark.parametrize(
    "make", [STRUCTURES["slab_with_vacuum"], pair_in_list_but_not_in_reach], ids=["slab", "pair"]
)
def test_one_exchange_per_layer(comm, make):
    potential = sevennet("7net-0", torch.float32)
    assert potential.exchanges == 4
    atoms = make()
    atoms.calc = distributed(potential, comm)
    atoms.get_forces()
    routing = atoms.calc.engine.decomposition.routing
    atoms.positions[0] += 0.01
    before = comm.traffic.snapshot()
    atoms.get_forces()
    sent = comm.traffic - before

    assert routing.n_ghost > 0
    features = 4 * (128 * 1 + 64 * 3 + 32 * 5)
    forward, backward = len(routing.send_index) * features, routing.n_ghost * features
    forces = routing.n_ghost * 3 * 8
    assert sent.messages == 4 + 4 + 1
    assert sent.message_bytes == 4 * (forward + backward) + forces


@pytest.mark.parametrize("comm", [2, 3], indirect=True)
def test_ranks_with_ghosts_but_without_edges(comm):
    chain = Atoms("CuNiAl", [[0, 0, 0], [0, 0, 2.4], [0, 0, 7.6]])
    for atoms in (pair_in_list_but_not_in_reach(), chain):
        got = outcome(atoms.copy(), distributed(sevennet("7net-0", torch.float64), comm))
        wanted = on_rank_0(
            comm,
            lambda atoms=atoms: outcome(
                atoms.copy(), distributed(untouched("7net-0"), SerialCommunicator())
            ),
        )
        assert_agree(got, wanted, **R11)


# -- The model as an object


def torch_state() -> list[object]:
    return [
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.is_grad_enabled(),
        list(warnings.filters),
    ]


@pytest.mark.parametrize("comm", [1], indirect=True)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_global_state_is_neither_changed_nor_read(comm, default):
    atoms = STRUCTURES["three_atoms"]()
    calculators = {
        d: distributed(sevennet("7net-0", d), comm) for d in (torch.float32, torch.float64)
    }
    wanted = {dtype: outcome(atoms.copy(), calculators[dtype]) for dtype in calculators}
    torch.set_default_dtype(default)
    try:
        before = torch_state()
        fresh = {dtype: SevenNet(dtype=dtype) for dtype in wanted}
        assert torch_state() == before
        for dtype, potential in fresh.items():
            got = outcome(atoms.copy(), distributed(potential, comm))
            assert torch_state() == before
            for mine, other in zip(got.arrays(), wanted[dtype].arrays(), strict=True):
                assert np.array_equal(mine, other)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_forces_are_derivatives(comm):
    atoms = bulk("NaCl", "rocksalt", a=5.6)
    atoms.rattle(0.1, seed=3)
    atoms.calc = distributed(sevennet("7net-0", torch.float64), comm)
    forces, stress = atoms.get_forces(), atoms.get_stress(voigt=False)
    h = 1e-4
    for axis in range(3):
        energies = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions[0, axis] += sign * h
            energies.append(moved.get_potential_energy())
        assert abs((energies[1] - energies[0]) / (2 * h) - forces[0, axis]) < 1e-6
    for i, j in ((0, 0), (1, 2)):
        energies = []
        for sign in (1, -1):
            strained = atoms.copy()
            strained.calc = atoms.calc
            strain = np.eye(3)
            strain[i, j] += 0.5 * sign * h
            strain[j, i] += 0.5 * sign * h
            strained.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            energies.append(strained.get_potential_energy())
        slope = (energies[0] - energies[1]) / (2 * h) / atoms.get_volume()
        assert abs(slope - stress[i, j]) < 1e-6


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_refusals(comm, monkeypatch):
    for name, modal, message in (
        ("7net-0", "PBE", "7net-0 has no modals, so modal='PBE'"),
        ("7net-mf-0", None, r"7net-mf-0 needs modal=, one of \['PBE', 'R2SCAN'\]; got None"),
        ("7net-mf-0", "LDA", r"7net-mf-0 needs modal=, one of \['PBE', 'R2SCAN'\]; got 'LDA'"),
        ("7net-9", None, "7net-l3i5"),
    ):
        with pytest.raises(ValueError, match=message):
            SevenNet(name, modal=modal)
    with pytest.raises(ValueError, match=r"torch\.float64, not in torch\.float16"):
        SevenNet(dtype=torch.float16)
    atoms = Atoms("Og")
    atoms.calc = distributed(sevennet("7net-0", torch.float32), comm)
    with pytest.raises(ValueError, match="Og"):
        atoms.get_potential_energy()
    monkeypatch.setitem(sys.modules, "sevenn.util", None)
    with pytest.raises(ImportError, match=r"pip install \"nvdd-md\[sevennet\]\""):
        SevenNet()
