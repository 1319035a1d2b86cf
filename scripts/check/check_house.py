"""Measures the house: lines, docstrings and comments of packages and rooms, long files and
functions, and import circles of files and of rooms.

    python scripts/check/check_house.py [ROOT]

ROOT is the project's root; without it, the tree that this script stands in. The files are read as
text and nothing is imported, so any state of the project can be measured. A room is a folder. Lines
are lines of .py files, comments and blank lines included; a function's lines run from `def` to its
last line. Docstrings are strings that stand as statements, below constants and fields, too. Imports
count wherever they stand, in functions and for types alone; only `batchgen/__init__.py` stands
aside, since it imports public names when they are used. The tables are Markdown, for the docs.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PACKAGES = ("batchgen", "strategies", "engine", "kernels", "tests", "scripts")
LAYERS = PACKAGES[:4]
"""The packages whose imports are followed."""
_LONG_FILE = 300
_LONG_FUNCTION = 60

_FACE = Path("batchgen/__init__.py")
_MOST_SHOWN = 10

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


def imported_names(tree: ast.AST, types: bool = False) -> Iterator[str]:
    """Every dotted name that a syntax tree imports; `from a import b` yields a.b.

    Imports inside functions count, and with `types` also those under `if TYPE_CHECKING:`.
    """
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    children = ast.iter_child_nodes(tree)
    if not types and isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        children = iter(tree.orelse)
    for child in children:
        yield from imported_names(child, types)


def import_graph(
    root: Path, packages: Iterable[str] = LAYERS, types: bool = False
) -> dict[Path, set[Path]]:
    """Which file of the packages imports which other of them.

    `from a import b` is an import of the module a.b if there is one, and of a otherwise. Python
    also runs the `__init__.py` of every package above a module; that does not count as an import.
    """
    files = [file for package in packages for file in package_files(root, package)]
    modules = {module_name(file): file for file in files}
    graph: dict[Path, set[Path]] = {}
    for file in files:
        names = imported_names(ast.parse((root / file).read_text()), types)
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


def room_graph(graph: Graph) -> dict[Path, set[Path]]:
    """Which room imports which other of the same package."""
    rooms: dict[Path, set[Path]] = {file.parent: set() for file in graph}
    for file, targets in graph.items():
        for target in targets:
            same = target.parts[0] == file.parts[0] and target.parent != file.parent
            if same and _FACE not in (file, target):
                rooms[file.parent].add(target.parent)
    return rooms


@dataclass(frozen=True)
class File:
    """What is counted of a file.

    Attributes:
        docs, comments: lines of docstrings, and lines with nothing but a comment.
        functions: the functions with their lines, as `functions` yields them.
    """

    path: Path
    lines: int
    docs: int
    comments: int
    functions: list[tuple[str, int, int]]

    @classmethod
    def read(cls, root: Path, path: Path) -> File:
        text = (root / path).read_text()
        tree = ast.parse(text)
        docs: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    docs.update(range(node.lineno, (node.end_lineno or 0) + 1))
        comments = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        }
        lines = len(text.splitlines())
        return cls(path, lines, len(docs), len(comments - docs), list(functions(tree)))


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    print(f"\n**{title}**\n")
    for row in [heads, ["---"] * len(heads), *rows]:
        print(f"| {' | '.join(map(str, row))} |")


def by_part(files: Iterable[File], part: str) -> list[Sequence[object]]:
    """The rows of a table of packages or of rooms, with all together at its end."""
    groups: dict[Path, list[File]] = defaultdict(list)
    for file in files:
        groups[Path(file.path.parts[0]) if part == "package" else file.path.parent].append(file)
    rows = [(f"`{name}`", *_figures(group)) for name, group in groups.items()]
    return [*rows, ("all", *_figures([file for group in groups.values() for file in group]))]


def _figures(files: Sequence[File]) -> tuple[object, ...]:
    lines = sum(file.lines for file in files)
    shares = (sum(getattr(file, name) for file in files) / lines for name in ("docs", "comments"))
    longest = max(files, key=lambda file: file.lines)
    spans = [(span, name) for file in files for name, _, span in file.functions]
    span, name = max(spans, default=(0, "none"))
    return (
        len(files), f"{lines:,}", f"{median(file.lines for file in files):.0f}",
        *(f"{share:.1%}" for share in shares),
        f"{longest.lines} {longest.path.name}", f"{span} {name}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2])
    root = parser.parse_args().root
    missing = [package for package in PACKAGES if not package_files(root, package)]
    if missing:
        parser.error(f"{root} is no root of the project: no .py files in {', '.join(missing)}")
    paths = [path for package in PACKAGES for path in package_files(root, package)]
    files = [File.read(root, path) for path in paths if (root / path).stat().st_size]
    product = [file for file in files if file.path.parts[0] != "tests"]
    heads = ("files", "lines", "median", "docstrings", "comments", "longest file", "function")
    show("Packages", ("package", *heads), by_part(files, "package"))
    show("Without tests", ("package", *heads), by_part(product, "package")[-1:])
    show("Rooms", ("room", *heads), by_part(product, "room")[:-1])
    folders = Counter(path.parent for path in paths).most_common(_MOST_SHOWN)
    show("Fullest folders", ("folder", "files"), folders)
    long = sorted(((file.lines, file.path) for file in product), reverse=True)
    over = [each for each in long if each[0] > _LONG_FILE]
    title = f"Files over {_LONG_FILE} lines: {len(over)}"
    show(title, ("lines", "file"), over[:_MOST_SHOWN])
    spans = [
        (span, f"{file.path}:{first} {name}")
        for file in product
        for name, first, span in file.functions
        if span > _LONG_FUNCTION
    ]
    title = f"Functions over {_LONG_FUNCTION} lines: {len(spans)}"
    show(title, ("lines", "function"), sorted(spans, reverse=True)[:_MOST_SHOWN])
    graph = import_graph(root, types=True)
    graph = {file: targets - {_FACE} for file, targets in graph.items() if file != _FACE}
    for what, edges in (("files", graph), ("rooms", room_graph(graph))):
        circles = import_circles(edges)
        rows = [(len(circle), ", ".join(map(str, circle))) for circle in circles]
        show(f"Import circles of {what}: {len(circles)}", ("size", what), rows)


if __name__ == "__main__":
    main()
