"""The tables of a job file. Each key has its unit in its name, and its range in its description.

Types are strict: a text is no number, and neither is ``true``. An error message says what was
expected in the words of the field's description.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from ase.io.formats import ioformats
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_validator

from nvdd_md.jobs.input_errors import did_you_mean

__all__ = [
    "ARRAYS_OF_TABLES",
    "NAMED_FIELDS",
    "TABLES",
    "THERMOSTATS",
    "TRAJECTORY_SUFFIXES",
    "Checkpoint",
    "Dynamics",
    "Langevin",
    "Limits",
    "NoThermostat",
    "NoseHooverChain",
    "Output",
    "Potential",
    "Ramp",
    "Stage",
    "Structure",
    "Table",
    "Thermostat",
    "Trajectory",
    "Velocities",
    "VelocityRescaling",
]

NAMED_FIELDS = ("velocities", "momenta", "forces", "energies", "masses")
"""Per-atom fields that every run can write; besides them, arrays of the structure."""

TRAJECTORY_SUFFIXES = (".traj", ".xyz", ".extxyz", ".h5", ".h5md")

MAX_TIMESTEP_FS = 20.0


class Table(BaseModel):
    """One table: no unknown keys, strict types, finite numbers, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0.0)]
PositiveTemperature = Annotated[float, Field(gt=0.0)]
Positive = Annotated[float, Field(gt=0.0)]


def _array(description: str) -> object:
    """Return a field that takes TOML's arrays for tuples."""
    return Field(strict=False, description=description)


class Structure(Table):
    """Where the atoms come from."""

    file: Text = Field(description="the name of a file that ASE can read")
    index: int = Field(-1, description="a whole number, the frame to take; -1 is the last")
    repeat: Annotated[
        tuple[Count, Count, Count], _array("three whole numbers >= 1, as in [2, 2, 1]")
    ] = (1, 1, 1)
    format: str | None = Field(None, description="a format of ASE, such as 'extxyz'")

    @field_validator("format")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in ioformats:
            raise ValueError(f"ASE has no format {name!r}{did_you_mean(name, ioformats)}")
        return name


class Potential(Table):
    """A potential of the registry.

    Attributes
    ----------
    name : str
        As :func:`nvdd_md.calculators.load_potential` takes it; a model file may be relative to the
        job file.
    options : mapping
        All options of the family, as a job file has them: a dtype is a text.
    """

    name: Text = Field(description="a text such as 'sevennet:7net-0'")
    options: Mapping[str, object] = Field(default_factory=dict, strict=False)


class Dynamics(Table):
    """What holds for all stages."""

    timestep_fs: Annotated[float, Field(gt=0.0, le=MAX_TIMESTEP_FS)] = Field(
        description=f"a number > 0 and <= {MAX_TIMESTEP_FS:g} (the unit is fs)"
    )
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = Field(
        None, description="a whole number >= 0 and < 2**64, the seed of all random numbers"
    )
    skin_A: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        0.5, description="a number >= 0 and <= 10 (the unit is Å)"
    )
    cut_axes: Annotated[
        tuple[Annotated[int, Field(ge=0, le=2)], ...],
        _array("an array of axes of the cell that may be cut, such as [0, 1, 2]"),
    ] = (0, 1, 2)
    device: str | None = Field(None, description="'cpu', 'cuda' or one GPU such as 'cuda:0'")

    @field_validator("cut_axes")
    @classmethod
    def _some_axes(cls, axes: tuple[int, ...]) -> tuple[int, ...]:
        if not axes or len(set(axes)) != len(axes):
            raise ValueError(f"expected at least one axis and none twice, found {list(axes)}")
        return axes

    @field_validator("device")
    @classmethod
    def _known(cls, device: str | None) -> str | None:
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            near = did_you_mean(device, ("cpu", "cuda"))
            raise ValueError(f"expected 'cpu', 'cuda' or 'cuda:0', found {device!r}{near}")
        return device


class Velocities(Table):
    """How velocities are drawn; those of the structure are kept unless ``replace`` is true.

    ``remove_rotation`` is None for "where no axis is periodic".
    """

    temperature_K: Temperature = Field(description="a number >= 0 (the unit is K)")
    replace: bool = Field(False, description="true or false: draw also where there are some")
    remove_momentum: bool = Field(True, description="true or false")
    remove_rotation: bool | None = Field(None, description="true or false")


class Ramp(Table):
    """A target that goes linearly from one value to another during its stage."""

    start: float = Field(description="a number, the target where the stage begins")
    end: float = Field(description="a number, the target where the stage ends")


class Thermostat(Table):
    """The thermostat of a stage.

    Attributes
    ----------
    kind : str
        What ``thermostat`` is in a job file.
    is_random : bool
        Whether it draws random numbers.
    """

    kind: ClassVar[str]
    is_random: ClassVar[bool] = False

    @property
    def targets(self) -> tuple[float | Ramp, ...]:
        """All that may change in the course of a stage."""
        return ()


_TEMPERATURE = "a number >= 0 (the unit is K) or a ramp such as { start = 100, end = 300 }"


class NoThermostat(Thermostat):
    """Newton's equations alone."""

    kind = "none"


class _WithTarget(Thermostat):
    """A thermostat with a temperature."""

    temperature_K: Temperature | Ramp = Field(description=_TEMPERATURE)

    @field_validator("temperature_K")
    @classmethod
    def _not_negative(cls, target: float | Ramp) -> float | Ramp:
        if isinstance(target, Ramp) and min(target.start, target.end) < 0.0:
            raise ValueError(
                "expected a start and an end >= 0 (the unit is K), "
                f"found {target.start:g} and {target.end:g}"
            )
        return target

    @property
    def targets(self) -> tuple[float | Ramp, ...]:
        return (self.temperature_K,)


