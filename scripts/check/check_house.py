"""Measures the house: lines, files per folder, long files and functions, and import circles.

    python scripts/check/check_house.py [ROOT]

ROOT is the project's root; without it, the tree that this script stands in. The files are read as
text and nothing is imported, so any state of the project can be measured. Lines are lines of .py
files, comments and blank lines included; a function's lines run from `def` to its last line.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

PACKAGES = ("batchgen", "strategies", "engine", "kernels", "tests", "scripts")
LAYERS = PACKAGES[:4]
"""The packages whose imports are followed."""
_LONG_FILE = 300
_LONG_FUNCTION = 60

Graph = Mapping[Path, Iterable[Path]]
"""Each file, relative to the root, and the files that it imports."""


def package_files(root: Path, package: str) -> list[Path]:
    """The .py files of a package, relative to `root`.

    rglob does not follow links: `batchgen/engine` is a link to `engine`, whose files count there.
    """
    return sorted(path.relative_to(root) for path in (root / package).rglob("*.py"))


def module_name(file: Path) -> str:
    """The name that a file is imported by: engine/x.py is batchgen.engine.x."""
    parts = [part for part in file.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "batchgen" else ["batchgen", *parts])


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a syntax tree imports; `from a import b` yields a.b.

    Imports inside functions count. Those under `if TYPE_CHECKING:` do not, as they never run.
    """
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    children = ast.iter_child_nodes(tree)
    if isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        children = iter(tree.orelse)
    for child in children:
        yield from imported_names(child)


def import_graph(root: Path, packages: Iterable[str] = LAYERS) -> dict[Path, set[Path]]:
    """Which file of the packages imports which other of them.

    `from a import b` is an import of the module a.b if there is one, and of a otherwise. Python
    also runs the `__init__.py` of every package above a module; that does not count as an import.
    """
    files = [file for package in packages for file in package_files(root, package)]
    modules = {module_name(file): file for file in files}
    graph: dict[Path, set[Path]] = {}
    for file in files:
        names = imported_names(ast.parse((root / file).read_text()))
        targets = (modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names)
        graph[file] = {target for target in targets if target is not None}
    return graph


def import_circles(graph: Graph) -> list[list[Path]]:
    """The strongly connected components: sets of files each of which imports all the others.

    An import through other files counts. A file that imports itself is a circle of one.
    """
    reached = {file: _reachable(graph, file) for file in graph}
    circles = {
        tuple(sorted(other for other in reached[file] if file in reached[other]))
        for file in graph
        if file in reached[file]
    }
    return sorted(list(circle) for circle in circles)


def _reachable(graph: Graph, start: Path) -> set[Path]:
    found: set[Path] = set()
    ahead = list(graph[start])
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead.extend(graph[file])
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """(dotted name, first line, number of lines) of every function, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                yield inner[:-1], node.lineno, node.end_lineno - node.lineno + 1
        yield from functions(node, inner)


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def print_packages(root: Path) -> None:
    print("package       files   lines  median  longest")
    total = Counter[str]()
    for package in PACKAGES:
        lines = {file: line_count(root / file) for file in package_files(root, package)}
        total += Counter(files=len(lines), lines=sum(lines.values()))
        longest = max(lines, key=lines.__getitem__)
        print(
            f"{package:12} {len(lines):6} {sum(lines.values()):7} {median(lines.values()):7.0f}"
            f"  {lines[longest]} {longest}"
        )
    print(f"{'all':12} {total['files']:6} {total['lines']:7}")


def print_folders(files: Iterable[Path]) -> None:
    print("\n.py files per folder")
    for folder, count in sorted(Counter(file.parent for file in files).items()):
        print(f"{count:4}  {folder}")


def print_long_files(root: Path, files: Iterable[Path]) -> None:
    long = [(count, file) for file in files if (count := line_count(root / file)) > _LONG_FILE]
    print(f"\nfiles over {_LONG_FILE} lines: {len(long)}")
    for count, file in sorted(long, reverse=True):
        print(f"{count:5}  {file}")


def print_long_functions(root: Path, files: Iterable[Path]) -> None:
    long = [
        (count, f"{file}:{first}", name)
        for file in files
        for name, first, count in functions(ast.parse((root / file).read_text()))
        if count > _LONG_FUNCTION
    ]
    print(f"\nfunctions over {_LONG_FUNCTION} lines: {len(long)}")
    for count, place, name in sorted(long, reverse=True):
        print(f"{count:5}  {place} {name}")


def print_circles(graph: Graph) -> None:
    circles = import_circles(graph)
    print(f"\nimport circles in {', '.join(LAYERS)}: {len(circles)}")
    for circle in circles:
        print(f"{len(circle):5}  files")
        for file in circle:
            inside = sorted(set(graph[file]) & set(circle))
            print(f"       {file} imports {', '.join(map(str, inside))}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2])
    root: Path = parser.parse_args().root
    missing = [package for package in PACKAGES if not package_files(root, package)]
    if missing:
        parser.error(f"{root} is no root of the project: no .py files in {', '.join(missing)}")
    files = [file for package in PACKAGES for file in package_files(root, package)]
    print_packages(root)
    print_folders(files)
    print_long_files(root, files)
    print_long_functions(root, files)
    print_circles(import_graph(root))


if __name__ == "__main__":
    main()
