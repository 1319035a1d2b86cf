"""Rewrites JSON Schemas of strings, numbers and listed values so that xgrammar enforces them.
`lower_schema.py` calls this for each such part of a schema."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from batchgen.engine.constraint.json_schema.json_text import has_lone_surrogate
from batchgen.engine.constraint.json_schema.keywords import MOST, read_limits, refuse
from batchgen.engine.constraint.regex import regex_syntax as syntax
from batchgen.engine.constraint.regex import regex_text as text
from batchgen.engine.constraint.regex.characters import JSON_TEXT
from batchgen.engine.interface.constraint_error import ConstraintError

_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_DATE = (
    r"(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})-"
    r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8]))"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_HEX = r"[0-9a-fA-F]{1,4}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,9}W|\d{1,9}D|T(\d{1,9}H|\d{1,9}M|\d{1,9}S|\d{1,9}H\d{1,9}M"
    r"|\d{1,9}M\d{1,9}S|\d{1,9}H\d{1,9}M\d{1,9}S)|\d{1,9}DT\d{1,9}H|\d{1,9}Y|\d{1,9}M)",
    "email": rf"[A-Za-z0-9_%+-]{{1,32}}(\.[A-Za-z0-9_%+-]{{1,16}}){{0,1}}@{_HOST}\.[A-Za-z]{{2,8}}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": rf"({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,3}}(:{_HEX}){{1,4}}|::({_HEX}(:{_HEX}){{0,5}})?",
    "uri": rf"https?://{_HOST}(:[1-9]\d{{0,3}})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*"
    r"(\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?",
    "uuid": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}
"""Maps a format to the pattern of its common form. Every match is of the format, but the format
allows more (29 February, for example, does not match `date`)."""


def lower_scalar(name: str, schema: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Rewrite the keywords about one type other than object and array. Raises ConstraintError if
    one cannot be enforced."""
    if name == "string" and schema:
        return {"type": name, "pattern": text.write(string_node(schema, at), json=True)}
    if name in ("integer", "number") and schema:
        return _lower_number(name, schema, at)
    return {"type": name}


def string_node(schema: Mapping[str, Any], at: str) -> syntax.Node:
    """Return the regular expression of the strings that the `pattern`, `format` and lengths of a
    schema allow.

    xgrammar would read only one of these keywords, and with a length would allow raw control
    characters. Raises ConstraintError if they cannot be enforced together, or allow no string.
    """
    low, high = read_limits(schema, "minLength", "maxLength")
    highest = MOST if high is None else high
    if low > highest:
        raise refuse("minLength", at, f"{low} is more than {highest} characters")
    if "pattern" in schema and "format" in schema:
        raise refuse("format", at, "cannot be enforced together with `pattern`: keep one")
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise refuse(
                "format",
                at,
                f"{schema['format']!r} cannot be enforced: use one of "
                f"{', '.join(FORMATS)}, or a `pattern`",
            )
        source = FORMATS[schema["format"]]
    elif "pattern" in schema:
        source = schema["pattern"]
    else:
        return syntax.Repeat(syntax.Chars(tuple(JSON_TEXT)), low, high)
    try:
        node = syntax.parse(source, JSON_TEXT)
    except ConstraintError as error:
        raise refuse("pattern", at, f"cannot be enforced: {error}") from None
    fitting = text.bounded(node, low, high)
    if fitting is None:
        keyword = "pattern" if "pattern" in schema else "format"
        raise refuse(
            "minLength/maxLength",
            at,
            f"cannot be enforced together with this `{keyword}`: say "
            "the length by counts in a pattern, such as [a-z]{1,20}",
        )
    return fitting


def _lower_number(name: str, schema: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Rewrite the keywords about integers or numbers; see `lower_scalar`."""
    for keyword, value in schema.items():
        if not abs(value) <= 10**15:
            raise refuse(keyword, at, "must lie between -1e15 and 1e15, which doubles keep exact")
    whole = name == "integer" or "multipleOf" in schema
    low, high = _bounds(schema, whole)
    if low is not None and high is not None:
        if low > high or not (whole or _has_number(low, high, schema)):
            raise refuse("minimum/maximum", at, "leave no number of at most 6 decimals between")
    if not whole:
        return {"type": name} | dict(schema)
    lowered = {"type": "integer"}  # multiples of a whole number are integers, too
    if low is not None:
        lowered["minimum"] = low
    if high is not None:
        lowered["maximum"] = high
    step = schema.get("multipleOf", 1)
    if step == 1:
        return lowered
    bounded = low is not None and high is not None
    if step != int(step) or step > 1024 or (not bounded and (low, high) != (None, None)):
        raise refuse(
            "multipleOf",
            at,
            "can be enforced only for a whole number up to 1024, and with both "
            "`minimum` and `maximum` or neither: remove it, or check it afterwards",
        )
    if not bounded:
        return lowered | {"multipleOf": int(step)}
    # From the first multiple that is at least `low`.
    values = list(range(low + -low % int(step), high + 1, int(step)))
    if not 1 <= len(values) <= 10_000:
        raise refuse("multipleOf", at, f"has {len(values)} values in its range: allow 1 to 10000")
    return {"enum": values}


def _bounds(schema: Mapping[str, Any], whole: bool) -> tuple[Any, Any]:
    """Return the least and greatest allowed numbers, or None; for whole numbers both are
    inclusive."""
    lows = [schema["minimum"]] if "minimum" in schema else []
    highs = [schema["maximum"]] if "maximum" in schema else []
    if whole:
        lows = [math.ceil(low) for low in lows]
        highs = [math.floor(high) for high in highs]
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"]
        lows.append(math.floor(low) + 1 if whole else low)
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"]
        highs.append(math.ceil(high) - 1 if whole else high)
    return max(lows, default=None), min(highs, default=None)


def _has_number(low: Any, high: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether the bounds allow a number of at most 6 decimals; otherwise xgrammar would
    allow the empty text."""
    first, last = math.ceil(_millionths(low)), math.floor(_millionths(high))
    if "exclusiveMinimum" in schema:
        first += first == _millionths(schema["exclusiveMinimum"])
    if "exclusiveMaximum" in schema:
        last -= last == _millionths(schema["exclusiveMaximum"])
    return first <= last


def _millionths(value: float) -> Fraction:
    """Return a number in millionths, exactly, from its decimal digits."""
    return Fraction(str(value)) * 10**6


def check_values(values: list[Any], keyword: str, at: str) -> Iterator[str]:
    """Check the values of `enum` or `const`, and yield all names of object members in them. Raises
    ConstraintError for integers of more than 64 bits, which xgrammar would round."""
    for value in values:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise refuse(keyword, at, f"has {value}, which 64 bits do not hold: use a string")
        if isinstance(value, str) and has_lone_surrogate(value):
            raise refuse(keyword, at, f"has {value!r}, half of a character: remove it")
        if isinstance(value, dict):
            yield from value
            yield from check_values(list(value.values()), keyword, at)
        elif isinstance(value, list):
            yield from check_values(value, keyword, at)
