"""Potentials by name, and model files that one rank reads for all."""

import hashlib
import importlib.util
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import assert_agree, assert_same_bits, on_rank_0, outcome
from structures import STRUCTURES

from nvdd_md.agreement import DisagreementError
from nvdd_md.calculators import (
    DistributedCalculator,
    LennardJones,
    TwoHop,
    load_potential,
    model_file,
    sevennet,
)
from nvdd_md.calculators.model_file import from_rank_0, read_on_rank_0
from nvdd_md.calculators.registry import FAMILIES
from nvdd_md.comm import world_communicator

needs_sevenn = pytest.mark.skipif(
    importlib.util.find_spec("sevenn") is None, reason="the package sevenn is not installed"
)


# -- Names and options


@pytest.mark.parametrize("comm", [1, 2], indirect=True)
def test_families_without_a_model(comm):
    for spec, potential, options in (
        ("two-hop", TwoHop(), {}),
        ("two-hop", TwoHop(3.5, dtype=torch.float32), {"rc": 3.5, "dtype": "float32"}),
        ("two-hop", TwoHop(dtype=torch.float64), {"dtype": torch.float64}),
        ("lennard-jones", LennardJones(2.2, 0.1, smooth=True), {"sigma": 2.2, "epsilon": 0.1}),
    ):
        if spec == "lennard-jones":
            options = options | {"smooth": True}
        loaded = load_potential(spec, comm, **options)
        assert type(loaded) is type(potential)
        assert loaded.dtype == potential.dtype
        got, wanted = (
            outcome(STRUCTURES["alloy"](), DistributedCalculator(one, comm, device="cpu"))
            for one in (loaded, potential)
        )
        for mine, other in zip(got.arrays(), wanted.arrays(), strict=True):
            assert np.array_equal(mine, other)


def test_options_of_a_toml_file():
    table = tomllib.loads(
        """
        spec = "lennard-jones"
        sigma = {H = 1.2, O = 2.0}
        epsilon = {H = 0.01, O = 0.03}
        rc = 4
        smooth = true
        dtype = "float32"
        """
    )
    potential = load_potential(table.pop("spec"), **table)
    assert potential.elements == {1, 8}
    assert (potential.cutoff, potential.smooth, potential.dtype) == (4.0, True, torch.float32)


@pytest.mark.parametrize(
    ("spec", "options", "kind", "message"),
    [
        ("Mace:model.pt", {}, ValueError, r"no family .* 'Mace' \(did you mean 'mace'\?\)"),
        ("sevenet:7net-0", {}, ValueError, r"'sevenet' \(did you mean 'sevennet'\?\)"),
        ("7net-0", {}, ValueError, r"'7net-0'; known are \['lennard-jones', 'mace', 'sevennet', "),
        ("", {}, ValueError, "no family of potentials ''; known are"),
        ("mace", {}, ValueError, "does not say which model: .*'mace:MODEL', as in 'mace:model.pt'"),
        ("sevennet:", {}, ValueError, "as in 'sevennet:7net-0'"),
        ("two-hop:small", {}, ValueError, "'two-hop' has no models .* not 'two-hop:small'"),
        ("two-hop:", {}, ValueError, "'two-hop' has no models"),
        (
            "two-hop",
            {"element": [1]},
            TypeError,
            r"'element' \(did you mean 'elements'\?\); it has",
        ),
        ("two-hop", {"skin": 1.0}, TypeError, r"'skin'; it has \['rc', 'k', 'A', 'elements', 'd"),
        ("mace:m.pt", {"model": "x"}, TypeError, r"no option 'model'.*; it has \['head', 'dtype'"),
        ("two-hop", {"dtype": "float16"}, ValueError, r"one of \['float32', 'float64'\], got 'fl"),
        ("two-hop", {"dtype": np.float64}, ValueError, r"one of \['float32', 'float64'\], got <cl"),
        ("two-hop", {"rc": -1.0}, ValueError, "rc must be a length > 0"),
        (Path("model.pt"), {}, TypeError, "named by a text such as 'mace:model.pt', got PosixPath"),
    ],
)
def test_refusals(spec, options, kind, message):
    with pytest.raises(kind, match=message):
        load_potential(spec, **options)


def test_families_with_models_take_them_first_and_a_communicator():
    for family in FAMILIES.values():
        parameters = list(inspect.signature(family.make).parameters)
        assert ("comm" in parameters) == (parameters[0] == "model") == bool(family.example)


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_a_missing_package_is_the_wrappers_error(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "sevenn.util", None)
    monkeypatch.setitem(sys.modules, "mace", None)
    for spec in ("sevennet:7net-0", "mace:model.pt"):
        family = spec.split(":")[0]
        with pytest.raises(ImportError, match=rf"pip install \"nvdd-md\[{family}\]\""):
            load_potential(spec, comm)


