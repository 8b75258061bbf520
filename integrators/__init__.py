"""Equations of motion, one algorithm per file.

The folder stands at the top of the repository and is imported as ``nvdd_md.integrators``.
"""

if not __name__.startswith("nvdd_md."):
    raise ImportError(
        f"this package was imported as {__name__!r}; use 'import nvdd_md.integrators' instead. "
        "The folder at the top of the repository is part of nvdd_md and is not a package of its "
        "own: under a second name its classes would exist twice."
    )
