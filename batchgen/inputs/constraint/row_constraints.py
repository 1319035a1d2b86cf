"""Reads each row's constraint from a column of the data set (`constraint.column`). `RowParams` uses
`RowConstraints`, and `batchgen validate` uses `cell_text`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from batchgen.config.groups.constraint_config import (
    ConstraintConfig,
    NoConstraintConfig,
    constraint_column,
)
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.json_text import compact_json
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.constraint.timed_checks import TimedConstraints
from batchgen.inputs.dataset.dataset_columns import named_path, value_at
from batchgen.inputs.dataset.source import Row

MAX_CACHED = 4096
"""The number of distinct cells whose constraints are cached."""
_MUST_HOLD = {
    "json_schema": "JSON text or a struct",
    "regex": "text",
    "choice": "a list of texts, or JSON text of one",
    "grammar": "text (EBNF)",
    "structural_tag": "JSON text or a struct",
}
"""What a cell must contain, by the kind of constraint, as error messages say it."""


class RowConstraints:
    """Makes the constraint of each row from its cell in the constraint column. Does nothing if the
    job has no such column."""

    def __init__(self, config: ConstraintConfig, features: Mapping[str, Any]) -> None:
        """Find the column of constraints.

        Args:
            config: the job's constraint.
            features: the types of the data set's columns, as `datasets` infers them.

        Raises:
            ConfigError: the data set lacks the column.
        """
        self._column = constraint_column(config)
        self._kind = config.kind
        if self._column is None:
            return
        assert not isinstance(config, NoConstraintConfig)
        self._path = named_path("constraint.column", self._column, features)
        # Many rows often have the same constraint, and checking a schema takes time.
        self._make_cached = lru_cache(MAX_CACHED)(TimedConstraints(config).make)

    def of(self, row: Row) -> Constraint | None:
        """Return the constraint in a row's cell; None if the cell is empty or the job has no such
        column.

        Raises:
            RequestError: the cell holds no valid constraint (`bad_constraint`).
        """
        if self._column is None:
            return None
        try:
            text = cell_text(self._kind, value_at(row.fields, self._path))
            return None if text is None else self._make_cached(text)
        except ConstraintError as error:
            raise RequestError("bad_constraint", f"column {self._column!r}: {error}") from None


def cell_text(kind: str, cell: Any) -> str | None:
    """Return the content of a cell of the constraint column as text; None if it is empty. A list of
    choices, a schema and a tag become JSON text.

    Raises:
        ConstraintError: this kind of constraint does not allow such a value.
    """
    if cell is None or isinstance(cell, str):
        return cell
    try:
        if isinstance(cell, dict) and kind in ("json_schema", "structural_tag"):
            return compact_json(cell)
        if isinstance(cell, list) and kind == "choice":
            return compact_json(cell)
    except RecursionError:
        raise ConstraintError("is nested too deeply") from None
    except (TypeError, ValueError) as error:  # a date or NaN in a struct, for example
        raise ConstraintError(f"must hold {_MUST_HOLD[kind]}, got invalid JSON: {error}") from None
    raise ConstraintError(f"must hold {_MUST_HOLD[kind]}, got {cell!r:.100}")
