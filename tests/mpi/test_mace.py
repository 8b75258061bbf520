"""MACE on n ranks: what mace itself computes, with one exchange between layers and no more."""

import importlib.util
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from oracle import Outcome, assert_agree, assert_near, assert_same_bits, on_rank_0, outcome
from structures import STRUCTURES
from torch import nn

from nvdd_md.calculators import DistributedCalculator, load_potential, mace
from nvdd_md.calculators.blocked_convolution import Convolution
from nvdd_md.calculators.mace import MACE, Network
from nvdd_md.calculators.mace_interactions import INTERACTIONS
from nvdd_md.calculators.mace_products import SymmetricProduct
from nvdd_md.calculators.mace_readouts import Readout
from nvdd_md.comm import Communicator, SerialCommunicator
from nvdd_md.potential import InfoKey, Potential
from nvdd_md.results import NonFiniteError

if importlib.util.find_spec("mace") is None:
    pytest.skip("runs in the MACE environment", allow_module_level=True)

with warnings.catch_warnings(action="ignore"):
    from mace import modules  # before e3nn, for which it prepares torch
    from mace.calculators import MACECalculator
    from mace.data.neighborhood import get_neighborhood
    from mace.modules.wrapper_ops import with_oeq_scatter_sum

from e3nn import o3

R11 = {"energy": 1e-12, "forces": 1e-11, "stress": 1e-12}

ELEMENTS = [1, 6, 8, 14, 18, 28, 29, 32]

RESIDUAL = "RealAgnosticResidualInteractionBlock"
DENSITY = "RealAgnosticDensityInteractionBlock"
NON_LINEAR = "RealAgnosticResidualNonLinearInteractionBlock"

CHARGE = {"type": "categorical", "per": "graph", "num_classes": 9, "emb_dim": 4, "offset": 4}
SPIN = {"type": "continuous", "per": "graph", "in_dim": 1, "emb_dim": 4}
CONDITIONS = {"total_charge": CHARGE, "total_spin": SPIN}

KINDS = {
    **{kind: {"interaction_cls": kind, "max_ell": 1} for kind in INTERACTIONS},
    "a first interaction of its own": {"interaction_cls_first": next(iter(INTERACTIONS))},
    "one layer": {"num_interactions": 1},
    "three layers": {"num_interactions": 3, "max_ell": 1},
    "no scale and shift": {"scaled": False, "pair_repulsion": True},
    "pair repulsion": {"pair_repulsion": True, "distance_transform": "Agnesi"},
    "cutoff on the weights": {"interaction_cls": NON_LINEAR, "apply_cutoff": False},
    "cutoff on the density": {"interaction_cls": DENSITY, "apply_cutoff": False},
    "rotations only": {"use_so3": True, "hidden_irreps": o3.Irreps("8x0e + 8x1e")},
    "all parities": {"hidden_irreps": o3.Irreps("8x0e + 8x0o + 8x1o + 8x1e"), "max_ell": 1},
    "correlation 2": {"correlation": 2},
    "narrow edges": {
        "interaction_cls": NON_LINEAR,
        "num_interactions": 3,
        "max_ell": 1,
        "edge_irreps": o3.Irreps("4x0e + 4x1o"),
        "use_edge_irreps_first": True,
        "keep_last_layer_irreps": True,
        "use_agnostic_product": True,
        "use_last_readout_only": True,
    },
}
"""What differs from the usual model."""

BIASED = "NonLinearBiasReadoutBlock"

FULL_SIZE = {
    "r_max": 6.0,
    "num_bessel": 10,
    "max_ell": 3,
    "hidden_irreps": o3.Irreps("128x0e + 128x1o"),
    "MLP_irreps": o3.Irreps("16x0e"),
    "avg_num_neighbors": 61.9647,
    "atomic_numbers": list(range(1, 90)),
    "radial_MLP": [64, 64, 64],
}
"""What the large published models have."""

OTHERS = {
    "usual": {},
    "float32": {"dtype": torch.float32},
    "heads": {"heads": ["one", "Default"], "pair_repulsion": True},
    "heads with biased readouts": {
        "heads": ["one", "Default", "three"],
        "readout_cls": getattr(modules.blocks, BIASED),
    },
    "full size": FULL_SIZE,
    "conditions": {"embedding_specs": CONDITIONS},
    "conditions, read out": {"embedding_specs": CONDITIONS, "use_embedding_readout": True},
}


