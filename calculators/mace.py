"""MACE models (Batatia et al., NeurIPS 35, 11423, 2022), one exchange between two layers.

Per atom and per edge the model's own modules compute, called in another order than its forward
calls them. An interaction consists of what each row does for itself (:meth:`Interaction.prepare`)
and of what edges read of it: only the latter is exchanged, and no module that works on rows ever
sees a ghost. Sums over edges are those of :mod:`nvdd_md.calculators.blocked_convolution`, whose
convolution has the same form; see Note [Blocks] there.

Note [First layer]
------------------
What the first interaction reads of a row depends on its element (and, in models with a joint
embedding, on quantities of its whole system). So its row-wise part is evaluated once per element,
not per atom; own rows, and edges for their neighbours, look it up. Nothing is exchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from os import PathLike, fspath

import torch
from torch import Tensor, nn

from nvdd_md.calculators.blocked_convolution import Foreign
from nvdd_md.calculators.edge_blocks import EdgeLayout, slots_per_block
from nvdd_md.calculators.mace_interactions import Edges, interaction_of
from nvdd_md.calculators.mace_products import Product
from nvdd_md.calculators.mace_readouts import PairRepulsion, Readout
from nvdd_md.calculators.model_file import read_on_rank_0, readable
from nvdd_md.helpers import refresh_neighbors
from nvdd_md.potential import InfoKey, LocalGraph, Potential, digest_of

MODELS = ("MACE", "ScaleShiftMACE")
"""Model classes whose forward is known."""

CONDITIONS = {"total_charge": ("charge", 0.0), "total_spin": ("spin", 1.0)}
"""What a joint embedding may read of a system: its key in ``atoms.info``, and the default."""


class Network(nn.Module):
    """A MACE model, evaluated on own rows and the edges of their centres.

    Parameters
    ----------
    model : mace.modules.MACE or mace.modules.ScaleShiftMACE
        Taken apart; not to be used any more.
    head : int
        Which of its heads.
    """

    model: Foreign
    interactions: Foreign
    species: Tensor
    one_hot: Tensor
    own_energies: Tensor
    first_read: Tensor

    def __init__(self, model: object, head: int) -> None:
        super().__init__()
        given: Foreign = model
        given.eval().requires_grad_(False)
        self.model, self.head = model, head
        numbers = given.atomic_numbers
        species = torch.full((int(numbers.max()) + 1,), -1)
        species[numbers.cpu()] = torch.arange(len(numbers))
        self.register_buffer("species", species)
        self.register_buffer("one_hot", torch.eye(len(numbers)).to(given.r_max))
        self.register_buffer("own_energies", given.atomic_energies_fn(self.one_hot)[:, head])

        self.interactions = nn.ModuleList(interaction_of(block) for block in given.interactions)
        self.products = nn.ModuleList(Product(block) for block in given.products)
        self.readouts = nn.ModuleList(Readout(block, head) for block in given.readouts)
        repulsion = getattr(given, "pair_repulsion_fn", None)
        self.repulsion = None if repulsion is None else PairRepulsion(repulsion)
        self.conditions = tuple(getattr(given, "embedding_specs", None) or ())
        if not self.conditions:
            read, kept = self._per_element({})
            self.register_buffer("first_read", read)
            self._kept = tuple(kept)
            for name, table in kept.items():
                self.register_buffer(f"first_{name}", table)

    def forward(self, graph: LocalGraph) -> Tensor:
        """Return the energy of each own row, (n_own_rows,) float64, eV. Collective."""
        own = self.species[graph.numbers]
        attrs = self.one_hot.index_select(0, own)
        edges, neighbour = self._edges(graph, own)
        read, kept, rows = self._first_layer(graph, own, edges)
        energies = self.own_energies[own].double() + kept.pop("energy", 0.0)
        features: list[Tensor] = []
        for interaction, product in zip(self.interactions, self.products, strict=True):
            if features:
                read, kept = interaction.prepare(features[-1], attrs)
                read, rows = refresh_neighbors(read), neighbour
            messages, skip = interaction(read, kept, rows, edges, attrs)
            features.append(product(messages, skip, own, attrs))
        return energies + self._interaction_energies(features, graph)

    def _edges(self, graph: LocalGraph, own: Tensor) -> tuple[Edges, Tensor]:
        """Return the edges, and the row (n_slots,) of each neighbour among refreshed rows."""
        layout = EdgeLayout.of(
            graph.edge_centre, graph.n_centre_rows, slots_per_block(graph.edge_vectors.device)
        )
        neighbour = graph.edge_neighbour[layout.edge]
        centre = graph.edge_centre[layout.edge]
        pair = torch.stack((self.species[graph.neighbour_numbers[neighbour]], own[centre]))
        # MACE's vectors point to the centre: in models of SO(3), not O(3), that is not the same.
        vectors = -graph.edge_vectors
        spare = vectors.new_tensor([0.5 * float(self.model.r_max), 0.0, 0.0])
        vectors = spare.expand(len(neighbour), 3).index_copy(0, layout.slot, vectors)
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        # The elements take the place of the atoms: embeddings ask for nothing else of them.
        embedding, cutoff = self.model.radial_embedding(
            lengths, self.one_hot, pair, self.model.atomic_numbers
        )
        harmonics = self.model.spherical_harmonics(vectors)
        if cutoff is not None:
            harmonics = harmonics * cutoff
        harmonics = torch.where(layout.filled[:, None], harmonics, 0.0)
        edges = Edges(layout, len(own), centre, pair[1], pair[0], embedding, cutoff, harmonics)
        return edges, neighbour

    def _first_layer(
        self, graph: LocalGraph, own: Tensor, edges: Edges
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return what the first layer reads, keeps, and in which rows; see Note [First layer]."""
        if not self.conditions:
            read: Tensor = self.first_read
            tables = {name: getattr(self, f"first_{name}") for name in self._kept}
            kept = {name: table.index_select(0, own) for name, table in tables.items()}
            return read, kept, edges.neighbour_species
        values = {name: graph.info[CONDITIONS[name][0]] for name in self.conditions}
        read, tables = self._per_element(values)
        offset = graph.system * len(self.one_hot)
        kept = {name: table.index_select(0, offset + own) for name, table in tables.items()}
        return read, kept, offset[edges.centre] + edges.neighbour_species

    def _per_element(self, conditions: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the first layer of one atom of each element, in each system.

        Parameters
        ----------
        conditions : mapping of str to (n_systems,) tensor
            What the joint embedding reads; none for a model without.

        Returns
        -------
        read, kept
            See :meth:`Interaction.prepare`; rows are (system, element).
        """
        attrs, model = self.one_hot, self.model
        features = model.node_embedding(attrs)
        if conditions:
            n_systems = len(next(iter(conditions.values())))
            system = torch.arange(n_systems, device=attrs.device).repeat_interleave(len(attrs))
            attrs, features = attrs.repeat(n_systems, 1), features.repeat(n_systems, 1)
            features = features + model.joint_embedding(system, conditions)
        read: Tensor
        kept: dict[str, Tensor]
        read, kept = self.interactions[0].prepare(features, attrs)
        if hasattr(model, "embedding_readout"):
            heads = torch.full((len(attrs),), self.head, device=attrs.device)
            kept["energy"] = model.embedding_readout(features, heads)[:, self.head]
        return read, kept

    def _interaction_energies(self, features: list[Tensor], graph: LocalGraph) -> Tensor:
        """Return (n_own_rows,) float64, eV, given the features that each layer made."""
        read = features[-1:] if len(self.readouts) == 1 else features
        parts = [readout(x) for readout, x in zip(self.readouts, read, strict=True)]
        if self.repulsion is not None:
            distances = torch.linalg.vector_norm(graph.edge_vectors, dim=1)
            one = graph.numbers[graph.edge_centre]
            other = graph.neighbour_numbers[graph.edge_neighbour]
            pairs = self.repulsion(distances, one, other)
            parts.append(torch.zeros_like(parts[0]).index_add(0, graph.edge_centre, pairs))
        total = torch.stack(parts).sum(0)
        if hasattr(self.model, "scale_shift"):
            total = self.model.scale_shift(total, torch.full_like(graph.system, self.head))
        return total.double()


class MACE(Potential):
    """A MACE model, for the energy per atom.

    Ghost rows are read, never computed: for all interactions but the first, whose features depend
    on the elements only, the features that an interaction reads are exchanged, and nothing else.

    Parameters
    ----------
    model : str, path or torch.nn.Module
        A model file as MACE saves it, or a model of class ``MACE`` or ``ScaleShiftMACE``, which is
        copied. A model file is a pickle, and loading it runs code that it contains: load only
        files that you trust.
    head : str or None
        Which head of a model with several. None: the only one, or the one named "default".
    dtype : torch.dtype or None
        float32 or float64, for parameters and computation alike. None: that of the model.
    device : str or torch.device
        Where the model stands until a calculator moves it.
    enable_cueq, enable_oeq : bool
        Let MACE convert the model to modules of cuEquivariance or OpenEquivariance, for
        ``device``.
    comm : Communicator, mpi4py communicator, ProcessGroup or None
        Ranks for all of which its rank 0 reads the model file; **Collective** then. None: this rank
        reads it by itself.

    Raises
    ------
    ImportError
        If the package ``mace`` is missing, or one that a conversion needs.
    ValueError
        If there is no such dtype or head, if a head must be chosen, or if the file holds no model.
    NotImplementedError
        If the model is of another class, or has parts of another class, than those known here.
    OSError
        If the model file cannot be read.
    """

    def __init__(
        self,
        model: str | PathLike[str] | nn.Module,
        *,
        head: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        enable_cueq: bool = False,
        enable_oeq: bool = False,
        comm: object = None,
    ) -> None:
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"MACE computes in torch.float32 or torch.float64, not in {dtype}")
        device = torch.device(device)
        with _undisturbed():
            loaded = _load(model, comm)
            self.weights_digest = digest_of(loaded)
            self.info_keys = _info_keys(loaded)
            number = _head_number(loaded, head)
            self.head = number
            self.dtype = dtype or next(loaded.parameters()).dtype
            loaded = loaded.to(device=device, dtype=self.dtype)
            loaded = _accelerated(loaded, device, cueq=enable_cueq, oeq=enable_oeq)
            self.network = Network(loaded, number)
        self.name = "MACE" if isinstance(model, nn.Module) else fspath(model)
        self.cutoff = float(loaded.r_max)
        self.exchanges = len(self.network.interactions) - 1
        self.elements = frozenset(int(number) for number in loaded.atomic_numbers)
        self.to(device)

    def to(self, device: torch.device) -> None:
        """Move the model to ``device``."""
        super().to(device)
        self.network.to(device)

    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return ``energies`` (n_own_rows,) in eV. Collective."""
        return {"energies": self.network(graph)}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave torch's random numbers and default dtype, and the list of warning filters, alone."""
    default = torch.get_default_dtype()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # e3nn compiles small functions with it when it is imported and when a model is loaded.
        warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _load(model: str | PathLike[str] | nn.Module, comm: object) -> Foreign:
    """Return a model of a known class, to be taken apart. Collective if there is a ``comm``."""
    try:
        import mace  # noqa: F401 - before e3nn, which it prepares torch for
    except ModuleNotFoundError as error:
        if error.name != "mace":
            raise
        raise ImportError(
            'MACE models need the package mace-torch: pip install "nvdd-md[mace]"'
        ) from error
    source: str | PathLike[str] | BytesIO
    if isinstance(model, nn.Module):
        # Not deepcopy, which MACE's EmptyParam does not survive.
        source = BytesIO()
        torch.save(model, source)
        source.seek(0)
    else:
        source = model if comm is None else BytesIO(read_on_rank_0(model, comm))
    with readable(model):
        loaded = torch.load(source, map_location="cpu", weights_only=False)
    name = type(loaded).__name__
    if name not in MODELS:
        raise NotImplementedError(
            f"models of class {name} are not supported; known are {list(MODELS)}"
        )
    return loaded


def _head_number(model: Foreign, head: str | None) -> int:
    heads = list(getattr(model, "heads", ["Default"]))
    if head is None:
        chosen = heads if len(heads) == 1 else [h for h in heads if h.lower() == "default"]
    else:
        chosen = [h for h in heads if h == head]
    if len(chosen) != 1:
        raise ValueError(
            f"the model has the heads {heads}: head= must be one of them, got {head!r}"
        )
    return heads.index(chosen[0])


def _info_keys(model: Foreign) -> dict[str, InfoKey]:
    """Return the keys of ``atoms.info`` that a joint embedding reads."""
    keys = {}
    for name, spec in (getattr(model, "embedding_specs", None) or {}).items():
        if name not in CONDITIONS or spec["per"] != "graph":
            raise NotImplementedError(
                f"embeddings of {name!r} per {spec['per']} are not supported; known are "
                f"{list(CONDITIONS)} per graph"
            )
        key, default = CONDITIONS[name]
        if spec["type"] == "categorical":
            lowest = -spec.get("offset", 0)
            highest = lowest + spec["num_classes"] - 1
            keys[key] = InfoKey(default, integer=True, lowest=lowest, highest=highest)
        else:
            keys[key] = InfoKey(default)
    return keys


def _accelerated(model: Foreign, device: torch.device, *, cueq: bool, oeq: bool) -> Foreign:
    """Return ``model``, converted as asked for."""
    if not cueq and not oeq:
        return model
    needed = ["cuequivariance_torch"] * cueq + ["openequivariance"] * oeq
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ImportError(f"the conversion asked for needs {' and '.join(missing)}, not installed")
    kind = "hybrid" if cueq and oeq else "cueq" if cueq else "oeq"
    run = import_module(f"mace.cli.convert_e3nn_{kind}").run
    return run(model, device=device.type).to(device)
