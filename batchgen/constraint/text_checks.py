"""Whether a text keeps a constraint, asked of others than the engine where there are any."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from batchgen.config import AnyConstraintConfig, JsonConstraintConfig, JsonSchemaConstraintConfig
from batchgen.constraint.json_text import NotJson, compact_json, parse_json

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Check = Callable[[str], str | None]
"""The reason why a text does not keep the constraint; None if it does."""

CHECKED_BY = {
    "json_schema": "jsonschema and its format checker",
    "json": "Python's json",
    "regex": "Python's re.fullmatch (xgrammar for a pattern that Python does not read)",
    "choice": "comparison",
    "grammar": "a fresh matcher of xgrammar, which the engine uses too",
    "structural_tag": "a fresh matcher of xgrammar, which the engine uses too",
}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_GAP = 4  # whitespace that may stand between a marker and what is constrained


class Unchecked(Exception):
    """A text that cannot be checked, and why."""


def make_check(config: AnyConstraintConfig, value: Any) -> Check:
    """
    Args:
        value: what the job or the row gives: schema or tag as parsed JSON, choices, pattern, EBNF;
            None for any JSON object.
    """
    if isinstance(config, (JsonSchemaConstraintConfig, JsonConstraintConfig)):
        schema = {"type": "object"} if value is None else value
        check = _json_check(_validator(schema), config.max_whitespace)
    elif config.kind == "choice":
        check = _choice_check(value)
    elif config.kind == "regex":
        check = _regex_check(value)
    elif config.kind == "grammar":
        check = _matcher_check(lambda compiler: compiler.compile_grammar(value))
    else:
        check = _matcher_check(
            lambda compiler: compiler.compile_structural_tag(compact_json(value))
        )
    return check if config.start_after is None else _behind(config.start_after, check)


def _behind(marker: str, check: Check) -> Check:
    def behind(text: str) -> str | None:
        _, found, rest = text.partition(marker)
        if not found:
            raise Unchecked(f"{marker!r} is not in the text (which has no special tokens)")
        reasons = [check(begin) for begin in _without_gap(rest)]
        return None if None in reasons else reasons[-1]

    return behind


def _without_gap(text: str) -> Iterator[str]:
    yield text
    for _ in range(_MAX_GAP):
        if text[:1] not in (" ", "\n", "\r", "\t"):
            return
        text = text[1:]
        yield text


def _validator(schema: Any) -> Validator:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    cls = validator_for(schema, default=Draft202012Validator)
    # A registry of nothing: no $ref is looked up in the network.
    validator: Validator = cls(schema, registry=Registry(), format_checker=cls.FORMAT_CHECKER)
    return validator


def _json_check(validator: Validator, max_whitespace: int) -> Check:
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    gap = re.compile(rf"[ \t\r\n]{{{max_whitespace + 1}}}")

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
        if gap.search(_STRING.sub('""', text)):
            return f"more than {max_whitespace} whitespace characters in a row between tokens"
        return None

    return check


def _choice_check(choices: Collection[str]) -> Check:
    return lambda text: None if text in choices else "none of the choices"


def _regex_check(pattern: str) -> Check:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return _matcher_check(lambda compiler: compiler.compile_regex(pattern))
    return lambda text: None if compiled.fullmatch(text) else "the pattern does not match it"


def _matcher_check(compile: Callable[[Any], Any]) -> Check:
    """With a vocabulary of bytes, so that no tokenizer plays a part."""
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
