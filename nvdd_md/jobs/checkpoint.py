"""The folder of a job's checkpoints: the newest that is whole is where the job goes on.

All of this runs on rank 0 only and does not communicate. What a file contains is described in
:mod:`nvdd_md.jobs.checkpoint_format`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvdd_md.integrators.state import SimulationState
from nvdd_md.jobs.checkpoint_format import (
    CheckpointError,
    Content,
    DamagedCheckpointError,
    check_whole,
    decode,
    encode,
)

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore", "DamagedCheckpointError"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)\.h5")
_UNFINISHED = "step-*.h5.tmp"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read.

    Attributes
    ----------
    path : Path
    step : int
        Absolute step.
    state : SimulationState
    job : dict
        What the job keeps of itself.
    """

    path: Path
    step: int
    state: SimulationState
    job: dict[str, object]


class CheckpointStore:
    """The last few checkpoints of one job, ``step-000000012345.h5`` each.

    To make one changes nothing on the disk: a folder can be looked at while a job writes to it.
    Only one job may write to it, see :class:`nvdd_md.jobs.run_lock.RunLock`.

    Parameters
    ----------
    folder : str or path
        Made at the first :meth:`write`.
    keep : int
        How many checkpoints to keep.

    Raises
    ------
    ValueError
        If ``keep`` is less than one.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep={keep}")
        self.folder = Path(folder)
        self.keep = keep

    def paths(self) -> list[Path]:
        """Return the files of the checkpoints, the oldest first, whole or not."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)), key=_step_of)

    def write(self, step: int, state: SimulationState, job: Mapping[str, object]) -> Path:
        """Write a checkpoint, so that afterwards it is the newest whole one, and durably so.

        Whatever happens on the way, be it a full disk or the end of the process, the earlier
        checkpoints stay what they are; the oldest are removed only when the new one is on the
        disk.

        Parameters
        ----------
        step : int
            Absolute step. A checkpoint of the same step is replaced.
        state : SimulationState
        job : mapping of str to object
            JSON-able.

        Returns
        -------
        Path
            The new file.

        Raises
        ------
        CheckpointError
            If it cannot be written, with the reason; if something in it cannot be kept; if the
            folder has a whole checkpoint of a later step, which this one would make obsolete.
        ValueError
            For a negative step.
        """
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        content = encode(Content(step, state, dict(job)))
        path = self.folder / f"step-{step:012d}.h5"
        try:
            later = self._damaged_later_than(step)
            self._make_folder()
            self._remove(self.folder.glob(_UNFINISHED))
            write_durably(path, content)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {path}: {error.strerror or error}. Earlier "
                "checkpoints are as they were; the job can be resumed from them once this is solved"
            ) from error
        self._remove(later)
        self._remove(self.paths()[: -self.keep])
        return path

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, None where there are no checkpoints.

        A damaged one is left out with a logged warning.

        Raises
        ------
        CheckpointError
            If all are damaged, with the reason for each; if the newest whole one was written by a
            newer version of this program.
        """
        faults = []
        for path in reversed(self.paths()):
            try:
                checkpoint = self.load(path)
            except (DamagedCheckpointError, OSError) as error:
                if not os.path.lexists(path):  # the job that writes here has newer ones
                    return self.latest()
                faults.append(str(error))
                continue
            for fault in faults:
                _log.warning("%s; going back to step %d", fault, checkpoint.step)
            return checkpoint
        if not faults:
            return None
        raise CheckpointError(
            f"none of the checkpoints in {self.folder} can be used; to start again from the "
            "beginning, use --overwrite:\n  " + "\n  ".join(faults)
        )

    def load(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Read one checkpoint.

        Raises
        ------
        CheckpointError
            If it is not whole (:class:`DamagedCheckpointError`), or of a newer version; names the
            file and the reason.
        OSError
            If it cannot be read.
        """
        path = Path(path)
        try:
            content = decode(path.read_bytes())
        except CheckpointError as error:
            raise type(error)(f"the checkpoint {path} cannot be used: {error}") from error
        return Checkpoint(path, content.step, content.state, content.job)

    def clear(self) -> None:
        """Remove all checkpoints: the job starts again from the beginning."""
        self._remove([*self.paths(), *self.folder.glob(_UNFINISHED)])

    def _damaged_later_than(self, step: int) -> list[Path]:
        """Return the damaged checkpoints of later steps: this run did not go on from them.

        Raises
        ------
        CheckpointError
            If one is whole.
        """
        later = [path for path in self.paths() if _step_of(path) > step]
        for path in later:
            try:
                check_whole(path.read_bytes())
            except (DamagedCheckpointError, OSError):
                continue  # latest() has passed it over, with a warning
            raise CheckpointError(
                f"a checkpoint of step {step} would be behind {path}, which is whole: this run did "
                "not go on from it, so it belongs to another one; move it away, or use another "
                "folder"
            )
        return later

    def _make_folder(self) -> None:
        """Make the folder, and its entry in the folder above durable."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder.parent)

    def _remove(self, paths: Iterable[Path]) -> None:
        """Remove files that are of no use; one that resists costs room, but does no harm."""
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("cannot remove %s, which is not needed any more: %s", path, error)


def write_durably(path: Path, content: memoryview | bytes) -> None:
    """Write a file such that there is either the whole of it or what was there before.

    The content goes to a temporary file in the same folder, which is synced and renamed, and the
    folder is synced: afterwards not even a loss of power takes it away.

    Raises
    ------
    OSError
        If that fails; the temporary file is removed then.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        # One may be left of a process that was killed.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system knows how."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int:
    """Return the step in a file's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
