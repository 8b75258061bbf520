"""The potential contract: what a wrapper declares about its model, and what it is given.

A wrapper is written once, with the verbs of :mod:`nvdd_md.helpers`; it reads neighbours from the
result of ``refresh_neighbors`` and self terms from its own rows, and never assumes that the two
share an index space.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from nvdd_md.adapters import MethodAdapter


class OutputKind(Enum):
    """How one output of a forward is put together over ranks; never guessed from a shape."""

    PER_NODE = "per node"
    """One row per own row of the rank (n_own_rows, *F); gathered in the caller's order."""

    SYSTEM_PARTIAL = "per system, partial"
    """This rank's part of a per-system sum (n_systems, *F); added over ranks."""

    SYSTEM_TOTAL = "per system, total"
    """The same value on every rank (n_systems, *F), such as a ``system_sum`` over ranks."""

    GLOBAL = "global"
    """One value, the same on every rank."""


@dataclass(frozen=True)
class InfoKey:
    """A global input that a potential reads from ``atoms.info``.

    Attributes
    ----------
    default : float
        Used, with one warning, where the caller gives none.
    integer : bool
        Whether other than whole numbers are refused.
    lowest, highest : float
        Values below or above are refused.
    """

    default: float
    integer: bool = False
    lowest: float = -math.inf
    highest: float = math.inf


@dataclass(frozen=True)
class LocalGraph:
    """What a rank's model sees: its own rows, the rows its edges read, and the edges.

    Attributes
    ----------
    numbers : (n_own_rows,) int64
        Atomic numbers of the rows a layer writes.
    neighbour_numbers : (n_neighbour_rows,) int64
        Atomic numbers of the rows that ``refresh_neighbors`` returns.
    edge_centre : (n_edges,) int64
        Index into the rows a layer writes; ascending.
    edge_neighbour : (n_edges,) int64
        Index into the rows that ``refresh_neighbors`` returns.
    edge_vectors : (n_edges, 3), the potential's dtype, Å
        ``(r_j - r_i) + S·cell``, from the centre to the neighbour; all shorter than the cutoff.
        The leaf that the engine differentiates.
    n_owned : int
        Own rows that are atoms: all, or none where the only row is a dummy.
    system : (n_own_rows,) int64
        System of each own row.
    n_systems : int
    info : mapping of str to (n_systems,) tensor
        The declared keys of ``atoms.info``, in the potential's dtype.
    arrays : mapping of str to (n_own_rows, *F) tensor
        The declared keys of ``atoms.arrays``.
    cell : (3, 3) float64, Å
    pbc : (3,) bool
    """

    numbers: Tensor
    neighbour_numbers: Tensor
    edge_centre: Tensor
    edge_neighbour: Tensor
    edge_vectors: Tensor
    n_owned: int
    system: Tensor
    n_systems: int
    info: Mapping[str, Tensor]
    arrays: Mapping[str, Tensor]
    cell: Tensor
    pbc: Tensor

    @property
    def n_centre_rows(self) -> int:
        """Rows a layer writes."""
        return len(self.numbers)