@cache
def build(name: str) -> nn.Module:
    """Return a random model whose forces are large."""
    given = (KINDS | OTHERS)[name]
    arguments = {
        "r_max": 4.0,
        "num_bessel": 6,
        "num_polynomial_cutoff": 5,
        "max_ell": 2,
        "interaction_cls": RESIDUAL,
        "num_interactions": 2,
        "hidden_irreps": o3.Irreps("8x0e + 8x1o"),
        "MLP_irreps": o3.Irreps("8x0e"),
        "avg_num_neighbors": 15.0,
        "atomic_numbers": ELEMENTS,
        "correlation": 3,
        "gate": torch.nn.functional.silu,
        "radial_MLP": [16, 16],
        "scaled": True,
        "dtype": torch.float64,
    } | given
    numbers = arguments["atomic_numbers"]
    arguments["num_elements"] = len(numbers)
    arguments.setdefault("interaction_cls_first", arguments["interaction_cls"])
    for key in ("interaction_cls", "interaction_cls_first"):
        arguments[key] = modules.interaction_classes[arguments[key]]
    n_heads = len(arguments.get("heads", [0]))
    rng = np.random.default_rng(0)
    arguments["atomic_energies"] = np.squeeze(rng.normal(size=(n_heads, len(numbers))))
    if arguments.pop("scaled"):
        arguments["atomic_inter_scale"] = np.squeeze(400.0 + 100.0 * np.arange(n_heads))
        arguments["atomic_inter_shift"] = np.squeeze(0.3 + 0.1 * np.arange(n_heads))
    kind = modules.ScaleShiftMACE if "atomic_inter_scale" in arguments else modules.MACE
    with (
        default_dtype(arguments.pop("dtype")),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
    ):
        torch.manual_seed(1)
        return kind(**arguments)


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def wrapped(name: str, head: str | None = None, dtype: torch.dtype | None = None) -> MACE:
    return MACE(build(name), head=head, dtype=dtype)


def distributed(potential: Potential, comm: Communicator) -> DistributedCalculator:
    return DistributedCalculator(potential, comm, device="cpu")


def structure(
    name: str, info: Mapping[str, object] | None = None, elements: Sequence[int] = ELEMENTS
) -> Atoms:
    """Return one of the structures, of elements that the model knows."""
    atoms = STRUCTURES[name]()
    unknown = ~np.isin(atoms.numbers, elements)
    atoms.numbers[unknown] = np.where(atoms.numbers[unknown] % 2, 29, 8)
    atoms.info.update(info or {})
    return atoms


@cache
def mace_calculator(name: str, head: str | None, dtype: str) -> MACECalculator:
    return MACECalculator(
        models=wrapped(name, head).network.model if dtype == "float64" else build(name),
        device="cpu",
        default_dtype=dtype,
        compute_atomic_stresses=True,
        **({} if head is None else {"head": head}),
    )


def by_mace(
    atoms: Atoms, name: str = "usual", head: str | None = None, dtype: str = "float64"
) -> Outcome:
    """Return what the calculator of mace gives. Asked for on rank 0 only.

    Some factors of a model are computed in torch's default dtype, which its calculator leaves
    alone.
    """
    atoms.calc = mace_calculator(name, head, dtype)
    with default_dtype(getattr(torch, dtype)), warnings.catch_warnings(action="ignore"):
        forces, results = atoms.get_forces(), atoms.calc.results
    stress = stresses = None
    if atoms.cell.rank == 3 and atoms.pbc.any():
        cell = mace_cell(atoms)
        scale = abs(np.linalg.det(cell) / np.linalg.det(atoms.cell.array))
        stress, stresses = (scale * results[key] for key in ("stress", "stresses"))
    return Outcome(results["energy"], results["energies"], forces, stress, stresses)


def mace_cell(atoms: Atoms) -> np.ndarray:
    """Return the cell by whose volume mace divides, which is long along open axes."""
    cell = atoms.cell.array.copy()  # mace changes it
    return get_neighborhood(atoms.positions, atoms.calc.r_max, tuple(atoms.pbc), cell)[3]


@cache
def by_one_rank(atoms: str) -> Outcome:
    return outcome(structure(atoms), distributed(wrapped("usual"), SerialCommunicator()))


# -- The physics is that of mace, on any number of ranks


NOT_FOR_MACE = ("atoms_at_one_point", "no_atoms", "no_atoms_in_a_box")