class Langevin(_WithTarget):
    """Friction and noise on every atom."""

    kind = "langevin"
    is_random = True
    friction_per_ps: Annotated[float, Field(ge=0.0)] = Field(
        description="a number >= 0 (the unit is 1/ps)"
    )


class VelocityRescaling(_WithTarget):
    """Stochastic velocity rescaling."""

    kind = "velocity-rescaling"
    is_random = True
    damping_fs: Positive = Field(description="a number > 0 (the unit is fs)")


class NoseHooverChain(_WithTarget):
    """A chain of Nosé-Hoover thermostats."""

    kind = "nose-hoover-chain"
    temperature_K: Temperature | Ramp = Field(description=_TEMPERATURE.replace(">= 0", "> 0"))
    damping_fs: Positive = Field(description="a number > 0 (the unit is fs)")
    chain_length: Count = Field(3, description="a whole number >= 1")

    @field_validator("temperature_K")
    @classmethod
    def _above_zero(cls, target: float | Ramp) -> float | Ramp:
        ends = (target.start, target.end) if isinstance(target, Ramp) else (target,)
        if min(ends) == 0.0:
            raise ValueError(
                "a Nosé-Hoover chain needs a temperature > 0 (the unit is K): the masses of its "
                "links are in proportion to it"
            )
        return target


THERMOSTATS: Mapping[str, type[Thermostat]] = {
    thermostat.kind: thermostat
    for thermostat in (NoThermostat, Langevin, VelocityRescaling, NoseHooverChain)
}


class Stage(Table):
    """A number of steps under the same conditions.

    In a job file the thermostat is named by ``thermostat``, and its parameters stand beside it.
    """

    name: Text = Field(description="a text")
    steps: Annotated[int, Field(ge=0, lt=2**53)] = Field(
        description="a whole number >= 0, the length of the stage"
    )
    thermostat: SerializeAsAny[Thermostat] = NoThermostat()


class Output(Table):
    """Where the results go."""

    folder: Text = Field(description="the name of a folder")
    log_every_steps: Count = Field(100, description="a whole number >= 1")


class Trajectory(Table):
    """One trajectory; positions are always in it."""

    file: Text = Field(
        description=f"a file name that ends in one of {', '.join(TRAJECTORY_SUFFIXES)}"
    )
    every_steps: Count = Field(description="a whole number >= 1")
    fields: Annotated[
        tuple[Text, ...], _array("an array of texts, such as ['velocities', 'forces']")
    ] = ()
    precision: Literal["float32", "float64"] = Field(
        "float64", description="'float32' or 'float64'"
    )

    @field_validator("file")
    @classmethod
    def _plain_name(cls, file: str) -> str:
        if PurePath(file).name != file:
            raise ValueError(
                f"expected a file name without a folder (it stands in that of [output]), "
                f"found {file!r}"
            )
        if file == "export.xyz" or file.startswith("failed-step-"):
            raise ValueError(f"expected another file name: the program writes {file!r} itself")
        if PurePath(file).suffix not in TRAJECTORY_SUFFIXES:
            raise ValueError(
                f"expected a file name that ends in one of {', '.join(TRAJECTORY_SUFFIXES)}, "
                f"found {file!r}{did_you_mean(PurePath(file).suffix, TRAJECTORY_SUFFIXES)}"
            )
        return file

    @field_validator("fields")
    @classmethod
    def _sensible(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(fields)) != len(fields):
            raise ValueError(f"expected no field twice, found {list(fields)}")
        for name in ("numbers", "positions"):
            if name in fields:
                raise ValueError(f"leave out {name!r}, which every frame has")
        return fields


class Checkpoint(Table):
    """When the state is saved, besides at every stop."""

    every_steps: Count = Field(1000, description="a whole number >= 1")
    keep: Annotated[int, Field(ge=2)] = Field(
        3, description="a whole number >= 2, so that one is left when the newest is damaged"
    )


Limit = Literal["none"] | Positive


class Limits(Table):
    """When a job ends before its last step."""

    wall_time: str | None = Field(None, description="a text such as '23:50:00' or '2-12:00:00'")
    max_drift_eV_per_atom: Limit = Field(
        1.0, description="a number > 0 (the unit is eV per atom), or 'none'"
    )
    max_move_A: Limit = Field(1.0, description="a number > 0 (the unit is Å per step), or 'none'")

    @field_validator("wall_time")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None and _seconds(text) is None:
            raise ValueError(
                "expected HH:MM:SS or D-HH:MM:SS, such as '23:50:00' or '2-12:00:00', "
                f"found {text!r}"
            )
        return text

    @property
    def wall_time_s(self) -> float | None:
        """The wall time in seconds, None for no limit."""
        return None if self.wall_time is None else _seconds(self.wall_time)


TABLES: Mapping[str, type[Table]] = {
    "structure": Structure,
    "potential": Potential,
    "dynamics": Dynamics,
    "velocities": Velocities,
    "output": Output,
    "checkpoint": Checkpoint,
    "limits": Limits,
}
ARRAYS_OF_TABLES: Mapping[str, type[Table]] = {"stages": Stage, "trajectories": Trajectory}


def _seconds(text: str) -> float | None:
    """Return the seconds in ``D-HH:MM:SS`` or ``HH:MM:SS``, None where it is neither."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = 86400 * days + 3600 * hours + 60 * minutes + seconds
    return float(total) if total > 0 else None