class Potential(ABC):
    """Base class of all wrappers around a torch model.

    A forward computes per-atom energies and never forces: the engine differentiates the edge
    vectors. Subclasses set the attributes below and write :meth:`forward`.

    Attributes
    ----------
    name : str
    cutoff : float, Å
        Length below which an edge exists.
    exchanges : int
        Feature refreshes in one forward (layers - 1 for a message-passing model).
    dtype : torch.dtype
        Of the edge vectors and the computation.
    device : torch.device
    elements : frozenset of int, or None
        Atomic numbers the model knows; None: every element.
    info_keys : mapping of str to InfoKey
        Keys of ``atoms.info`` that the model reads.
    array_keys : tuple of str
        Keys of ``atoms.arrays`` that the model reads; the caller must give them.
    outputs : mapping of str to OutputKind
        Every output of the forward. ``energies`` (per node, eV) is the usual one; other names
        become results of the calculator.
    energy_terms : tuple of str
        The outputs whose sum is the energy, eV. A replicated term (``SYSTEM_TOTAL``) must be an
        output of its own, never added to a per-rank sum.
    weights_digest : bytes or None
        :func:`digest_of` the model as it was loaded. Tables computed from it are best left out:
        they may differ in the last bits between two kinds of processors.
    """

    name: str
    cutoff: float
    exchanges: int = 0
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")
    elements: frozenset[int] | None = None
    info_keys: Mapping[str, InfoKey] = {}
    array_keys: tuple[str, ...] = ()
    outputs: Mapping[str, OutputKind] = {"energies": OutputKind.PER_NODE}
    energy_terms: tuple[str, ...] = ("energies",)
    weights_digest: bytes | None = None

    @property
    def reach(self) -> float:
        """How far an atom's position can influence another atom's energy, Å."""
        return (self.exchanges + 1) * self.cutoff

    @property
    def dummy_element(self) -> int:
        """Atomic number of the dummy row of a rank that owns nothing."""
        return min(self.elements) if self.elements else 1

    def fingerprint(self) -> dict[str, str]:
        """Return what must be the same on all ranks: short texts by the attributes of this object.

        Numbers, strings, tensors, arrays and torch modules among the attributes count, also inside
        lists, tuples and dictionaries (such as those of a class that is a torch module itself). Of
        other objects, and of what functions refer to, only tensors, arrays and modules count.
        Neither the name counts nor the device: a model may lie in different folders on different
        nodes. Where a wrapper has set ``weights_digest``, that stands for all tensors and modules.
        """
        values: dict[str, object] = {"class": type(self).__qualname__}
        values |= {key: value for key, value in vars(self).items() if key not in _NOT_COMPARED}
        values |= {"cutoff": self.cutoff, "exchanges": self.exchanges, "dtype": str(self.dtype)}
        values["elements"] = None if self.elements is None else sorted(self.elements)
        if self.weights_digest is not None:
            values = {key: value for key, value in values.items() if not _has_weights(value)}
        texts = {key: _text(value) for key, value in values.items()}
        return {key: text for key, text in texts.items() if text is not None}

    def adapters(self) -> Sequence[MethodAdapter]:
        """Return the method replacements to install during a distributed forward."""
        return ()

    def to(self, device: torch.device) -> None:
        """Move the model to ``device``."""
        self.device = device

    @abstractmethod
    def forward(self, graph: LocalGraph) -> Mapping[str, Tensor]:
        """Return the declared outputs for this rank's rows. Collective.

        Must make the same exchanges in the same order on every rank, whatever it owns: also with
        no edges, and with a dummy row only.
        """


_NOT_COMPARED = ("name", "device", "training")


def _has_weights(value: object) -> bool:
    return isinstance(value, (Tensor, nn.Module))


def _text(value: object) -> str | None:
    """Return a short text that stands for a value, or None where nothing does."""
    if isinstance(value, (bool, int, float, str)) and len(repr(value)) < 30:
        return repr(value)
    digest = digest_of(value)
    return None if digest is None else digest.hex()


def digest_of(value: object) -> bytes | None:
    """Return 8 bytes that stand for a value, or None where nothing does.

    Parameters
    ----------
    value : object
        A number, string, tensor, array or torch module (its parameters and buffers), a list,
        tuple or dictionary of such, or another object with tensors, arrays or modules in it.
    """
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(value, nn.Module):
        return digest_of(value.state_dict())
    if isinstance(value, Tensor):
        digest.update(repr((tuple(value.shape), str(value.dtype))).encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(repr((value.shape, str(value.dtype))).encode() + value.tobytes())
    elif isinstance(value, (bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode())
    elif isinstance(value, (list, tuple)):
        digest.update(b"".join(digest_of(item) or b"" for item in value))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode() + (digest_of(value[key]) or b""))
    else:
        hidden = [digest_of(weights) or b"" for weights in _weights_inside(value, set())]
        if not hidden:
            return None
        digest.update(b"".join(hidden))
    return digest.digest()


def _weights_inside(value: object, seen: set[int]) -> Iterator[object]:
    """Yield the tensors, arrays and modules that an object refers to, in the order of names."""
    if id(value) in seen or isinstance(value, (type, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, nn.Module, np.ndarray)):
        yield value
        return
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts += [value[key] for key in sorted(value, key=repr)]
    elif isinstance(value, (list, tuple)):
        parts += value
    elif isinstance(value, FunctionType):
        parts += [value.__defaults__, value.__kwdefaults__]
        parts += [getattr(cell, "cell_contents", None) for cell in value.__closure__ or ()]
    elif isinstance(value, partial):
        parts += [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        parts += [value.__self__]
    else:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        parts += [getattr(value, name, None) for name in sorted(names)]
    for part in parts:
        yield from _weights_inside(part, seen)
