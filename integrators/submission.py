"""From a caller's ``Atoms`` to atoms on their ranks, and back."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from ase import Atoms
from numpy.typing import NDArray
from torch import Tensor

from nvdd_md.agreement import CALLS, SIMULATE, DisagreementError, meet
from nvdd_md.comm import Communicator
from nvdd_md.domain.lattice import Lattice
from nvdd_md.integrators.particles import ARRAY_PREFIX, FIELDS, Field, Particles, scatter
from nvdd_md.potential import Potential
from nvdd_md.system import Surroundings, System
from nvdd_md.watchdog import Watchdog

_OWN_COLUMNS = ("numbers", "positions", "momenta", "masses")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """What every rank knows of a system whose atoms are divided.

    Attributes
    ----------
    n_atoms : int
    template : Atoms
        Without atoms: cell, pbc, info.
    info : mapping of str to float
        What the potential reads of ``template.info``, defaults filled in.
    fields : tuple of Field
    labels : mapping of str to array of str
        Texts of ``atoms.arrays`` that a column holds as numbers.
    """

    n_atoms: int
    template: Atoms
    info: Mapping[str, float]
    fields: tuple[Field, ...]
    labels: Mapping[str, NDArray[np.str_]] = field(default_factory=dict)

    @property
    def surroundings(self) -> Surroundings:
        """What the potential reads besides the atoms."""
        cell = np.array(self.template.cell.array, dtype=np.float64)
        pbc = np.array(self.template.pbc, dtype=bool)
        return Surroundings(cell, pbc, Lattice.from_cell(cell, pbc), self.info)


def submit(
    atoms: Atoms | None, potential: Potential, list_cutoff: float, watchdog: Watchdog
) -> tuple[Header, Particles]:
    """Check the atoms that rank 0 gives, and divide them evenly. Collective.

    Parameters
    ----------
    atoms : Atoms or None
        Rank 0's are taken. On other ranks: the same, which is checked, or None.
    potential : Potential
    list_cutoff : float, Å
    watchdog : Watchdog

    Raises
    ------
    ValueError
        The same on all ranks: what is wrong with the atoms.
    DisagreementError
        If other ranks gave other atoms.
    """
    comm = watchdog.comm
    failure: Exception | None = None
    columns: dict[str, Tensor] | None = None
    header: Header | None = None
    defaulted: tuple[str, ...] = ()
    try:
        if atoms is not None:
            header, columns, defaulted = _columns_of(atoms, potential, list_cutoff)
        elif comm.rank == 0:
            raise ValueError("rank 0 must give the atoms of a simulation, got None")
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    with watchdog.entry(CALLS[SIMULATE]):
        meet(comm, SIMULATE, bytes(16), failure)
    with watchdog.inside(CALLS[SIMULATE]):
        _compare(header, columns, comm)
        if comm.rank == 0:
            _warn_about_defaults(defaulted, potential)
        header = comm.broadcast_object(header if comm.rank == 0 else None)
        given = columns if comm.rank == 0 else None
        particles = scatter(given, header.fields, header.n_atoms, comm)
    return header, particles


def _columns_of(
    atoms: Atoms, potential: Potential, list_cutoff: float
) -> tuple[Header, dict[str, Tensor], tuple[str, ...]]:
    """Return what an ``Atoms`` object holds.

    Returns
    -------
    header : Header
    columns : dict of str to (n_atoms, ...) tensor
        One per field.
    defaulted : tuple of str
        Keys of ``atoms.info`` that the potential reads and that are not given.
    """
    if not isinstance(atoms, Atoms):
        raise ValueError(f"atoms must be an ase.Atoms object or None, got {type(atoms).__name__}")
    if not len(atoms):
        raise ValueError("a simulation needs at least one atom")
    if atoms.constraints:
        kinds = sorted({type(constraint).__name__ for constraint in atoms.constraints})
        raise ValueError(f"a simulation cannot keep constraints yet, and the atoms have {kinds}")
    system = System.from_atoms(atoms, potential)
    system.check(potential, list_cutoff)
    n = len(atoms)
    momenta, masses = atoms.get_momenta(), atoms.get_masses()
    _check_finite(momenta, masses)
    columns = {
        "ids": torch.arange(n),
        "numbers": torch.from_numpy(system.numbers),
        "masses": torch.from_numpy(masses.astype(np.float64)),
        "positions": torch.from_numpy(system.positions),
        "images": torch.zeros((n, 3), dtype=torch.int64),
        "momenta": torch.from_numpy(momenta.astype(np.float64)),
        "reference": torch.from_numpy(system.positions.copy()),
        "weights": torch.ones(n, dtype=torch.float64),
    }
    extra: list[Field] = []
    labels: dict[str, NDArray[np.str_]] = {}
    for name, array in atoms.arrays.items():
        if name in _OWN_COLUMNS:
            continue
        numbers = array
        if array.dtype.kind in "US":
            labels[name], inverse = np.unique(array.astype(str), return_inverse=True)
            numbers = inverse.reshape(array.shape)
        try:
            native = np.array(numbers, dtype=numbers.dtype.newbyteorder("="), order="C")
            column = torch.from_numpy(native)
        except TypeError:
            raise ValueError(
                f"atoms.arrays[{name!r}] holds {array.dtype}, which cannot move between ranks: "
                "numbers, truth values and texts can"
            ) from None
        extra.append(Field(ARRAY_PREFIX + name, column.dtype, tuple(column.shape[1:])))
        columns[ARRAY_PREFIX + name] = column
    template = atoms[:0]
    template.calc = None
    header = Header(n, template, system.info, (*FIELDS, *extra), labels)
    return header, columns, system.defaulted


def _warn_about_defaults(keys: tuple[str, ...], potential: Potential) -> None:
    for key in keys:
        default = potential.info_keys[key].default
        _log.warning(
            "%s reads atoms.info[%r], which is not given: %g is used", potential.name, key, default
        )


def _check_finite(momenta: NDArray[np.float64], masses: NDArray[np.float64]) -> None:
    for name, array in (("momenta", momenta), ("masses", masses)):
        bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
        if len(bad):
            raise ValueError(f"{name} are not finite; the first such atom has index {bad[0]}")
    if (masses <= 0.0).any():
        raise ValueError(
            f"masses must be above 0; atom {int(np.argmin(masses))} has {masses.min():g} u"
        )


def _compare(
    header: Header | None, columns: Mapping[str, Tensor] | None, comm: Communicator
) -> None:
    """Check that all ranks that gave atoms gave the same. Collective."""
    digest = b""
    if header is not None and columns is not None:
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(repr((header.surroundings.cell.tolist(), header.info)).encode())
        hasher.update(repr((header.template.pbc.tolist(), header.fields)).encode())
        for column in columns.values():
            hasher.update(column.contiguous().numpy().tobytes())
        digest = hasher.digest()
    digests = comm.gather_objects(digest)
    different = [rank for rank, other in enumerate(digests) if other not in (b"", digests[0])]
    if different:
        raise DisagreementError(
            f"ranks {different} gave other atoms than rank 0: all ranks must give the same (same "
            "file, same random seed), or ranks above 0 None"
        )


def assembled(header: Header, arrays: Mapping[str, NDArray[np.generic]]) -> Atoms:
    """Return all atoms as an ``Atoms`` object.

    Parameters
    ----------
    header : Header
    arrays : mapping of str to (n_atoms, ...) array
        ``numbers``, ``positions`` (unwrapped, Å), ``momenta``, ``masses``, and the other fields by
        their names.
    """
    template = header.template
    atoms = Atoms(
        numbers=arrays["numbers"],
        positions=arrays["positions"],
        cell=template.cell,
        pbc=template.pbc,
        info=dict(template.info),
        celldisp=template.get_celldisp(),
    )
    atoms.set_momenta(arrays["momenta"])
    if not np.array_equal(arrays["masses"], atoms.get_masses()):
        atoms.set_masses(arrays["masses"])
    for item in header.fields:
        if item.name.startswith(ARRAY_PREFIX):
            name = item.name.removeprefix(ARRAY_PREFIX)
            atoms.set_array(name, as_given(header, name, arrays[item.name]))
    return atoms


def as_given(header: Header, name: str, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return a column of ``atoms.arrays`` as it was, texts as texts."""
    return header.labels[name][array] if name in header.labels else array
