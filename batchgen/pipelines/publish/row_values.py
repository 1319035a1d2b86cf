"""Evaluates expressions in finished rows; an expression without a value is an error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from batchgen.evals.grades.visible_columns import Wanted
from batchgen.pipelines.publish.finished_rows import FinishedRows, LocatedRow, set_row_name
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_expression import ExpressionFailed, RowExpression


def is_true(expression: RowExpression, row: LocatedRow) -> bool:
    """Whether an expression is true in a row. Raises ConfigError if it has no value there."""
    return bool(expression_value(expression, row))


def number_value(expression: RowExpression, row: LocatedRow) -> float | None:
    """The value of an expression in a row, as a number; None for null and for other types. A list
    of one number is that number, as `class_scores` of a reward model.

    Raises:
        ConfigError: it has no value in the row, or one of another type.
    """
    value = expression_value(expression, row)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if value is None:
        return None
    if isinstance(value, list):
        raise ConfigError(
            f"{set_row_name(row)}: {expression.source} is a list of {len(value)}, and must be a "
            f"number: name one of them, such as '{expression.source}[0]'"
        )
    if not isinstance(value, (bool, int, float)):
        raise ConfigError(
            f"{set_row_name(row)}: {expression.source} must be a number or null, and is "
            f"{type(value).__name__} {str(value)[:80]!r}"
        )
    return None if math.isnan(value) else float(value)


def expression_value(expression: RowExpression, row: LocatedRow) -> Any:
    """The value of an expression in a row. Raises ConfigError, which names the row, if it has
    none."""
    try:
        return expression.value(row.variables, str(row.variables.get("row_id", "")))
    except ExpressionFailed as error:
        raise ConfigError(
            f"{set_row_name(row)}: {error}: correct the expression, or let it skip such rows (`x "
            "is not none and …`)"
        ) from None


def answered_rows(
    rows: FinishedRows, wanted: Wanted, where: RowExpression | None, left_out: Counter[str]
) -> Iterator[LocatedRow]:
    """Yield the rows that have an answer and for which an expression is true; count the others in
    `left_out`."""
    for row in rows.rows(wanted):
        if row.variables.get("error") is not None and not rows.is_set:
            left_out["with an error"] += 1
        elif where is not None and not is_true(where, row):
            left_out["by --where"] += 1
        else:
            yield row


def rows_where(
    rows: FinishedRows, where: str | None, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Some columns of the rows of which an expression is true."""
    wanted, expression = rows.columns.named(columns), None
    if where is not None:
        expression = rows.columns.expression("--where", where)
        wanted |= rows.columns.read_by(expression)
    for row in rows.rows(wanted):
        if expression is None or is_true(expression, row):
            yield {name: row.variables[name] for name in columns}
