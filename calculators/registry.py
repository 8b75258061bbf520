"""Potentials by name, for scripts, job files and the command line alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from os.path import expanduser

import torch

from nvdd_md.calculators.lennard_jones import LennardJones
from nvdd_md.calculators.mace import MACE
from nvdd_md.calculators.sevennet import SevenNet
from nvdd_md.calculators.two_hop import TwoHop
from nvdd_md.comm import as_communicator
from nvdd_md.potential import Potential

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Family:
    """How the potentials of one family are made.

    Attributes
    ----------
    make : callable
        Its keywords are the options. Imports the family's package when it is called, not before.
    example : str
        A model of the family, in a form that :func:`load_potential` accepts. If one is given, then
        ``make`` takes a model first, and the communicator as ``comm``.
    """

    make: Callable[..., Potential]
    example: str = ""


FAMILIES: Mapping[str, Family] = {
    "lennard-jones": Family(LennardJones),
    "mace": Family(MACE, "model.pt"),
    "sevennet": Family(SevenNet, "7net-0"),
    "two-hop": Family(TwoHop),
}


def load_potential(spec: str, comm: object = None, **options: object) -> Potential:
    """Return a potential by its name, such as "sevennet:7net-0". **Collective**.

    A model file is read by rank 0 only, and sent to the others.

    Parameters
    ----------
    spec : str
        ``family:model`` for families with models: "mace:model.pt", "sevennet:7net-0",
        "sevennet:~/checkpoint.pth" (``~`` is the home folder). The family alone for others:
        "lennard-jones", "two-hop".
    comm : mpi4py communicator, torch.distributed process group, Communicator or None
        The ranks that load it. None: all ranks of the job.
    **options
        Keywords of the family's class. A dtype may be a string, "float32" or "float64".

    Raises
    ------
    ValueError
        If there is no such family, its model is missing or superfluous, a dtype is unknown, or
        the class refuses an option's value. As ``DisagreementError`` if the ranks load different
        models (what differs in the options, the calculator finds).
    TypeError
        If ``spec`` is no text, or the family has no such option.
    ImportError
        If the family's package is missing.
    OSError
        If a model file cannot be read: the error of rank 0, on all ranks.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a potential is named by a text such as 'mace:model.pt', got {spec!r}")
    name, colon, model = spec.partition(":")
    if name not in FAMILIES:
        raise ValueError(
            f"there is no family of potentials {name!r}{_nearest(name.lower(), FAMILIES)}; "
            f"known are {list(FAMILIES)}, as in 'sevennet:7net-0' or 'two-hop'"
        )
    family = FAMILIES[name]
    if family.example and not model:
        raise ValueError(
            f"{spec!r} does not say which model: write '{name}:MODEL', as in "
            f"'{name}:{family.example}'"
        )
    if colon and not family.example:
        raise ValueError(f"{name!r} has no models to choose from: write {name!r}, not {spec!r}")
    given = _checked(name, family, options)
    if not family.example:
        return family.make(**given)
    return family.make(expanduser(model), comm=as_communicator(comm), **given)


def _checked(name: str, family: Family, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options as the class takes them."""
    parameters = list(inspect.signature(family.make).parameters)
    valid = [p for p in parameters[bool(family.example) :] if p != "comm"]
    for option in options:
        if option not in valid:
            raise TypeError(
                f"{name!r} has no option {option!r}{_nearest(option, valid)}; it has {valid}"
            )
    given = dict(options)
    dtype = given.get("dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype!r}")
        given["dtype"] = DTYPES[str(dtype)]
    return given


def _nearest(word: str, known: Collection[str]) -> str:
    """Return a question with the known word most like ``word``, if one is like it."""
    matches = get_close_matches(word, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
