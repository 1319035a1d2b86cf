"""Checks whether finished texts satisfy their constraint, for `batchgen validate`. `make_check` is
the entry point.

The checks do not rely on the engine: where possible, they use other libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.constraint_config import (
    AnyConstraintConfig,
    JsonConstraintConfig,
    JsonSchemaConstraintConfig,
)
from batchgen.engine.constraint.constraint import MARKER_GAP
from batchgen.engine.constraint.json_schema.json_text import WHITESPACE, NotJson, parse_json
from batchgen.engine.constraint.json_schema.validator import make_validator
from batchgen.engine.interface.constraint_error import ConstraintError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Check = Callable[[str], str | None]
"""Returns why a text violates the constraint, or None if it satisfies it. Raises `Unchecked` if the
text cannot be checked."""

CHECKED_BY = {
    "json_schema": "jsonschema and its format checker",
    "json": "Python's json",
    "regex": "Python's re.fullmatch (xgrammar for a pattern that Python does not read)",
    "choice": "comparison",
    "grammar": "a fresh matcher of xgrammar, which the engine uses too",
    "structural_tag": "a fresh matcher of xgrammar, which the engine uses too",
}
"""The name of the checker for each kind of constraint, as users see it."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
"""A JSON string with its quotes."""


class Unchecked(Exception):
    """A text cannot be checked. The message gives the reason."""


def make_check(config: AnyConstraintConfig, value: Any, *, after_reasoning: bool = False) -> Check:
    """Make a function that checks texts against a constraint.

    Args:
        config: the job's constraint, whose kind decides the check.
        value: a schema or tag as parsed JSON, the list of choices, the regex, or the EBNF. None
            allows any JSON object.
        after_reasoning: whether texts begin after the marker `start_after`; otherwise they contain
            it.

    Raises:
        Unchecked: the checker cannot read the constraint.
    """
    if isinstance(config, (JsonSchemaConstraintConfig, JsonConstraintConfig)):
        schema = {"type": "object"} if value is None else value
        try:
            check = _json_check(make_validator(schema), config.max_whitespace)
        except ConstraintError as error:
            raise Unchecked(str(error)) from None
    elif config.kind == "choice":
        check = _choice_check(value)
    elif config.kind == "regex":
        check = _regex_check(value)
    elif config.kind == "grammar":
        check = _matcher_check(lambda compiler: compiler.compile_grammar(value))
    else:
        check = _matcher_check(lambda compiler: compiler.compile_structural_tag(json.dumps(value)))
    if config.start_after is None:
        return check
    return partial(_any_gap, check) if after_reasoning else _behind(config.start_after, check)


def _behind(marker: str, check: Check) -> Check:
    """Make a check of the text after the first occurrence of a marker."""

    def behind(text: str) -> str | None:
        _, separator, rest = text.partition(marker)
        if not separator:
            raise Unchecked(f"{marker!r} is not in the text (which has no special tokens)")
        return _any_gap(check, rest)

    return behind


def _any_gap(check: Check, text: str) -> str | None:
    """Check a text from after a marker, without some of its first whitespace characters. Returns
    None if the text satisfies the constraint without any allowed number of them."""
    reasons = [check(begin) for begin in _without_gap(text)]
    return None if None in reasons else reasons[-1]


def _without_gap(text: str) -> Iterator[str]:
    """Yield the text, and then the text without its first 1, 2, … whitespace characters, up to the
    number that may follow a marker. Some of them may belong to the constrained text."""
    yield text
    for _ in range(MARKER_GAP):
        if not text or text[0] not in WHITESPACE:
            return
        text = text[1:]
        yield text


def _json_check(validator: Validator, max_whitespace: int) -> Check:
    """Make a check of JSON text against a schema and against long whitespace between tokens."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    too_long = re.compile(rf"[{WHITESPACE}]{{{max_whitespace + 1}}}")

    def check(text: str) -> str | None:
        try:
            value = parse_json(text)
            error = best_match(validator.iter_errors(value))
        except NotJson as error:
            return f"not JSON: {error}"
        except (RecursionError, ValueError, Unresolvable, re.error) as error:
            raise Unchecked(f"{type(error).__name__}: {error}") from None
        if error is not None:
            return f"{error.json_path}: {error.message}"
        if too_long.search(_STRING.sub('""', text)):
            return f"more than {max_whitespace} whitespace characters in a row between tokens"
        return None

    return check


def _choice_check(choices: Collection[str]) -> Check:
    """Make a check that a text is one of the choices."""
    return lambda text: None if text in choices else "not one of the choices"


def _regex_check(pattern: str) -> Check:
    """Make a check against a regex, with Python's `re` if it can read the pattern, else with
    xgrammar."""
    try:
        compiled = re.compile(pattern)
    except re.error:
        return _matcher_check(lambda compiler: compiler.compile_regex(pattern))
    return lambda text: None if compiled.fullmatch(text) else "the pattern does not match it"


def _matcher_check(compile: Callable[[Any], Any]) -> Check:
    """Make a check with xgrammar, over a vocabulary of single bytes, so that it is independent of
    tokenizers.

    Args:
        compile: compiles the grammar, given xgrammar's compiler.
    """
    import xgrammar

    bytes_and_end = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    end = len(bytes_and_end) - 1
    info = xgrammar.TokenizerInfo(
        bytes_and_end, xgrammar.VocabType.RAW, vocab_size=end + 1, stop_token_ids=[end]
    )
    try:
        grammar = compile(xgrammar.GrammarCompiler(info, max_threads=1))
    except RuntimeError as error:
        raise Unchecked(f"xgrammar: {' '.join(str(error).split())}") from None

    def check(text: str) -> str | None:
        matcher = xgrammar.GrammarMatcher(grammar)
        if not matcher.accept_string(text):
            return "the grammar does not allow it"
        return None if matcher.accept_token(end) else "the grammar expects more"

    return check
