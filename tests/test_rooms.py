"""Two rules: the groups of batchgen/ stand in an order, and no rooms import each other in a circle.

A room is a folder. Imports for types alone and imports inside functions count: they say as much of
who needs whom.
"""

from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.support.imports import import_circles, import_graph, package_files

ROOT = Path(__file__).parents[1]
MAX_FILES = 16
CATALOGUES = {Path("engine/models"), Path("batchgen/cli/verbs")}
"""Folders of a file for each item, of which there may be any number."""

GROUPS = (
    "util",
    "config",
    "storage",
    "evals",
    "inputs",
    "pages",
    "jobs",
    "pipelines",
    "api",
    "cli",
)
"""Groups of batchgen/, from the one that needs none of the others to the one that needs them all;
docs/design/overview.md says what each is."""

SAME_NAMES = {"grade"}
"""The names of verbs that modules elsewhere have, too."""


@cache
def all_imports(*packages: str) -> dict[Path, set[Path]]:
    """Which file of the packages imports which other one."""
    return import_graph(ROOT, packages)


def group(file: Path) -> str:
    """The group of a file of batchgen/; an empty name for the files of the command itself."""
    return file.parts[1] if len(file.parts) > 2 else ""


def test_no_import_goes_up() -> None:
    graph = all_imports("batchgen")
    order = {name: number for number, name in enumerate((*GROUPS, ""))}
    assert {group(file) for file in graph} == set(order), "a folder that is no group"
    wrong = [
        f"{file} imports {target}"
        for file, targets in graph.items()
        for target in targets
        if order[group(target)] > order[group(file)] and target.name != "__init__.py"
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["batchgen", "engine", "strategies", "kernels"])
def test_no_rooms_import_each_other(package: str) -> None:
    graph = all_imports(package)
    rooms: dict[Path, set[Path]] = {file.parent: set() for file in graph}
    for file, targets in graph.items():
        rooms[file.parent] |= {target.parent for target in targets if target.name != "__init__.py"}
    assert import_circles({room: targets - {room} for room, targets in rooms.items()}) == []


def test_a_folder_has_few_files() -> None:
    folders = Counter[Path]()
    for package in ("batchgen", "engine", "kernels", "strategies"):
        folders.update(file.parent for file in package_files(ROOT, package))
    full = {folder: count for folder, count in folders.items() if count > MAX_FILES}
    assert {folder: count for folder, count in full.items() if folder not in CATALOGUES} == {}


def test_the_overview_names_all_groups() -> None:
    overview = (ROOT / "docs/design/overview.md").read_text(encoding="utf-8")
    assert [name for name in GROUPS if f"| `{name}` |" not in overview] == []


def test_a_module_is_known_by_its_name() -> None:
    """A name that two rooms use tells nothing without its folder."""
    places = defaultdict(list)
    for package in ("batchgen", "engine"):
        for file in package_files(ROOT, package):
            if file.stem not in ("__init__", *SAME_NAMES):
                places[file.stem].append(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
