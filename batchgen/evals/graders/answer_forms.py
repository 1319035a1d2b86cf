"""Normal forms of answers, which the grader `Grade` compares: integers, texts, letters and JSON.

normal_integer("$1,000.00") → "1000"        choice_letter("(b) iron", […]) → "B"
normal_text(" a  b\\n") → "a b"             valid_json('{"b":1, "a":2}', …) → True, '{"a":2,"b":1}'
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from batchgen.engine.constraint.json_schema.json_text import NotJson, parse_json, parse_unique_json
from batchgen.engine.constraint.json_schema.validator import make_validator
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.evals.graders.choices import LETTERS
from batchgen.evals.graders.latex import plain
from batchgen.evals.graders.step import GradeFailure
from batchgen.evals.math.literals import literal_number
from batchgen.evals.math.same import MOST_CHARACTERS

if TYPE_CHECKING:
    import pyarrow as pa

# An integer in its shortest form: `-18`.
_SHORT_INTEGER = re.compile(r"-?[1-9][0-9]*|0")
# An integer of any length, with a sign and leading zeros.
_SIGNED_DIGITS = re.compile(r"([+-]?)0*([1-9][0-9]*)")
_WRITTEN_INTEGER = re.compile(r"([+-]?)(?:\\?\$ ?)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.0*)?")
"""An integer as most answers write it, read without the parser of formulas: `$1,000.00`. Groups:
sign, and digits with commas."""
_NO_DIGIT = re.compile(r"\D*")
# A single letter: `B`, `(B)`, `B.`.
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_NEXT_LETTER = r"\s*\(?[A-Za-z](?![A-Za-z])"
_LETTER_FIRST = re.compile(
    rf"\(?([A-Za-z])(?:[).:](?!\s*(?:[,;]|and\b|or\b){_NEXT_LETTER})|,(?!{_NEXT_LETTER})).*", re.S
)
"""One letter before other text: `B. iron`, but not `A. and B.`, which names two."""
_LETTER_LIST = re.compile(
    r"\(?[A-Za-z][).:]?(?:\s*(?:[,;/&+、]|,?\s*and\b|,?\s*und\b|和)\s*\(?[A-Za-z][).:]?)+", re.I
)
"""Several letters with separators: `A, C`, `(A) and (C)`."""
# Marks around letters: `["A", "C"]`, `\{A, C\}`, `**A**`.
_AROUND = re.compile(r"[\[\]\\{}\"'`*]")
_LABEL = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)(?:\s+is)?|答案|选项?)[是为]?\s*[:：]?\s*"
    r"(?=\(?[A-Za-z]\b)",
    re.I,
)
"""Words before a letter: `The correct answer is (B)`."""


def normal_integer(answer: str) -> str | None:
    r"""The whole number that an answer states, in its shortest form; None if it states no such
    number.

    Read are signs, thousands (`1,000`, `1 000`, `1{,}000`), decimals that are all zero (`18.00`),
    leading zeros (`018`), a currency, `x =` or `m + n =` before it, a unit or a percent sign after
    it (`18 \text{ dollars}`, `90^\circ`), powers of ten (`5 million`, `1e6`), and layout commands.
    `-0` is `0`. Expressions that must be computed (`9 + 9`), `3 or 4` and `3x` are not numbers.
    There may be any number of digits.
    """
    if _SHORT_INTEGER.fullmatch(answer):
        return answer
    if len(answer) > MOST_CHARACTERS:
        match = _SIGNED_DIGITS.fullmatch(answer.strip())
        return None if match is None else match[1].replace("+", "") + match[2]
    if _NO_DIGIT.fullmatch(answer):
        return None
    if match := _WRITTEN_INTEGER.fullmatch(answer):
        digits = match[2].replace(",", "").lstrip("0") or "0"
        return "-" + digits if match[1] == "-" and digits != "0" else digits
    value = literal_number(answer)
    if value is None or value.denominator != 1:
        return None
    return str(value)


def _short_integers(values: Sequence[Any]) -> tuple[pa.StringArray, pa.BooleanArray]:
    """[N] Texts or integers as an Arrow array of texts, and [N] whether each is a whole number in
    its shortest form. Values of another or of several types become nulls."""
    import pyarrow as pa  # workers need neither
    import pyarrow.compute as pc

    try:
        array = pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        array = pa.nulls(len(values))
    if pa.types.is_integer(array.type):
        array = array.cast(pa.string())
    elif not pa.types.is_string(array.type):
        array = pa.nulls(len(values), pa.string())
    short = pc.match_substring_regex(array, rf"\A(?:{_SHORT_INTEGER.pattern})\z")
    return array, short.fill_null(fill_value=False)


def short_integer_marks(
    answers: Sequence[Any], targets: Sequence[Any]
) -> tuple[list[float | None], list[str | None], list[str | None], list[int]]:
    """Mark rows whose answer and target are both short integers, such as `18` and `-4`.

    Returns:
        marks: [N] 1 or 0; None for other rows.
        keys: [N] the normal forms of the answers; None for other rows.
        targets: [N] the normal forms of the targets; None for other rows.
        others: the indices of the other rows, which are graded one by one.
    """
    import pyarrow.compute as pc  # workers do not need it

    integers, is_short = _short_integers(answers)
    wanted, is_short_target = _short_integers(targets)
    short = pc.and_(is_short, is_short_target)
    columns = pc.equal(integers, wanted).cast("float64"), integers, wanted
    marks, keys, wanted_keys = (pc.if_else(short, column, None).to_pylist() for column in columns)
    others = [at for at, is_marked in enumerate(short.to_pylist()) if not is_marked]
    return marks, keys, wanted_keys, others


def normal_text(text: str, ignore_case: bool = False) -> str:
    """The text with single spaces instead of white space, and none at its ends."""
    joined = " ".join(text.split())
    return joined.casefold() if ignore_case else joined


def choice_letter(answer: str, choices: Sequence[Any]) -> str:
    """The letter of the choice that an answer names.

    It is the only letter of the answer (`b`, `(B)`, `Option B`), the letter of the choice with its
    text, the letter before a text (`B. iron`), or several letters in their order (`A, C` for `C and
    A` and for `["C", "A"]`). Otherwise the text of the answer is returned.
    """
    text = plain(answer)
    text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    if match := _LETTER.fullmatch(text):
        return match[1].upper()
    for ignore_case in (False, True):  # `Aa` and `aa` may be two choices
        for letter, choice in zip(LETTERS, choices, strict=False):
            if normal_text(text, ignore_case) == normal_text(plain(str(choice)), ignore_case):
                return letter
    bare = _AROUND.sub("", text).strip()
    if match := _LETTER.fullmatch(bare):
        return match[1].upper()
    if _LETTER_LIST.fullmatch(bare):
        named = re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", bare)
        return ", ".join(sorted({letter.upper() for letter in named}))
    if text.isascii() and text.isalpha() and set(text) <= set(LETTERS[: len(choices)]):
        return ", ".join(sorted(set(text)))  # `CA`
    match = _LETTER_FIRST.fullmatch(text)
    return match[1].upper() if match else normal_text(text)


def equal_choices(one: str, other: str, choices: Sequence[Any]) -> bool:
    """Whether two letters belong to choices with the same text."""
    texts = [
        normal_text(str(choices[at]))
        for letter in (one, other)
        if len(letter) == 1 and 0 <= (at := LETTERS.find(letter)) < len(choices)
    ]
    return len(texts) == 2 and texts[0] == texts[1]


def matches_whole(pattern: str, answer: str, ignore_case: bool) -> bool:
    """Whether a regular expression matches a whole answer.

    Raises:
        GradeFailure: the pattern is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise GradeFailure(
            "bad_target", f"the target is not a regular expression: {error}"
        ) from None
    return compiled.fullmatch(answer.strip()) is not None


def valid_json(answer: str, schema: Any) -> tuple[bool, str]:
    """Whether an answer is JSON that a schema (text or mapping) allows, and its normal form.

    Raises:
        GradeFailure: the schema is not a JSON Schema.
    """
    try:
        validator = _validator(schema if isinstance(schema, str) else repr_json(schema))
    except (ConstraintError, ValueError) as error:
        raise GradeFailure("bad_target", f"not a JSON Schema: {error}") from None
    try:
        value = parse_json(answer)
    except NotJson:
        return False, normal_text(answer)
    return validator.is_valid(value), repr_json(value)


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    return make_validator(parse_unique_json(schema))


def check_json_schema(schema: str | Mapping[str, Any]) -> None:
    """Raise ValueError or ConstraintError for a value that is not a JSON Schema."""
    make_validator(parse_unique_json(schema) if isinstance(schema, str) else dict(schema))


def repr_json(value: Any) -> str:
    """JSON text in a normal form: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
