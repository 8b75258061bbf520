"""SevenNet models (Park et al., J. Chem. Theory Comput. 20, 4857, 2024), one exchange per layer.

What is done per atom is done by the model's own modules. Its convolutions, where nearly all time
and memory go, are evaluated by :class:`~nvdd_md.calculators.blocked_convolution.Convolution`: the
same function, block by block.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor, nn

from nvdd_md.calculators.blocked_convolution import Convolution, Foreign
from nvdd_md.calculators.edge_blocks import EdgeLayout, slots_per_block
from nvdd_md.calculators.model_file import from_rank_0, readable
from nvdd_md.helpers import refresh_neighbors
from nvdd_md.potential import LocalGraph, Potential, digest_of


class Network(nn.Module):
    """A SevenNet model with its convolutions replaced.

    What precedes the first convolution depends on the element only: it is computed once for each
    element that the model knows, and looked up from then on.

    Parameters
    ----------
    model : sevenn.nn.sequential.AtomGraphSequential
        Taken apart; not to be used any more.
    modal : str or None
        One of its modals, if it has any.
    dtype : torch.dtype
    """

    species: Tensor
    first_features: Tensor

    def __init__(self, model: object, modal: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        given: Foreign = model
        # A plain tensor where it is not trainable, which `to` would not move.
        basis = given.edge_embedding.basis_function
        basis.coeffs = nn.Parameter(torch.as_tensor(basis.coeffs))
        given.set_is_batch_data(False)
        given.to(dtype).eval().requires_grad_(False)
        self.cutoff = float(given.cutoff)
        self.edge_embedding = given.edge_embedding
        species = torch.full((max(given.type_map) + 1,), -1)
        species[list(given.type_map)] = torch.tensor(list(given.type_map.values()))
        self.register_buffer("species", species)

        before, after = _divided(model)
        after = [(name, Convolution(m) if _is_convolution(m) else m) for name, m in after]
        self.layers = nn.Sequential(OrderedDict(after))
        self.n_convolutions = sum(isinstance(m, Convolution) for m in self.layers)
        data = _one_row_per_element(model, modal, dtype)
        for module in before:
            data = module(data)
        first: Convolution = self.layers[0]  # type: ignore[assignment]
        self.register_buffer("first_features", first.components_first(data.pop("x")))
        self._tables = tuple(data)
        for name, table in data.items():
            self.register_buffer(f"table_{name}", table)

    def forward(self, graph: LocalGraph) -> Tensor:
        """Return the energy of each own row, (n_own_rows,) eV. Collective."""
        layout = EdgeLayout.of(
            graph.edge_centre, graph.n_centre_rows, slots_per_block(graph.edge_vectors.device)
        )
        neighbour = graph.edge_neighbour[layout.edge]
        edges = self._edge_functions(graph.edge_vectors, layout)
        data = self._looked_up(self.species[graph.numbers])
        for module in self.layers:
            if not isinstance(module, Convolution):
                data = module(data)
                continue
            if "x" in data:
                features, rows = module.components_first(data["x"]), neighbour
                features = refresh_neighbors(features)
            else:
                features = self.first_features
                rows = self.species[graph.neighbour_numbers][neighbour]
            data["x"] = module(features, rows, *edges, layout, graph.n_centre_rows)
        energies: Tensor = data["atomic_energy"]
        return energies.flatten()

    def _edge_functions(self, vectors: Tensor, layout: EdgeLayout) -> tuple[Tensor, Tensor]:
        """Return radial basis and harmonics of each slot; the latter are zero in empty slots."""
        spare = vectors.new_tensor([0.5 * self.cutoff, 0.0, 0.0]).expand(len(layout.edge), 3)
        data = {"edge_vec": spare.index_copy(0, layout.slot, vectors)}
        data = self.edge_embedding(data)
        harmonics = torch.where(layout.filled[:, None], data["edge_attr"], 0.0)
        return data["edge_embedding"], harmonics

    def _looked_up(self, species: Tensor) -> dict[str, Tensor]:
        """Return what the modules before the first convolution give rows of these ``species``."""
        tables = {name: getattr(self, f"table_{name}") for name in self._tables}
        return {
            name: table if name.startswith("modal") else table.index_select(0, species)
            for name, table in tables.items()
        }


_PER_ATOM = (
    "EquivariantGate",
    "FCN_e3nn",
    "IrrepsLinear",
    "ModalWiseRescale",
    "Rescale",
    "SelfConnectionIntro",
    "SelfConnectionLinearIntro",
    "SelfConnectionOutro",
    "SpeciesWiseRescale",
)
"""Modules that compute each row from that row, from its species and the modal only."""

_REPLACED = ("AtomReduce", "EdgeEmbedding", "ForceStressOutputFromEdge", "OnehotEmbedding")
"""Modules that are fed, or whose result is taken, in another way here."""


def _is_convolution(module: nn.Module) -> bool:
    return type(module).__name__ == "IrrepsConvolution"


def _divided(model: Foreign) -> tuple[list[nn.Module], list[tuple[str, nn.Module]]]:
    """Return a model's modules before its first convolution, and those from there on with names."""
    kinds = {type(module).__name__ for module in model}
    unknown = kinds - {"IrrepsConvolution", *_PER_ATOM, *_REPLACED}
    if unknown or "IrrepsConvolution" not in kinds:
        raise NotImplementedError(
            f"models of these modules are not supported: {sorted(kinds)} "
            f"(unknown: {sorted(unknown)})"
        )
    named = [(n, m) for n, m in model.named_children() if type(m).__name__ not in _REPLACED]
    first = next(i for i, (_, module) in enumerate(named) if _is_convolution(module))
    return [module for _, module in named[:first]], named[first:]