@pytest.mark.parametrize("comm", [1], indirect=True)
def test_no_model_package_is_imported_before_it_is_asked_for(comm):
    program = (
        "import sys; from nvdd_md.calculators import load_potential; load_potential('two-hop'); "
        "print([name for name in ('mace', 'sevenn', 'e3nn') if name in sys.modules])"
    )
    # In an environment of its own, so that it is no rank of this job.
    done = subprocess.run([sys.executable, "-c", program], env={}, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# -- Model files


@needs_sevenn
@pytest.mark.parametrize("comm", [1, 2, 4], indirect=True)
def test_checkpoint_that_only_rank_0_has(comm, tmp_path, monkeypatch):
    from sevenn.util import pretrained_name_to_path

    monkeypatch.chdir(tmp_path)  # another folder on each rank
    monkeypatch.setenv("HOME", str(tmp_path))
    if comm.rank == 0:
        Path("checkpoint.pth").write_bytes(Path(pretrained_name_to_path("7net-0")).read_bytes())
    wanted = None
    for spec in ("sevennet:checkpoint.pth", "sevennet:~/checkpoint.pth", "sevennet:7net-0"):
        potential = load_potential(spec, comm, dtype="float64")
        assert potential.dtype == torch.float64
        assert_same_bits(comm, *potential.network.state_dict().values())
        calculator = DistributedCalculator(potential, comm, device="cpu")
        got = outcome(STRUCTURES["primitive_cell_of_two_atoms"](), calculator)
        wanted = wanted or got
        assert_agree(got, wanted, 0.0, 0.0, 0.0)


@needs_sevenn
@pytest.mark.parametrize("comm", [2], indirect=True)
def test_ranks_that_load_different_models_are_told(comm):
    name = ("7net-0", "7net-l3i5")[comm.rank]
    told = "the ranks load different models: rank 0: 7net-0; rank 1: 7net-l3i5"
    with pytest.raises(DisagreementError, match=told):
        load_potential(f"sevennet:{name}", comm)
    # What each rank has made by itself is compared by the calculator.
    modal = ("PBE", "R2SCAN")[comm.rank]
    with pytest.raises(DisagreementError, match="different models or settings: rank 0: modal"):
        DistributedCalculator(sevennet.SevenNet("7net-mf-0", modal=modal), comm)


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_checkpoints_that_are_missing(comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if comm.rank > 0:
        Path("checkpoint.pth").write_bytes(b"for the other ranks only")
    with pytest.raises(ValueError, match=r"Given checkpoint\.pth does not exist"):
        load_potential("sevennet:checkpoint.pth", comm)
    with pytest.raises(ValueError, match=r"7net-mf-0 needs modal=, one of \['PBE', 'R2SCAN'\]"):
        load_potential("sevennet:7net-mf-0", comm)


@needs_sevenn
@pytest.mark.parametrize("comm", [1, 2], indirect=True)
def test_a_file_that_is_no_model(comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.pth").write_text("no model at all")
    with pytest.raises(ValueError, match=r"^model\.pth cannot be read as a model: \w+: "):
        load_potential("sevennet:model.pth", comm)


def test_without_a_communicator_all_ranks_of_the_job_load(world, tmp_path):
    assert world_communicator().size == world.size
    path = tmp_path / "model"
    if world.rank == 0:
        path.write_bytes(b"content")
    for comm in (None, world):
        assert read_on_rank_0(path, comm) == b"content"


@pytest.mark.parametrize("backend_comm", [("mpi", 3), ("gloo", 3)], indirect=True)
def test_large_file(backend_comm, tmp_path):
    path, size = tmp_path / "large", 100 * 1024**2
    content = np.random.default_rng(5).bytes(size) if backend_comm.rank == 0 else b""
    if backend_comm.rank == 0:
        path.write_bytes(content)
    received = read_on_rank_0(path, backend_comm)
    assert len(received) == size
    wanted = on_rank_0(backend_comm, lambda: hashlib.blake2b(content).digest())
    assert hashlib.blake2b(received).digest() == wanted


class Unsendable(Exception):
    """Cannot be unpickled: its constructor wants more than the message."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


class Changed(Exception):
    """Says something else after it has been sent."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}!")


@pytest.mark.parametrize("comm", [2, 4], indirect=True)
def test_an_error_of_rank_0_is_raised_everywhere(comm):
    called = []

    def fail_with(error: Exception) -> object:
        called.append(comm.rank)
        raise error

    for error, kind, message in (
        (PermissionError(13, "Permission denied", "model.pt"), PermissionError, "'model.pt'"),
        (KeyError("x"), KeyError, "'x'"),
        (Unsendable("one", "other"), RuntimeError, "^Unsendable: one and other$"),
        (Changed("no"), RuntimeError, "^Changed: no!$"),
    ):
        called.clear()
        with pytest.raises(kind, match=message) as caught:
            from_rank_0(lambda error=error: fail_with(error), comm, "x")
        assert called == ([0] if comm.rank == 0 else [])
        assert caught.value.__cause__ is (error if comm.rank == 0 else None)
        assert comm.gather_objects((type(caught.value), str(caught.value))) == comm.size * [
            (kind, str(caught.value))
        ]
    assert from_rank_0(lambda: comm.rank, comm, "x") == 0


@pytest.mark.parametrize("comm", [1, 2], indirect=True)
def test_an_exception_of_one_rank_ends_a_job_whose_ranks_wait(comm, monkeypatch):
    watched = []
    monkeypatch.setattr(model_file, "install_excepthook", watched.append)
    assert from_rank_0(lambda: comm.rank, comm, "x") == 0
    assert watched == ([comm] if comm.size > 1 else [])
