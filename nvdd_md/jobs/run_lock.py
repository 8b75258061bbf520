"""One job at a time in a folder.

Note [Run lock]: the lock is a file that says which process holds it, made with ``O_EXCL``: locks
of the kernel (``flock``) are missing or end at the node on many parallel file systems. A job that
is killed leaves its file behind, and after the loss of a node nobody can ask that node. So the
holder touches the file every few seconds. Who finds a file asks the kernel if the holder was on
this host: then the answer is there at once, and certain, since the start of a process tells it
from a later one with the same number. Otherwise it watches the file for a while: if nobody touches
it, the holder is dead, and the lock is taken over. No clocks of two machines are compared. A holder
that was only suspended, and had its lock taken over, finds out in :meth:`RunLock.check`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from nvdd_md.jobs.process_start import start_ticks

LOCK_NAME = "run.lock"
BEAT_S = 5.0
WATCH_S = 30.0
"""Six missed beats in a row: file servers may stop for seconds."""

SETTLE_S = 0.2
"""After that long the last of several that took over a lock at the same time is in the file."""

_log = logging.getLogger(__name__)


class RunLockError(RuntimeError):
    """Another job runs in the folder."""


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names.

    ``boot`` and ``pid_namespace`` tell where ``pid`` and ``start_ticks`` have a meaning.
    """

    host: str
    boot: str | None
    pid_namespace: str | None
    pid: int
    start_ticks: int | None
    since: str
    slurm_job: str | None
    token: str

    @classmethod
    def here(cls) -> Holder:
        """Return this process, with a token of its own for each lock."""
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            slurm_job=os.environ.get("SLURM_JOB_ID"),
            token=uuid.uuid4().hex,
        )

    @classmethod
    def named_in(cls, content: bytes) -> Holder | None:
        """Read a lock file; None if it is not (yet) complete."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None

    def lives(self) -> bool | None:
        """Return whether the process exists; None if that cannot be asked here."""
        here = _boot(), _pid_namespace()
        if None in here or (self.boot, self.pid_namespace) != here or self.start_ticks is None:
            return None
        return start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        job = "" if self.slurm_job is None else f", Slurm job {self.slurm_job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


@dataclass(frozen=True)
class _Sight:
    """A lock file as it was seen: another sight of the same file shows whether its holder lives."""

    content: bytes
    touched_ns: int


def is_held(folder: str | os.PathLike[str]) -> bool:
    """Return whether a job may be at work in a folder: nothing says that the holder is dead."""
    try:
        holder = Holder.named_in((Path(folder) / LOCK_NAME).read_bytes())
    except OSError:
        return False
    return holder is None or holder.lives() is not False


class RunLock:
    """Keeps other jobs out of a folder, as a context manager. See Note [Run lock].

    On rank 0 only; does not communicate.

    Parameters
    ----------
    folder : str or path
        Made if it is missing. The lock is the file ``run.lock`` in it.
    beat_s : float
        How often the holder touches the file, s.
    watch_s : float
        How long the file of a holder on another host is watched, s.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, beat_s: float = BEAT_S, watch_s: float = WATCH_S
    ) -> None:
        self.path = Path(folder) / LOCK_NAME
        self._beat_s, self._watch_s = beat_s, watch_s
        self._content = b""
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or that of a process that is dead.

        Takes up to ``watch_s`` where that process was on another host.

        Raises
        ------
        RunLockError
            If another job runs in the folder; if the file cannot be written.
        """
        self._content = json.dumps(asdict(Holder.here()), indent=1).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create(self.path):
                seen = self._look()
                if seen is not None:
                    self._take_over(seen)
                    break
        except OSError as error:
            raise RunLockError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._ended.clear()
        self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Give the lock back; nothing if it is not held, or not any more."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
            self._beating = None
            if self._is_held():
                self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that the lock is still held: before files are changed that others may now write.

        Raises
        ------
        RunLockError
            If the file was removed, or another job has taken it over.
        """
        if not self._is_held():
            seen = self._look()
            holder = None if seen is None else Holder.named_in(seen.content)
            what = "the file was removed" if holder is None else f"{holder} holds it"
            raise RunLockError(
                f"this job has lost its lock {self.path}: {what}. It stops here, so that two jobs "
                "do not write to the same folder"
            )

    def _create(self, path: Path) -> bool:
        """Make the file; False if there is one."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _look(self) -> _Sight | None:
        """Return what the file is like now; None if there is none."""
        try:
            with self.path.open("rb") as file:  # opening lets NFS ask the server
                return _Sight(file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return None

    def _is_held(self) -> bool:
        seen = self._look()
        return seen is not None and seen.content == self._content

    def _take_over(self, seen: _Sight) -> None:
        """Put this process into the file of a dead one."""
        holder = Holder.named_in(seen.content)
        lives = None if holder is None else holder.lives()
        if lives is None:
            lives = self._is_touched(seen, holder)
        if lives:
            raise self._refusal(holder)
        # Of several that do this at the same time on one host, the kernel chooses; of those on
        # different hosts too, where the file system can lock; else the last one stays.
        with self.path.open("r+b") as file:
            if not _locks(file) or self._look() != seen:
                raise self._refusal(holder)
            _log.warning("taking over the lock %s of a job that has ended: %s", self.path, holder)
            mine = self.path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
            self._create(mine)
            os.replace(mine, self.path)
        time.sleep(SETTLE_S)
        self.check()

    def _refusal(self, holder: Holder | None) -> RunLockError:
        """Return the error for a folder in which another job runs."""
        return RunLockError(
            f"another job runs in {self.path.parent}: {holder or 'it has just started'}. Two jobs "
            "must not write to the same folder. If you know that there is no such job, remove "
            f"{self.path}"
        )

    def _is_touched(self, seen: _Sight, holder: Holder | None) -> bool:
        """Watch the file; True as soon as it changes, also by going away."""
        _log.warning(
            "%s is there (%s): watching for up to %g s whether that job is alive",
            self.path,
            holder or "not complete",
            self._watch_s,
        )
        end = time.monotonic() + self._watch_s
        while time.monotonic() < end:
            time.sleep(min(1.0, 0.1 * self._watch_s))
            if self._look() != seen:
                return True
        return False

    def _beat(self) -> None:
        """Touch the file until the end; the thread of this object."""
        while not self._ended.wait(self._beat_s):
            try:
                if not self._is_held():
                    _log.error("this job has lost its lock %s", self.path)
                    return
                os.utime(self.path)
            except OSError as error:
                _log.warning("cannot touch %s: %s", self.path, error)


def _locks(file: BinaryIO) -> bool:
    """Lock an open file until it is closed; False if somebody else has. True also if none can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.info("the file system cannot lock %s: %s", file.name, error)
    return True


def _boot() -> str | None:
    """Return a name of this host since it was booted."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else None


def _pid_namespace() -> str | None:
    """Return where process numbers of this process are valid: containers have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