def _one_row_per_element(
    model: Foreign, modal: str | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what a model's embeddings make of one atom of each element (and of the modal)."""
    one_hot = torch.eye(len(model.type_map), dtype=dtype)
    data = {"x": one_hot, "node_attr": one_hot, "atom_type": torch.arange(len(one_hot))}
    if modal is not None:
        number = model.modal_map[modal]
        data["modal_type"] = torch.tensor(number)
        data["modal_attr"] = torch.eye(len(model.modal_map), dtype=dtype)[number]
    return data


class SevenNet(Potential):
    """A SevenNet model, for the energy per atom.

    Nothing but the features that a convolution reads is exchanged, for all convolutions but the
    first: its neighbour features depend on the elements only. Ghost rows are read, never computed.

    Parameters
    ----------
    model : str or path
        Name of a pretrained model, such as ``"7net-0"`` or ``"7net-l3i5"``, or a checkpoint file.
    modal : str or None
        Which of its kinds of training data a multi-modal model imitates, such as ``"PBE"`` for
        ``"7net-mf-0"``.
    dtype : torch.dtype
        float32 or float64, for parameters and computation alike.
    comm : Communicator, mpi4py communicator, ProcessGroup or None
        Ranks for all of which its rank 0 finds and reads the model; **Collective** then. None:
        this rank reads it by itself.

    Raises
    ------
    ImportError
        If the package ``sevenn`` is missing.
    ValueError
        If there is no such model, dtype or modal, or if a modal is missing.
    OSError
        If the checkpoint cannot be read.
    NotImplementedError
        If the model's convolutions are of another kind than those of the published models.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "7net-0",
        *,
        modal: str | None = None,
        dtype: torch.dtype = torch.float32,
        comm: object = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"SevenNet computes in torch.float32 or torch.float64, not in {dtype}")
        self.name = fspath(model)
        self.modal = modal
        with _nothing_left_changed():
            loaded = _load(self.name, modal, comm)
            self.weights_digest = digest_of(loaded)
            self.network = Network(loaded, modal, dtype)
        self.cutoff = self.network.cutoff
        self.exchanges = self.network.n_convolutions - 1
        self.elements = frozenset(int(number) for number in loaded.type_map)
        self.dtype = dtype

    def to(self, device: torch.device) -> None:
        """Move the model to ``device``."""
        super().to(device)
        self.network.to(device)

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_own_rows,) in eV. Collective."""
        return {"energies": self.network(graph)}


@contextmanager
def _nothing_left_changed() -> Iterator[None]:
    """Restore what building a model with sevenn and e3nn changes, or depends on.

    They initialise weights at random before they read them, add a filter for warnings, and can
    read older checkpoints only while the default dtype is float32.
    """
    default = torch.get_default_dtype()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # They compile small functions with it when they are imported.
        warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _load(name: str, modal: str | None, comm: object) -> Foreign:
    """Build a model from its checkpoint. Collective if there is a ``comm``."""
    try:
        from sevenn.util import load_checkpoint
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sevenn":
            raise
        raise ImportError(
            'SevenNet models need the package sevenn: pip install "nvdd-md[sevennet]"'
        ) from error
    checkpoint = load_checkpoint(name) if comm is None else _received(name, comm, load_checkpoint)
    with readable(name):
        modals = sorted(checkpoint.config.get("_modal_map") or ())
    if not modals and modal is not None:
        raise ValueError(f"{name} has no modals, so modal={modal!r} cannot be chosen")
    if modals and modal not in modals:
        raise ValueError(f"{name} needs modal=, one of {modals}; got {modal!r}")
    return checkpoint.build_model()


def _received(name: str, comm: object, load_checkpoint: Callable[[str], Foreign]) -> Foreign:
    """Return a checkpoint that rank 0 has read. Collective."""

    def read() -> bytes:
        # sevenn knows where its models are, and downloads some of them.
        return Path(load_checkpoint(name).checkpoint_path).read_bytes()

    content = from_rank_0(read, comm, Path(name).name)
    # sevenn reads checkpoints from files only, when their content is first asked for.
    with NamedTemporaryFile(suffix=".pth") as file:
        file.write(content)
        file.flush()
        checkpoint = load_checkpoint(file.name)
        with readable(name):
            _ = checkpoint.config
    return checkpoint
