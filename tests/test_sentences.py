"""Docstrings begin with their noun: a reader knows at once what is spoken of."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("batchgen", "engine", "kernels", "strategies", "scripts", "tests", "examples", "conf")
BEGINS_BADLY = re.compile(r"(Of|The same|As of|So many)\b")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of every docstring, those below assignments included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_their_noun(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        if BEGINS_BADLY.match(text.strip())
    ]
    assert wrong == []


def test_bad_beginnings_are_found() -> None:
    text = 'X = 1\n"""Of a row."""\ndef f():\n    """The same rows."""\nclass A:\n    "As of b"\n'
    found = [line for line, text in docstrings(ast.parse(text)) if BEGINS_BADLY.match(text)]
    assert sorted(found) == [2, 4, 6]
