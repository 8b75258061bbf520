"""Reach into a third-party model for one forward: replace methods, restore them on exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps

Replacement = Callable[..., object]
"""``replacement(original, instance, *args, **kwargs)``."""

_MISSING = object()


@dataclass(frozen=True)
class MethodAdapter:
    """Replaces one method of one class while a distributed forward runs.

    Attributes
    ----------
    cls : type
    name : str
        The method; it must exist.
    replacement : callable
        Called as ``replacement(original, instance, *args, **kwargs)``.
    """

    cls: type
    name: str
    replacement: Replacement


@contextmanager
def installed(adapters: Sequence[MethodAdapter]) -> Iterator[None]:
    """Install ``adapters`` inside the ``with`` block, and restore the classes afterwards.

    Restored in reverse order, also after an exception; blocks may be nested. The originals are
    looked up before anything is installed, so that a subclass inherits no replacement made here;
    several adapters for the same method of the same class wrap each other, the last one outside.

    Raises
    ------
    AttributeError
        If a class lacks a method; nothing stays installed then.
    """
    undo: list[tuple[type, str, object]] = []
    try:
        for adapter, method in zip(adapters, _replacements(adapters), strict=True):
            before = adapter.cls.__dict__.get(adapter.name, _MISSING)
            setattr(adapter.cls, adapter.name, method)
            undo.append((adapter.cls, adapter.name, before))
        yield
    finally:
        for cls, name, before in reversed(undo):
            if before is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


def _replacements(adapters: Sequence[MethodAdapter]) -> list[Callable[..., object]]:
    """Return the method to install for each adapter."""
    latest: dict[tuple[type, str], Callable[..., object]] = {}
    methods = []
    for adapter in adapters:
        key = (adapter.cls, adapter.name)
        latest[key] = _replaced(adapter, latest.get(key, getattr(*key, None)))
        methods.append(latest[key])
    return methods


def _replaced(adapter: MethodAdapter, original: object) -> Callable[..., object]:
    if not callable(original):
        raise AttributeError(
            f"cannot adapt {adapter.cls.__module__}.{adapter.cls.__qualname__}.{adapter.name}: "
            "there is no such method; is this version of the package supported?"
        )

    @wraps(original)
    def method(instance: object, *args: object, **kwargs: object) -> object:
        return adapter.replacement(original, instance, *args, **kwargs)

    return method
