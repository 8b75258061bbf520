"""What the bytes of one checkpoint mean.

Note [Checkpoint file]: a checkpoint is an HDF5 file with a user block of 512 bytes before it, in
which HDF5 lets others write. The block is text: a magic line, the checksum (BLAKE2b) of all bytes
after the block, and the size of the whole file. So nothing is outside the checksum: names, dtypes,
shapes, values, HDF5's own tables; and a file is known to be whole before HDF5 sees it, which in
damaged files may find wrong values, or search for ever.
The block never changes its form, the HDF5 part has a version::

    attributes   format = "nvdd_md checkpoint", version = 1
    /document    JSON: step, scalars, job, and the names of the arrays in their order
    /arrays/...  one data set per array, its name percent-encoded

Booleans, integers and floats of up to 8 bytes are HDF5's own; an array of any other dtype
(strings, complex numbers, dates, records) is a data set of bytes in NumPy's ``npy`` format, with
the attribute ``encoding = "npy"``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

import h5py
import numpy as np
import numpy.typing as npt

from nvdd_md.integrators.state import SimulationState

FORMAT = "nvdd_md checkpoint"
VERSION = 1
BLOCK_BYTES = 512
"""The smallest user block that HDF5 knows."""

_MAGIC = b"nvdd_md checkpoint\n"
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"

Array = npt.NDArray[np.generic]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """A file is no checkpoint, or not a whole one."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint says.

    Attributes
    ----------
    step : int
        Absolute step.
    state : SimulationState
    job : dict
        What the job keeps of itself: JSON-able.
    """

    step: int
    state: SimulationState
    job: dict[str, object]


def encode(content: Content) -> memoryview:
    """Return the bytes of a checkpoint file.

    Raises
    ------
    CheckpointError
        If something in it cannot be kept: NaN, an object JSON does not know, an array of Python
        objects. Names the place.
    """
    state = content.state
    document = {
        "step": content.step,
        "scalars": _plain(state.scalars, "scalars"),
        "job": _plain(content.job, "job"),
        "arrays": list(state.arrays),
    }
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver="latest", userblock_size=BLOCK_BYTES) as file:
        file.attrs["format"] = FORMAT
        file.attrs["version"] = VERSION
        file.create_dataset("document", data=json.dumps(document))
        group = file.create_group("arrays")
        for name, array in state.arrays.items():
            _put_array(group, name, np.asarray(array))
    view = buffer.getbuffer()
    view[:BLOCK_BYTES] = _block(view)
    return view


def decode(data: bytes) -> Content:
    """Return the content of a checkpoint file.

    Parameters
    ----------
    data : bytes
        The whole file.

    Raises
    ------
    DamagedCheckpointError
        If it is no checkpoint, or not a whole one.
    CheckpointError
        If a newer version of this program wrote it.
    """
    check_whole(data)
    with h5py.File(io.BytesIO(data), "r") as file:
        if file.attrs.get("format") != FORMAT:
            raise DamagedCheckpointError(f"its HDF5 part has no attribute format = {FORMAT!r}")
        version = int(file.attrs["version"])
        if version > VERSION:
            raise CheckpointError(
                f"it has version {version} of the format, and this version of nvdd_md knows those "
                f"up to {VERSION}: continue the run with the nvdd_md that wrote it, or a newer one"
            )
        document = json.loads(file["document"].asstr()[()])
        group = file["arrays"]
        arrays = {name: _get_array(group[_encoded(name)]) for name in document["arrays"]}
    state = SimulationState(scalars=document["scalars"], arrays=arrays)
    return Content(document["step"], state, document["job"])


def check_whole(data: bytes) -> None:
    """Check that ``data`` is a checkpoint file as it was written, bit for bit.

    Raises
    ------
    DamagedCheckpointError
        Says what is wrong.
    """
    if not data:
        raise DamagedCheckpointError("it is empty")
    if not data.startswith(_MAGIC):
        foreign = data.startswith(_HDF5_MAGIC)
        what = "it is an HDF5 file of something else" if foreign else "it is no checkpoint"
        raise DamagedCheckpointError(f"{what}: it does not begin with {_MAGIC.decode().strip()!r}")
    told = re.search(rb"^bytes (\d+)$", data[:BLOCK_BYTES], re.MULTILINE)
    if told is None or int(told[1]) != len(data):
        size = "an unknown number" if told is None else told[1].decode()
        raise DamagedCheckpointError(f"it has {len(data)} bytes of {size}")
    if data[:BLOCK_BYTES] != _block(memoryview(data)):
        raise DamagedCheckpointError("its content does not agree with its checksum")


def _block(view: memoryview) -> bytes:
    """Return the user block for a file. See Note [Checkpoint file]."""
    digest = hashlib.blake2b(view[BLOCK_BYTES:], digest_size=32).hexdigest()
    text = f"blake2b {digest}\nbytes {len(view)}\n"
    return (_MAGIC + text.encode()).ljust(BLOCK_BYTES, b"\n")


def _put_array(group: h5py.Group, name: str, array: Array) -> None:
    """Write one array."""
    if not name:
        raise CheckpointError("an array has an empty name, which HDF5 does not know")
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        group.create_dataset(_encoded(name), data=array)
        return
    if array.dtype.hasobject:
        raise CheckpointError(
            f"the array {name!r} holds Python objects (dtype {array.dtype}), which a checkpoint "
            "does not keep; give it a dtype of numbers or texts"
        )
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    dataset = group.create_dataset(_encoded(name), data=np.frombuffer(buffer.getbuffer(), np.uint8))
    dataset.attrs["encoding"] = "npy"


def _get_array(dataset: h5py.Dataset) -> Array:
    """Read one array."""
    values = np.asarray(dataset[()], dtype=dataset.dtype)
    if dataset.attrs.get("encoding") != "npy":
        return values
    return np.lib.format.read_array(io.BytesIO(values.tobytes()), allow_pickle=False)


def _encoded(name: str) -> str:
    """Return the name of an array without what has a meaning to HDF5: slashes and dots."""
    return quote(name, safe="").replace(".", "%2E")


def _plain(value: object, where: str) -> object:
    """Return ``value`` as JSON gives it back, except that tuples become lists.

    Infinite floats pass, as Python writes and reads them. NaN does not: it is equal to nothing,
    and a state that has one is not worth keeping.
    """
    if isinstance(value, float) and math.isnan(value):
        raise CheckpointError(f"{where} is NaN, which a checkpoint does not keep")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    what = "with keys that are no texts" if isinstance(value, Mapping) else repr(value)
    raise CheckpointError(
        f"{where} is a {type(value).__name__} {what}, which JSON does not know; convert it first"
    )
