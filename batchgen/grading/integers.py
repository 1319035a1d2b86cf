"""Whole numbers as people and models write them, compared without any library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchgen.grading.latex import plain

if TYPE_CHECKING:
    import pyarrow as pa

_CURRENCY = re.compile(r"\\?[$€£¥₹]|\\(?:euro|pounds)(?![A-Za-z])")
_UNIT = re.compile(
    r"\s*(?:\\?%|\^?\s*\\?circ|\^\{\s*\\circ\s*\}|°|\\degree)?\s*(?P<words>[^\W\d_][^\d\\{}=+*^<>|!()]*)?"
)
_NO_UNIT = re.compile(r"[xyznkieπ]|.*\b(?:or|and)\b.*", re.S)
_INTEGER = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ _'\u202f]\d{3})+|\d+)"
    r"(?:\.(?P<decimals>\d*))?(?!,?\d)",
    re.A,
)
_SIMPLE = re.compile(r"-?[1-9][0-9]*|0")


def normal_integer(answer: str) -> str | None:
    r"""The whole number that an answer says, in its shortest form; None if it says no such number.

    Understood are signs, thousands (`1,000`, `1 000`, `1{,}000`), decimals that are all zero
    (`18.00`), leading zeros (`018`), a currency or `x =` before it, a unit or a percent sign after
    it (`18 \text{ dollars}`, `90^\circ`), and the wrappers that `plain` takes off. `-0` is `0`. A
    unit holds no digit, so that `3 or 4` is no number, and is not the letter of a variable (`3x`).
    Numbers may have any length.
    """
    if _SIMPLE.fullmatch(answer):
        return answer
    text = plain(answer).rpartition("=")[2]
    text = _CURRENCY.sub("", text).strip()
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}"):
        text = text[1:-1].strip()
    match = _INTEGER.match(text)
    if match is None or (match["decimals"] or "").strip("0"):
        return None
    unit = _UNIT.fullmatch(text, match.end())
    if unit is None or (unit["words"] and _NO_UNIT.fullmatch(unit["words"].strip())):
        return None
    digits = re.sub(r"\D", "", match["whole"]).lstrip("0") or "0"
    return "-" + digits if match["sign"] == "-" and digits != "0" else digits


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
