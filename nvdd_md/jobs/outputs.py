"""The outputs of one run: its log and its trajectories, and when each of them is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from nvdd_md.jobs import trajectory_ase, trajectory_extxyz, trajectory_h5md
from nvdd_md.jobs.appended_file import OutputError, Position, refuse_existing
from nvdd_md.jobs.frame import Frame
from nvdd_md.jobs.thermo_log import ThermoLog
from nvdd_md.jobs.trajectory_ase import AseTrajectory
from nvdd_md.jobs.trajectory_extxyz import ExtxyzTrajectory
from nvdd_md.jobs.trajectory_h5md import H5mdTrajectory

__all__ = ["Output", "OutputError", "RunOutputs", "Scheduled", "ThermoLog", "make_trajectory"]


class Output(Protocol):
    """Something that frames are written to, on rank 0.

    After :meth:`sync` everything is on the disk, and the position that it returns is all that is
    needed to come back to this state, whatever happens in between.
    """

    path: Path
    needs: frozenset[str]
    """Names of the per-atom fields that a frame must have for it."""

    def existing(self) -> list[Path]:
        """Return the files with results in them that a fresh run would replace."""

    def check(self, position: Mapping[str, object]) -> None:
        """Raise OutputError if there is no going on from a position; change nothing."""

    def open(self, position: Mapping[str, object] | None, overwrite: bool = False) -> None:
        """Begin (position None), or come back to the state at a position."""

    def write(self, frame: Frame) -> None:
        """Add a frame."""

    def sync(self) -> Position:
        """Bring all frames to the disk and return where the output stands."""

    def close(self) -> None:
        """Close the files."""

    def finish(self) -> None:
        """Do what remains at the end of a run."""


def make_trajectory(
    path: Path,
    fields: Iterable[str] = (),
    precision: Literal["float32", "float64"] = "float64",
) -> Output:
    """Return the trajectory that the suffix of a file name asks for.

    Parameters
    ----------
    path : Path
    fields : iterable of str
        Per-atom fields besides the positions.
    precision : {"float64", "float32"}
        Of per-atom fields. In HDF5 their type; in extended XYZ the number of digits, enough to give
        back every bit; ``.traj`` is always float64.

    Raises
    ------
    ValueError
        If the suffix is not known, or the format cannot hold a field or a precision.
    """
    if path.suffix == trajectory_ase.SUFFIX:
        return AseTrajectory(path, fields, precision)
    if path.suffix in trajectory_extxyz.SUFFIXES:
        return ExtxyzTrajectory(path, fields, precision)
    if path.suffix in trajectory_h5md.SUFFIXES:
        return H5mdTrajectory(path, fields, precision)
    known = (trajectory_ase.SUFFIX, *trajectory_extxyz.SUFFIXES, *trajectory_h5md.SUFFIXES)
    raise ValueError(f"{path.name}: the format is known by one of the suffixes {', '.join(known)}")


@dataclass(frozen=True)
class Scheduled:
    """An output and its cadence.

    Attributes
    ----------
    output : Output
    every : int
        It gets the frames of the steps that this divides, step 0 among them.
    """

    output: Output
    every: int


class RunOutputs:
    """All outputs of a run. Exists on rank 0 only; the names of files must differ.

    Frames come once each: a step up to which an output has been written is not due again, and
    steps only grow.

    Parameters
    ----------
    scheduled : sequence of Scheduled

    Raises
    ------
    ValueError
        If two outputs have the same file name, or a cadence is not positive.
    """

    def __init__(self, scheduled: Sequence[Scheduled]) -> None:
        names = [one.output.path.name for one in scheduled]
        if len(set(names)) < len(names):
            raise ValueError(f"outputs must have different file names, got {names}")
        if any(one.every < 1 for one in scheduled):
            raise ValueError(f"outputs are written every n >= 1 steps, got {scheduled}")
        self._outputs = dict(zip(names, scheduled, strict=True))
        self._last_step = dict.fromkeys(names, -1)

    def existing(self) -> list[Path]:
        """Return the files with results in them that a fresh run would replace."""
        return [path for one in self._outputs.values() for path in one.output.existing()]

    def check(self, positions: Mapping[str, object]) -> None:
        """Find out whether all outputs can go on from their positions; change nothing.

        An output without a position begins anew; a position without an output is not looked at.

        Raises
        ------
        OutputError
            If one cannot.
        """
        for name, one in self._outputs.items():
            position, _ = self._entry(positions, name)
            if position is not None:
                one.output.check(position)

    def open(self, positions: Mapping[str, object] | None, overwrite: bool = False) -> None:
        """Begin all outputs, or bring them back to their state at a checkpoint.

        Nothing is cut off before all have been checked.

        Parameters
        ----------
        positions : mapping or None
            What :meth:`sync` returned; None for a fresh run.
        overwrite : bool
            Whether outputs that begin anew may replace what is there.

        Raises
        ------
        OutputError
            If one cannot go on, or would replace something.
        """
        positions = positions or {}
        self.check(positions)
        fresh = [one for name, one in self._outputs.items() if name not in positions]
        refuse_existing([path for one in fresh for path in one.output.existing()], overwrite)
        try:
            for name, one in self._outputs.items():
                position, self._last_step[name] = self._entry(positions, name)
                one.output.open(position, overwrite)
        except BaseException:
            self.close()
            raise

    def due(self, step: int) -> list[Output]:
        """Return the outputs that get a frame of a step."""
        return [
            one.output
            for name, one in self._outputs.items()
            if step % one.every == 0 and step > self._last_step[name]
        ]

    def fields(self, step: int) -> frozenset[str] | None:
        """Return the per-atom fields that a frame of a step must have.

        None if no frame is due; empty if only the log is, which needs no atoms.
        """
        due = self.due(step)
        return frozenset().union(*(output.needs for output in due)) if due else None

    def write(self, frame: Frame) -> None:
        """Write a frame to the outputs that are due at its step.

        Raises
        ------
        OSError
            With the path in it, if one cannot be written.
        OutputError
            If an output cannot hold the frame, or is not open.
        """
        step = frame.thermo.step
        for output in self.due(step):
            output.write(frame)
            self._last_step[output.path.name] = step

    def sync(self) -> dict[str, object]:
        """Bring everything to the disk.

        Returns
        -------
        dict
            Where the outputs stand; JSON-able, for the checkpoint.

        Raises
        ------
        OSError
            With the path in it, if one cannot be brought to the disk.
        OutputError
            If an output is not open.
        """
        return {
            name: {"last_step": self._last_step[name], "position": one.output.sync()}
            for name, one in self._outputs.items()
        }

    def close(self) -> None:
        """Close all files."""
        for one in self._outputs.values():
            one.output.close()

    def finish(self) -> None:
        """Do what remains at the end of a run, after the last :meth:`sync`: see the outputs."""
        for one in self._outputs.values():
            one.output.finish()

    def _entry(
        self, positions: Mapping[str, object], name: str
    ) -> tuple[Mapping[str, object] | None, int]:
        """Return the position of an output, None if there is none, and its last step."""
        if name not in positions:
            return None, -1
        found = positions[name]
        match found:
            case {"position": Mapping() as position, "last_step": int(last_step)}:
                return position, last_step
        raise OutputError(f"the checkpoint does not say where {name} stood: {found}")
