"""The column `parsed`, which holds the JSON of an answer, with types if its schema has exact
types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.json_text import has_lone_surrogate, parse_json
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.storage.shards.arrow_schema import Inexact, arrow_type

_Fit = Callable[[Any], Any]
_INT64 = range(-(2**63), 2**63)


class _Misfit(Exception):
    """A value does not fit into its Arrow type."""


@dataclass(frozen=True)
class ParsedColumn:
    """The column `parsed` of a job.

    Attributes:
        type: the Arrow type of the column.
        typed: whether the type follows from the job's schema; otherwise the column holds JSON text.
        meaning: the column's description, for readers of the output.
        start_after: the JSON begins after the first occurrence of this text; empty: at the start.
    """

    type: pa.DataType
    typed: bool
    meaning: str
    start_after: str

    @staticmethod
    def build(constraint: Constraint | None, start_after: str) -> ParsedColumn:
        """The column of a job whose constraint is JSON; None if each row has a different
        constraint."""
        null = "null unless constraint_satisfied"
        try:
            if constraint is None:
                raise Inexact("each row has a schema of its own")
            if constraint.kind == "json":
                raise Inexact("there is no schema")
            type = arrow_type(parse_json(constraint.text))
        except Inexact as why:
            meaning = f"the JSON of text, as JSON text, because {why}; {null}"
            return ParsedColumn(pa.string(), typed=False, meaning=meaning, start_after=start_after)
        meaning = f"the JSON of text, typed by the schema; {null} and the types hold every value"
        return ParsedColumn(type, typed=True, meaning=meaning, start_after=start_after)

    def array(self, outputs: Sequence[RequestOutput | None]) -> pa.Array:
        """The value of each row.

        It is null if the row has no complete JSON, or if a value does not fit its Arrow type, such
        as an integer of more than 64 bits or half a surrogate pair.
        """
        fit = _fit(self.type) if self.typed else None
        return pa.array([self._value(output, fit) for output in outputs], self.type)

    def _value(self, output: RequestOutput | None, fit: _Fit | None) -> Any:
        """The value of one row."""
        if output is None or output.error is not None or not output.constraint_satisfied:
            return None
        text = output.text
        if self.start_after:
            text = text.partition(self.start_after)[2]
        try:
            value = parse_json(text)
            return text.strip() if fit is None else fit(value)
        except (ValueError, RecursionError, _Misfit):
            return None


def _fit(type: pa.DataType) -> _Fit:
    """The function that converts a JSON value to the type, or raises _Misfit. Arrow would refuse
    the whole batch, round the value, or drop a part of it."""
    if pa.types.is_struct(type):
        fits = {field.name: _fit(field.type) for field in type}
        return lambda value: None if value is None else _struct(value, fits)
    if pa.types.is_list(type):
        fit = _fit(type.value_type)
        return lambda value: None if value is None else _list(value, fit)
    scalar = {pa.int64(): _integer, pa.float64(): _number, pa.string(): _text, pa.bool_(): _bool}
    fit = scalar[type]
    return lambda value: None if value is None else fit(value)


def _struct(value: Any, fits: dict[str, _Fit]) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() <= fits.keys():
        raise _Misfit
    return {name: fit(value.get(name)) for name, fit in fits.items()}


def _list(value: Any, fit: _Fit) -> list[Any]:
    if not isinstance(value, list):
        raise _Misfit
    return [fit(item) for item in value]


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # in JSON Schema, 1.0 is an integer
    if type(value) is not int or value not in _INT64:
        raise _Misfit
    return int(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise _Misfit
    try:
        number = float(value)
    except OverflowError:
        raise _Misfit from None
    if number in (float("inf"), float("-inf")):  # such as 1e999
        raise _Misfit
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or has_lone_surrogate(value):
        raise _Misfit
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Misfit
    return value
