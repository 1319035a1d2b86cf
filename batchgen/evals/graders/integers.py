"""Whole numbers as people and models write them, in their shortest form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchgen.evals.math.literals import literal_number
from batchgen.evals.math.same import MOST_CHARACTERS

if TYPE_CHECKING:
    import pyarrow as pa

_SIMPLE = re.compile(r"-?[1-9][0-9]*|0")
_LONG = re.compile(r"([+-]?)0*([1-9][0-9]*)")
_USUAL = re.compile(r"([+-]?)(?:\\?\$ ?)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.0*)?")
_NO_DIGIT = re.compile(r"\D*")


def normal_integer(answer: str) -> str | None:
    r"""The whole number that an answer says, in its shortest form; None if it says no such number.

    Understood are signs, thousands (`1,000`, `1 000`, `1{,}000`), decimals that are all zero
    (`18.00`), leading zeros (`018`), a currency, `x =` or `m + n =` before it, a unit or a percent
    sign after it (`18 \text{ dollars}`, `90^\circ`), powers of ten (`5 million`, `1e6`), and what
    only lays it out. `-0` is `0`. What must be computed is no number (`9 + 9`), and neither are
    `3 or 4` and `3x`. Digits alone may be any number of them.
    """
    if _SIMPLE.fullmatch(answer):
        return answer
    if len(answer) > MOST_CHARACTERS:
        match = _LONG.fullmatch(answer.strip())
        return None if match is None else match[1].replace("+", "") + match[2]
    if _NO_DIGIT.fullmatch(answer):
        return None
    if match := _USUAL.fullmatch(answer):
        digits = match[2].replace(",", "").lstrip("0") or "0"
        return "-" + digits if match[1] == "-" and digits != "0" else digits
    value = literal_number(answer)
    if value is None or value.denominator != 1:
        return None
    return str(value)


def short_integers(values: Sequence[Any]) -> tuple[pa.StringArray, pa.BooleanArray]:
    """Texts or integers as an Arrow array of texts, and which of them are whole numbers in their
    shortest form; values of several kinds or of another one become nulls."""
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
    short = pc.match_substring_regex(array, rf"\A(?:{_SIMPLE.pattern})\z")
    return array, short.fill_null(False)