@cache
def by_mace_of_full_size(name: str) -> Outcome:
    atoms = structure(name, elements=FULL_SIZE["atomic_numbers"])
    return by_mace(atoms, "full size")


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - set(NOT_FOR_MACE)))
def test_float64(comm, name):
    atoms = structure(name, elements=FULL_SIZE["atomic_numbers"])
    got = outcome(atoms, distributed(wrapped("full size"), comm))
    assert_agree(got, on_rank_0(comm, lambda: by_mace_of_full_size(name)), **R11)
    assert_same_bits(comm, *got.arrays())


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_structures_that_mace_does_not_take(comm):
    for name in ("no_atoms", "no_atoms_in_a_box"):
        got = outcome(structure(name), distributed(wrapped("usual"), comm))
        assert got.energy == 0.0
        assert got.forces.shape == (0, 3)
    with pytest.raises(NonFiniteError, match="forces that are not finite"):
        outcome(structure("atoms_at_one_point"), distributed(wrapped("usual"), comm))


@pytest.mark.parametrize("comm", [3], indirect=True)
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models(comm, name):
    got = outcome(structure("random_liquid"), distributed(wrapped(name), comm))
    wanted = on_rank_0(comm, lambda: by_mace(structure("random_liquid"), name))
    assert np.abs(wanted.forces).max() > 0.1
    assert_agree(got, wanted, **R11)
    assert_same_bits(comm, *got.arrays())


class Hidden(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)


@pytest.mark.parametrize("comm", [2], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
def test_modules_of_another_kind(comm, fused):
    potential = MACE(build("usual"))
    model = potential.network.model
    for block in model.interactions:
        if fused:  # as accelerated models have it: sums over edges inside the tensor product
            with_oeq_scatter_sum(block.conv_tp)
            block.conv_fusion = "atomic"
        else:
            block.conv_tp_weights = nn.Sequential(block.conv_tp_weights)
    for block in model.products:
        block.symmetric_contractions = Hidden(block.symmetric_contractions)
    potential.network = Network(model, 0)
    kinds = {type(module).__name__ for module in potential.network.modules()}
    assert "ModelConvolution" in kinds
    assert not kinds & {"Convolution", "SymmetricProduct"}
    for name in ("random_liquid", "two_atoms"):
        got = outcome(structure(name), distributed(potential, comm))
        assert_agree(got, on_rank_0(comm, lambda name=name: by_one_rank(name)), **R11)


@pytest.mark.parametrize("comm", [2], indirect=True)
@pytest.mark.parametrize("name", ["heads", "heads with biased readouts"])
def test_heads(comm, name):
    energies = []
    for head in ("one", "Default", None):
        got = outcome(structure("random_liquid"), distributed(wrapped(name, head), comm))
        named = head or "Default"
        wanted = on_rank_0(
            comm, lambda named=named: by_mace(structure("random_liquid"), name, named)
        )
        assert_agree(got, wanted, **R11)
        energies.append(got.energy)
    assert energies[0] != energies[1] == energies[2]


@pytest.mark.parametrize("comm", [2], indirect=True)
@pytest.mark.parametrize("name", ["conditions", "conditions, read out"])
def test_charge_and_spin(comm, name):
    potential = wrapped(name)
    charges = InfoKey(0.0, integer=True, lowest=-4, highest=4)
    assert potential.info_keys == {"charge": charges, "spin": InfoKey(1.0)}
    energies = []
    for info in ({}, {"charge": -2, "spin": 3}):
        got = outcome(structure("random_liquid", info), distributed(potential, comm))
        wanted = on_rank_0(comm, lambda info=info: by_mace(structure("random_liquid", info), name))
        if "read out" in name:  # mace counts that in the energy, but not in those of the atoms
            assert abs(got.energies.sum() - got.energy) < 1e-12 * np.abs(got.energies).sum()
            wanted = replace(wanted, energies=got.energies)
        assert_agree(got, wanted, **R11)
        energies.append(got.energy)
    assert energies[0] != energies[1]


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_charges_that_the_model_does_not_know(comm):
    calculator = distributed(wrapped("conditions"), comm)
    for charge in (5, -5, 300):
        comm.traffic.reset()
        with pytest.raises(ValueError, match=rf"info\['charge'\] must be from -4 to 4 .* {charge}"):
            outcome(structure("alloy", {"charge": charge}), calculator)
        assert comm.traffic.messages == 0
    outcome(structure("alloy", {"charge": 4}), calculator)
    outcome(structure("alloy", {"charge": -4}), calculator)
    with pytest.raises(ValueError, match=r"must be a whole number, got 0\.5"):
        outcome(structure("alloy", {"charge": 0.5}), calculator)


# -- Precision


@pytest.mark.parametrize("comm", [1, 2, 4], indirect=True)
def test_float32(comm):
    assert wrapped("float32").dtype == torch.float32
    got = outcome(structure("random_liquid"), distributed(wrapped("float32"), comm))
    alone, noise = on_rank_0(comm, float32_on_one_rank)
    largest = np.abs(alone.forces).max()
    assert np.abs(got.forces - alone.forces).max() <= min(3 * noise, 1e-5 * largest)
    assert abs(got.energy - alone.energy) <= 1e-7 * np.abs(alone.energies).sum()
    assert_near(got.stress, alone.stress, 1e-7)
    assert_same_bits(comm, *got.arrays())


@cache
def float32_on_one_rank() -> tuple[Outcome, float]:
    """Return what one rank gives, and how much its forces change if the atoms are renumbered."""
    atoms = structure("random_liquid")
    calculator = distributed(wrapped("float32"), SerialCommunicator())
    alone, noise = outcome(atoms.copy(), calculator), 0.0
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(atoms))
        forces = outcome(atoms[order], calculator).forces
        noise = max(noise, np.abs(forces - alone.forces[order]).max())
    return alone, noise


