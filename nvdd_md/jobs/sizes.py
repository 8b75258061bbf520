"""Sizes of files for people."""

from __future__ import annotations

__all__ = ["bytes_text"]


def bytes_text(n_bytes: float) -> str:
    """Return a number of bytes with three digits and a unit: ``1.25 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000.0
    return f"{n_bytes:.3g} TB"
