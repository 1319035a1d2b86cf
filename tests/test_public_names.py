"""A public class or function has a name that no other one of the product has.

The Triton implementation of a reference in the same room ends in `_triton`. `main` is how a module
is run, as a verb or as a process, and says nothing of its own.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tests.support.imports import LAYERS, package_files

ROOT = Path(__file__).parents[1]


def public_names() -> dict[str, list[str]]:
    """Where each public class and function at the top of a module of the product stands."""
    files = defaultdict(list)
    for package in LAYERS:
        for file in package_files(ROOT, package):
            for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    if not node.name.startswith("_"):
                        files[node.name].append(str(file))
    return files


def test_no_two_things_share_a_name() -> None:
    names = public_names()
    del names["main"]
    assert {name: files for name, files in names.items() if len(files) > 1} == {}