@pytest.mark.parametrize("comm", [1], indirect=True)
@pytest.mark.parametrize("name", ["random_liquid", "alloy"])
def test_float32_is_as_precise_as_mace(comm, name):
    wide = wrapped("float32", dtype=torch.float64)
    exact = outcome(structure(name), distributed(wide, comm))
    got = outcome(structure(name), distributed(wrapped("float32"), comm))
    theirs = by_mace(structure(name), "float32", dtype="float32")
    error, allowed = (np.square(one.forces - exact.forces).mean() ** 0.5 for one in (got, theirs))
    assert error <= 1.2 * allowed
    # Weights and every intermediate are rounded to float32: a few units in the last place per atom.
    few = 4 * torch.finfo(torch.float32).eps
    assert abs(got.energy - exact.energy) <= few * np.abs(exact.energies).sum()
    assert_near(got.stress, exact.stress, 1e-6)


@pytest.mark.parametrize("comm", [2], indirect=True)
def test_other_dtype_than_that_of_the_model(comm):
    wide = wrapped("float32", dtype=torch.float64)
    got = outcome(structure("alloy"), distributed(wide, comm))
    narrow = outcome(structure("alloy"), distributed(wrapped("float32"), comm))
    copy = MACECalculator(models=wide.network.model, device="cpu", default_dtype="float64")
    atoms = structure("alloy")
    atoms.calc = copy
    assert_near(got.forces, atoms.get_forces(), 1e-11)
    assert abs(got.energy - atoms.get_potential_energy()) < 1e-12 * np.abs(got.energies).sum()
    assert next(build("float32").parameters()).dtype == torch.float32
    assert 0 < np.abs(narrow.forces - got.forces).max() < 1e-4


# -- What is computed, and what is sent


ROW_WISE = (
    *("linear_up", "linear_res", "linear", "linear_1", "linear_2", "linear_down"),
    *("skip_tp", "skip_linear", "equivariant_nonlin", "reshape", "node_embedding"),
    *("linear_mid", "non_linearity", "joint_embedding"),
)
"""Modules of mace that compute each row from that row."""

ONCE_PER_ELEMENT = {
    "model.node_embedding",
    "model.node_embedding.linear",
    "model.joint_embedding",
    "model.interactions.0.linear_up",
    "model.interactions.0.skip_tp",
}
"""Modules of the first layer, which reads elements, and charge and spin where a model has them."""


