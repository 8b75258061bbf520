"""The options of each family of potentials, as keys of ``[potential]``.

They are the keywords of the family's class, with its types and defaults; the family's package is
not imported for that, and no model is read.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from inspect import Parameter, signature
from os.path import expanduser
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic import Field, create_model

from nvdd_md.calculators.registry import DTYPES, FAMILIES
from nvdd_md.jobs.input_errors import did_you_mean
from nvdd_md.jobs.input_models import Table

__all__ = ["name_problem", "options_table", "spec_for"]

_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}

# The job gives these itself: [dynamics] has the device.
_NOT_FOR_JOBS = ("comm", "device")


def name_problem(name: str) -> str:
    """Return what is wrong with the name of a potential, "" if nothing is.

    Whether there is such a model is known when it is loaded.
    """
    family, colon, model = name.partition(":")
    if family not in FAMILIES:
        known = list(FAMILIES)
        near = did_you_mean(family, known)
        return (
            f"expected one of {known}, as in 'sevennet:7net-0' or 'two-hop', found {name!r}{near}"
        )
    example = FAMILIES[family].example
    if example and not model:
        return f"expected a model, as in '{family}:{example}', found {name!r}"
    if colon and not example:
        return f"expected {family!r}, which has no models to choose from, found {name!r}"
    return ""


def model_file(name: str, folder: Path) -> Path | None:
    """Return the file that the name of a potential means, None where it means no file.

    Parameters
    ----------
    name : str
    folder : Path
        What a relative file is relative to.
    """
    family, _, model = name.partition(":")
    example = FAMILIES[family].example
    if not example:
        return None
    always_a_file = PurePath(example).suffix != ""
    if always_a_file or "/" in model or PurePath(model).suffix in (".pt", ".pth", ".model"):
        return folder / expanduser(model)
    return None


def spec_for(name: str, folder: Path) -> str:
    """Return the name with its model file in full, for ``load_potential``."""
    file = model_file(name, folder)
    return name if file is None else f"{name.partition(':')[0]}:{file}"


@cache
def options_table(family: str) -> type[Table]:
    """Return the table of the options that a family has, with types and defaults."""
    make = FAMILIES[family].make
    parameters = list(signature(make, eval_str=True).parameters.values())
    if FAMILIES[family].example:
        parameters = parameters[1:]
    fields: dict[str, Any] = {
        parameter.name: _field(parameter)
        for parameter in parameters
        if parameter.name not in _NOT_FOR_JOBS
    }
    table: type[Table] = create_model(f"Options of {family}", __base__=Table, **fields)
    return table


def _field(parameter: Parameter) -> tuple[Any, Any]:
    """Return the type and the field of one option."""
    default = ... if parameter.default is Parameter.empty else parameter.default
    if isinstance(default, torch.dtype):
        default = next(name for name, dtype in DTYPES.items() if dtype == default)
    hint = _in_toml(parameter.annotation)
    return hint, Field(default, description=_expected(hint))


def _in_toml(hint: object) -> object:
    """Return the type that stands for ``hint`` in a job file."""
    if hint is torch.dtype:
        return Literal["float32", "float64"]
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_in_toml(part) for part in get_args(hint))]  # noqa: UP007 - no |
    return hint


def _expected(hint: object) -> str:
    """Return a type in words."""
    if isinstance(hint, type) and hint in _WORDS:
        return _WORDS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(part) for part in arguments if part is not type(None))
    if origin is not None and issubclass(origin, Mapping):
        return f"a table with {_expected(arguments[1])} for each key"
    return f"an array, each entry {_expected(arguments[0])}"
