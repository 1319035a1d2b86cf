"""Evaluates the expressions of `select` and `export` in finished rows. An expression that cannot be
evaluated is a ConfigError that names the row."""

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
    """Whether an expression is true in a row. Raises ConfigError if it cannot be evaluated."""
    return bool(expression_value(expression, row))


def number_value(expression: RowExpression, row: LocatedRow) -> float | None:
    """Return the value of an expression in a row as a number; None for null and NaN. A list of one
    number counts as the number, such as `class_scores` of a reward model.

    Raises:
        ConfigError: the expression cannot be evaluated, or its value has another type.
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
    """Return the value of an expression in a row. Raises ConfigError if it cannot be evaluated."""
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
    """Yield the rows of a job that have no error and for which `where` is true. Of a set, whose
    `error` is a column like any other, rows with an error are yielded as well.

    Args:
        where: a condition that is evaluated in each row; None for all rows.
        left_out: counts the rows that are not yielded, by reason.
    """
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
    """Yield some columns of the rows for which `where` is true.

    Args:
        where: the source of a condition, as the user typed it; None for all rows.
        columns: the names of the columns.
    """
    wanted, expression = rows.columns.named(columns), None
    if where is not None:
        expression = rows.columns.expression("--where", where)
        wanted |= rows.columns.read_by(expression)
    for row in rows.rows(wanted):
        if expression is None or is_true(expression, row):
            yield {name: row.variables[name] for name in columns}
