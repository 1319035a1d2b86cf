"""Docstrings begin with their noun, so that a reader knows at once what is spoken of, and say in
plain English what they mean."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.cases import thorough
from tests.support.imports import syntax_tree

ROOT = Path(__file__).parents[1]
PRODUCT = ("batchgen", "engine", "kernels", "strategies")
OTHERS = ("scripts", "tests", "examples", "conf")
BEGINS_BADLY = re.compile(r"(Of|The same|As of|So many)\b")
INSTEAD = {
    r"as of `": "see `…`",
    r"so many (?!that\b)": "the number, or `name`",
    r"beside each other": "at the same time, side by side",
    r"in the place of": "instead of",
    r"otherwise than": "differs from, not as",
    r"told(?! to\b)": "reported, known, asked",
}
"""What the sentences of the product do not say, and what they say instead."""
UNCLEAR = re.compile("|".join(rf"\b(?:{phrase})" for phrase in INSTEAD), re.IGNORECASE)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of every docstring, those below assignments included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


@cache
def all_docstrings(package: str) -> list[tuple[str, str]]:
    """Where each docstring of a package stands, and its text in one line."""
    parse = syntax_tree if package in PRODUCT else syntax_tree.__wrapped__
    return [
        (f"{path.relative_to(ROOT)}:{line}", " ".join(text.split()))
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings(parse(path))
    ]


@pytest.mark.parametrize("package", [*PRODUCT, *thorough(*OTHERS)])
def test_docstrings_begin_with_their_noun(package: str) -> None:
    wrong = [f"{at}: {text[:60]}" for at, text in all_docstrings(package) if begins_badly(text)]
    assert wrong == []


@pytest.mark.parametrize("package", PRODUCT)
def test_docstrings_are_plain(package: str) -> None:
    """A phrase of `INSTEAD` anywhere in a sentence."""
    wrong = [
        f"{at}: …{text[max(match.start() - 30, 0) : match.end() + 20]}…"
        for at, text in all_docstrings(package)
        for match in UNCLEAR.finditer(text)
    ]
    assert wrong == []


def begins_badly(text: str) -> bool:
    return BEGINS_BADLY.match(text) is not None


def test_bad_sentences_are_found() -> None:
    text = 'X = 1\n"""Of a row."""\ndef f():\n    """The same rows."""\nclass A:\n    "As of b"\n'
    bad = [line for line, text in docstrings(ast.parse(text)) if begins_badly(text)]
    assert sorted(bad) == [2, 4, 6]
    unclear = ["The rows, as of `f`.", "Cut into so many parts.", "It cannot be told then."]
    assert all(map(UNCLEAR.search, unclear))
    plain = ["So many that they do not fit.", "A worker that was told to stop.", "Rows as of now."]
    assert not any(map(UNCLEAR.search, plain))
