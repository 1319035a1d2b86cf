"""The version of xgrammar, whose printed grammars constraints depend on."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import xgrammar

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.printed_grammar import TESTED_VERSION, check_print
from batchgen.engine.interface.constraint_error import ConstraintError
from tests.support.engine.constrained_rows import END, WIDTH, make_tokenizer

ROOT = Path(__file__).parents[3]
PRINTED = xgrammar.Grammar.__str__


def test_the_installed_version_prints_as_expected() -> None:
    check_print()


def test_what_is_installed_is_what_was_tested() -> None:
    assert version("xgrammar") == TESTED_VERSION
    assert f"xgrammar=={TESTED_VERSION}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"\xe9", "é"),  # characters beyond ASCII as they are
        (r"\xe9", r"\u00e9"),
        ("[", "("),  # another form of classes
        ("TagDispatch(", "Tags("),
    ],
)
def test_a_version_that_prints_otherwise_is_refused(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_otherwise(grammar: xgrammar.Grammar) -> str:
        return PRINTED(grammar).replace(old, new)

    monkeypatch.setattr(xgrammar.Grammar, "__str__", print_otherwise)
    message = rf"xgrammar {version('xgrammar')} prints .* than {TESTED_VERSION}.*pip install"
    with pytest.raises(ConstraintError, match=message):
        GrammarCompiler(make_tokenizer(), WIDTH, (END,))


def test_a_version_that_does_not_read_the_probe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> xgrammar.Grammar:
        raise RuntimeError("EBNF parser error")

    monkeypatch.setattr(xgrammar.Grammar, "from_ebnf", refuse)
    with pytest.raises(ConstraintError, match="install the tested one"):
        check_print()