@pytest.mark.parametrize("name", ["three layers", "conditions", *INTERACTIONS])
def test_no_module_computes_ghosts(comm, name):
    potential = wrapped(name)
    atoms = structure("slab_across_the_face")
    atoms.calc = calculator = distributed(potential, comm)
    rows, reads = defaultdict(set), []

    def hook(of, module):
        def count(_module, inputs, out):
            rows[of].add(len(out))
            if isinstance(module, Convolution):
                reads.append((len(inputs[0]), len(inputs[1])))

        return module.register_forward_hook(count)

    handles = [
        hook(of, module)
        for of, module in potential.network.named_modules()
        if of.split(".")[-1] in ROW_WISE
        or isinstance(module, Convolution | SymmetricProduct | Readout)
    ]
    atoms.get_forces()
    for handle in handles:
        handle.remove()

    load = calculator.partition_report(atoms)[comm.rank]
    table = {of: rows.pop(of) for of in [*rows] if of in ONCE_PER_ELEMENT and name == "conditions"}
    assert all(lengths == {len(ELEMENTS)} for lengths in table.values())
    assert len(table) == (len(ONCE_PER_ELEMENT) if name == "conditions" else 0)
    assert set().union(*rows.values()) == {load.owned}
    assert len(rows) > 10
    features, slots = zip(*reads, strict=True)
    assert features == (len(ELEMENTS), *potential.exchanges * [load.owned + load.ghosts])
    assert max(slots) <= 1.1 * load.edges
    assert (load.ghosts > 0) == (comm.size > 1)


def pair_in_list_but_not_in_reach() -> Atoms:
    return Atoms("CuNi", [[0, 0, 0], [0, 0, 4.2]])


@pytest.mark.parametrize("comm", [2], indirect=True)
@pytest.mark.parametrize(
    "make", [STRUCTURES["slab_across_the_face"], pair_in_list_but_not_in_reach]
)
def test_one_exchange_between_layers(comm, make):
    potential = wrapped("three layers")
    assert potential.exchanges == 2
    atoms = make()
    atoms.calc = distributed(potential, comm)
    atoms.get_forces()
    routing = atoms.calc.engine.decomposition.routing
    atoms.positions[0] += 0.01
    before = comm.traffic.snapshot()
    atoms.get_forces()
    sent = comm.traffic - before

    assert routing.n_ghost > 0
    assert sent.messages == 2 + 2 + 1
    features = (8 * 1 + 8 * 3) * 8
    forward, backward = len(routing.send_index) * features, routing.n_ghost * features
    assert sent.message_bytes == 2 * (forward + backward) + routing.n_ghost * 3 * 8


# -- The model as an object


