"""Which file of the project imports which other one, and where imports go in circles."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

LAYERS = ("kernels", "engine", "strategies", "batchgen")
"""The layers, from the one that imports none of the others to the one that imports them all."""

Graph = Mapping[Path, Iterable[Path]]
"""Each file, relative to the root, and the files that it imports; or rooms likewise."""


def package_files(root: Path, package: str) -> list[Path]:
    """The .py files of a package, relative to `root`.

    rglob does not follow links: `batchgen/engine` is a link to `engine`, whose files count there.
    """
    return sorted(path.relative_to(root) for path in (root / package).rglob("*.py"))


def module_name(file: Path) -> str:
    """The name that a file is imported by: engine/x.py is batchgen.engine.x."""
    parts = [part for part in file.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "batchgen" else ["batchgen", *parts])


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """The tree of a source file, which several tests walk and none changes."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def names_imported_by(path: Path, types: bool = True) -> tuple[str, ...]:
    """Every dotted name that a source file imports."""
    return tuple(imported_names(syntax_tree(path), types))


def imported_names(tree: ast.AST, types: bool = True) -> Iterator[str]:
    """Every dotted name that a syntax tree imports; `from a import b` yields a.b.

    Imports inside functions count, and with `types` also those under `if TYPE_CHECKING:`.
    """
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        assert not tree.level, "a relative import"
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    children = ast.iter_child_nodes(tree)
    if not types and isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        children = iter(tree.orelse)
    for child in children:
        yield from imported_names(child, types)


def import_graph(
    root: Path, packages: Iterable[str] = LAYERS, types: bool = True
) -> dict[Path, set[Path]]:
    """Which file of the packages imports which other of them.

    `from a import b` is an import of the module a.b if there is one, and of a otherwise. Python
    also runs the `__init__.py` of every package above a module; that does not count as an import.
    """
    files = [file for package in packages for file in package_files(root, package)]
    modules = {module_name(file): file for file in files}
    graph: dict[Path, set[Path]] = {}
    for file in files:
        names = names_imported_by(root / file, types)
        targets = (modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names)
        graph[file] = {target for target in targets if target is not None and target != file}
    return graph


def import_circles(graph: Graph) -> list[list[Path]]:
    """The strongly connected components: sets of files each of which imports all the others.

    An import through other files counts.
    """
    reached = {file: _reachable(graph, file) for file in graph}
    circles = {
        tuple(sorted(other for other in reached[file] if file in reached[other]))
        for file in graph
        if file in reached[file]
    }
    return sorted(list(circle) for circle in circles)


def _reachable(graph: Graph, start: Path) -> set[Path]:
    reached: set[Path] = set()
    ahead = list(graph[start])
    while ahead:
        file = ahead.pop()
        if file not in reached:
            reached.add(file)
            ahead.extend(graph[file])
    return reached
