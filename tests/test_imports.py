"""The import graph of the package: which module may know which."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom to the top. A module may import from its own layer and from those below.
LAYERS = (
    {"comm", "version"},
    {"output", "phase_times"},
    {"domain"},
    {"system", "context", "policies", "helpers", "adapters", "potential", "shard"},
    {"agreement", "departure", "watchdog"},
    {"compile", "construction", "engine", "evaluation", "report", "results"},
    {"calculators", "integrators"},
    {"jobs"},
    {"cli", "__main__"},
    {"__init__"},
)
MESSAGE_PASSING = ("mpi4py", "torch.distributed")


def module_files() -> dict[str, Path]:
    """Return the name and the file of every module, through the links as Python sees them."""
    files = [
        path
        for top in ("nvdd_md", "calculators", "integrators")
        for path in (ROOT / top).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    names = {}
    for path in sorted(files):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "nvdd_md":
            parts = ("nvdd_md", *parts)
        names[".".join(parts)] = path
    return names


FILES = module_files()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}


def place_of(module: str) -> str:
    """Return the part of the package that a module belongs to, as `LAYERS` names it."""
    return module.split(".")[1]


def layer_of(module: str) -> int:
    layers = (n for n, places in enumerate(LAYERS) if place_of(module) in places)
    return next(layers, len(LAYERS))


def resolve(name: str) -> str | None:
    """Return the module of this package that an imported dotted name means, or None."""
    if name != "nvdd_md" and not name.startswith("nvdd_md."):
        return None
    while name:
        for module in (name, f"{name}.__init__"):
            if module in FILES:
                return module
        name = name.rpartition(".")[0]
    raise AssertionError("the package itself is missing")


def imported_names(node: ast.AST) -> list[str]:
    """Return the dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each import from this package."""
    for node in ast.walk(tree):
        for name in imported_names(node):
            target = resolve(name)
            if target is not None and target != module:
                yield node.lineno, target


def is_under(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_every_module_has_a_layer():
    known = set().union(*LAYERS)
    unknown = sorted(module for module in FILES if place_of(module) not in known)
    assert not unknown, f"give these a place in LAYERS of {Path(__file__).name}: {unknown}"


def test_no_import_goes_up():
    upward = [
        f"{FILES[module]}:{line}: {place_of(module)} imports {target}"
        for module in FILES
        for line, target in imports(TREES[module], module)
        if layer_of(target) > layer_of(module)
    ]
    assert not upward, "\n".join(upward)


class WithoutTypeChecking(ast.NodeTransformer):
    """Removes what only a type checker imports."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return node.orelse
        return node


def test_no_import_cycle():
    graph = {}
    for module, path in FILES.items():
        tree = WithoutTypeChecking().visit(ast.parse(path.read_text()))
        graph[module] = {target for _, target in imports(tree, module)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_imports_are_absolute():
    relative = [
        f"{FILES[module]}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not relative, "\n".join(relative)


def may_import_late(module: str, name: str) -> bool:
    """Tell whether a function of `module` may import `name`.

    A wrapper file imports the optional package of its model family; `comm` loads the library
    it was asked for, and its own backends on top of it.
    """
    if place_of(module) == "calculators":
        return resolve(name) is None
    if place_of(module) == "comm":
        return is_under(name, (*MESSAGE_PASSING, "nvdd_md.comm", "ase.parallel"))
    return False


def test_no_import_inside_a_function():
    late = {
        f"{FILES[module]}:{node.lineno}: {name}"
        for module, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for name in imported_names(node)
        if not may_import_late(module, name)
    }
    assert not late, "\n".join(sorted(late))


def dotted(node: ast.Attribute) -> str:
    """Return ``a.b.c`` for an expression of that form."""
    return ast.unparse(node)


def test_only_comm_passes_messages():
    outside = {
        f"{FILES[module]}:{node.lineno}: {name}"
        for module, tree in TREES.items()
        if place_of(module) != "comm"
        for node in ast.walk(tree)
        for name in [
            *imported_names(node),
            *([dotted(node)] if isinstance(node, ast.Attribute) else []),
        ]
        if is_under(name, MESSAGE_PASSING)
    }
    assert not outside, "\n".join(sorted(outside))
