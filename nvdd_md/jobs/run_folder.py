"""The folder of one run: what is in it, and how far the run has come."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvdd_md.jobs.checkpoint import write_durably
from nvdd_md.jobs.input import read_job, read_resolved
from nvdd_md.jobs.job import Job

__all__ = ["FAILED", "FINISHED", "RUNNING", "STARTING", "STOPPED", "RunFolder", "RunFolderError"]

STARTING, RUNNING, STOPPED, FINISHED, FAILED = (
    "starting",
    "running",
    "stopped",
    "finished",
    "failed",
)
"""What ``state`` in the status file says. What a run has written that was only starting is worth
nothing."""


class RunFolderError(RuntimeError):
    """A folder is not that of a run, or one of its files cannot be read."""


class RunFolder:
    """Names of the files of a run, and what the small ones among them say. For rank 0 only.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.thermo = self.path / "thermo.csv"
        self.resolved = self.path / "resolved.json"
        self.status = self.path / "status.json"
        self.report = self.path / "report.json"
        self.stop = self.path / "STOP"

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return a folder, or that of the run that a job file describes.

        Raises
        ------
        JobInputError
            If a job file is wrong.
        """
        path = Path(path)
        return cls(read_job(path).folder if path.is_file() else path)

    def make(self) -> None:
        """Make the folder.

        Raises
        ------
        RunFolderError
            If something else has its name, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "a file has its name" if self.path.is_file() else error.strerror or error
            raise RunFolderError(f"the folder {self.path} cannot be made: {reason}") from error

    def write(self, file: Path, values: Mapping[str, object]) -> None:
        """Replace a JSON file of this folder as a whole.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        write_durably(file, (json.dumps(values, indent=1) + "\n").encode())

    def read_job(self) -> Job:
        """Return the job, with all defaults filled in, as it was last started.

        Raises
        ------
        RunFolderError
            If there is none.
        """
        return read_resolved(self._read(self.resolved))

    def read_status(self) -> dict[str, Any]:
        """Return state, step and reason; empty if the run has not begun."""
        return self._read(self.status) if self.status.is_file() else {}

    def read_report(self) -> dict[str, Any] | None:
        """Return where the time went, None if no run has come to its end here."""
        return self._read(self.report) if self.report.is_file() else None

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            values = json.loads(file.read_text())
        except OSError as error:
            raise RunFolderError(
                f"{self.path} is not the folder of a run: {file.name} cannot be read "
                f"({error.strerror or error})"
            ) from error
        except ValueError as error:
            raise RunFolderError(f"{file} is damaged: {error}") from error
        if not isinstance(values, dict):
            raise RunFolderError(f"{file} is damaged: it holds no table")
        return values