def test_model_file(comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # another folder on each rank
    if comm.rank == 0:
        torch.save(build("usual"), "model.pt")
    comm.traffic.reset()
    for potential in (load_potential("mace:model.pt", comm), MACE("model.pt", comm=comm)):
        assert potential.name == "model.pt"
        assert (potential.cutoff, potential.exchanges) == (4.0, 1)
        assert potential.elements == set(ELEMENTS)
        got = outcome(structure("alloy"), distributed(potential, comm))
        assert_agree(got, on_rank_0(comm, lambda: by_one_rank("alloy")), **R11)
        assert_same_bits(comm, *potential.network.state_dict().values())
    wide = load_potential("mace:model.pt", comm, dtype="float32", head="Default")
    assert wide.dtype == torch.float32
    with pytest.raises(ValueError, match="head= must be one of them, got 'two'"):
        load_potential("mace:model.pt", comm, head="two")
    with pytest.raises(TypeError, match=r"no option 'heads' \(did you mean 'head'\?\)"):
        load_potential("mace:model.pt", comm, heads="two")


def test_model_file_read_by_each_rank_for_itself(comm, tmp_path):
    torch.save(build("usual"), tmp_path / "model.pt")
    comm.traffic.reset()
    read = MACE(tmp_path / "model.pt")
    copied = MACE(build("usual"), comm=comm)
    assert comm.traffic.collectives == 0
    for potential in (read, copied):
        assert_same_bits(comm, *potential.network.state_dict().values())


def test_model_files_that_cannot_be_read(comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if comm.rank > 0:
        torch.save(build("usual"), "model.pt")
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: 'model\.pt'"):
        MACE("model.pt", comm=comm)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        load_potential("mace:folder", comm)
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ValueError, match=r"text cannot be read as a model: UnpicklingError"):
        load_potential("mace:text", comm)


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
@pytest.mark.parametrize("name", ["usual", "heads", "heads with biased readouts", "narrow edges"])
def test_global_state_is_neither_changed_nor_read(comm, name, default):
    atoms = structure("three_atoms")
    dtypes = (torch.float32, torch.float64)
    wanted = {
        dtype: outcome(atoms.copy(), distributed(wrapped(name, dtype=dtype), comm))
        for dtype in dtypes
    }
    state = build(name).state_dict()
    parameters = {key: value.clone() for key, value in state.items()}
    with default_dtype(default):
        before = torch_state()
        fresh = {dtype: MACE(build(name), dtype=dtype) for dtype in dtypes}
        assert torch_state() == before
        for dtype, potential in fresh.items():
            got = outcome(atoms.copy(), distributed(potential, comm))
            assert torch_state() == before
            for mine, other in zip(got.arrays(), wanted[dtype].arrays(), strict=True):
                assert np.array_equal(mine, other)
    for key, value in build(name).state_dict().items():
        assert value.dtype == parameters[key].dtype
        assert torch.equal(value, parameters[key])


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_refusals(comm, monkeypatch):
    for head in ("two", None):
        heads = nn.Module.__new__(type(build("heads")))
        heads.__dict__ = dict(build("heads").__dict__)
        heads.heads = ["one", "other"]
        with pytest.raises(ValueError, match=rf"\['one', 'other'\].* got {head!r}"):
            MACE(heads, head=head)
    with pytest.raises(ValueError, match=r"torch\.float64, not in torch\.float16"):
        MACE(build("usual"), dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=r"class Linear .* \['MACE', 'ScaleShiftMACE'\]"):
        MACE(nn.Linear(1, 1))
    for package, option in (("cuequivariance_torch", "cueq"), ("openequivariance", "oeq")):
        if importlib.util.find_spec(package) is None:
            with pytest.raises(ImportError, match=package):
                MACE(build("usual"), **{f"enable_{option}": True})

    atoms = Atoms("Og")
    atoms.calc = distributed(wrapped("usual"), comm)
    with pytest.raises(ValueError, match="Og"):
        atoms.get_potential_energy()
    monkeypatch.setitem(sys.modules, "mace", None)
    with pytest.raises(ImportError, match=r"pip install \"nvdd-md\[mace\]\""):
        MACE("model.pt")


@pytest.mark.parametrize("comm", [1], indirect=True)
@pytest.mark.parametrize(
    ("cueq", "oeq", "kind"), [(True, False, "cueq"), (False, True, "oeq"), (True, True, "hybrid")]
)
def test_conversions(comm, monkeypatch, cueq, oeq, kind):
    calls = []

    def run(model: nn.Module, device: str) -> nn.Module:
        calls.append((type(model).__name__, next(model.parameters()).dtype, device))
        torch.set_default_dtype(torch.float64)  # as the programs of mace do
        return model

    program = importlib.import_module(f"mace.cli.convert_e3nn_{kind}")
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(mace, "find_spec", lambda _name: True)
    before = torch_state()
    potential = MACE(build("float32"), enable_cueq=cueq, enable_oeq=oeq, dtype=torch.float64)
    assert calls == [("ScaleShiftMACE", torch.float64, "cpu")]
    assert torch_state() == before
    got = outcome(structure("alloy"), distributed(potential, comm))
    wide = wrapped("float32", dtype=torch.float64)
    assert_agree(got, outcome(structure("alloy"), distributed(wide, comm)), 0.0, 0.0, 0.0)


class RealAgnosticUnheardOfInteractionBlock(modules.blocks.RealAgnosticInteractionBlock):
    pass


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_parts_that_are_refused(comm):
    model = MACE(build("usual")).network.model
    model.interactions[1].__class__ = RealAgnosticUnheardOfInteractionBlock
    with pytest.raises(NotImplementedError, match="RealAgnosticUnheardOfInteractionBlock"):
        MACE(model)
    model = MACE(build("conditions")).network.model
    model.embedding_specs = {"temperature": {"per": "graph", "type": "continuous"}}
    with pytest.raises(NotImplementedError, match="'temperature' per graph"):
        MACE(model)
    model.embedding_specs = {"total_charge": CHARGE | {"per": "node"}}
    with pytest.raises(NotImplementedError, match="'total_charge' per node"):
        MACE(model)
    model = MACE(build("pair repulsion")).network.model
    model.pair_repulsion_fn = nn.Identity()
    with pytest.raises(NotImplementedError, match=r"of class Identity .* known is ZBLBasis"):
        MACE(model)


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_forces_are_derivatives(comm):
    atoms = bulk("NiO", "rocksalt", a=4.2)
    atoms.rattle(0.1, seed=3)
    atoms.calc = distributed(wrapped("usual"), comm)
    forces = atoms.get_forces()
    h = 1e-4
    for axis in range(3):
        energies = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions[0, axis] += sign * h
            energies.append(moved.get_potential_energy())
        assert abs((energies[1] - energies[0]) / (2 * h) - forces[0, axis]) < 1e-6
