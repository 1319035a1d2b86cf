"""Each row's constraint: the job's, or what stands in a column of the row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from batchgen.config import (
    AnyConstraintConfig,
    ConstraintConfig,
    NoConstraintConfig,
    constraint_column,
    job_constraint,
    make_constraint,
)
from batchgen.constraint.json_text import compact_json, parse_json
from batchgen.dataset.source import Row
from batchgen.dataset.stored_json import without_filled_nulls
from batchgen.engine.constraint.constraint import Constraint, ConstraintError
from batchgen.engine.outputs import RequestError
from batchgen.errors import ConfigError

MAX_CACHED = 4096  # distinct cells
_MUST_HOLD = {
    "json_schema": "JSON text or a struct",
    "regex": "text",
    "choice": "a list of texts, or JSON text of one",
    "grammar": "text (EBNF)",
    "structural_tag": "JSON text or a struct",
}


class RowConstraints:
    """What each row's output must look like."""

    def __init__(self, config: ConstraintConfig, features: Mapping[str, Any]) -> None:
        """
        Args:
            features: the data set's columns, with what datasets says that they hold.

        Raises:
            ConfigError: the data set has no such column.
            ConstraintError: the job's constraint is not one.
        """
        self._column = constraint_column(config)
        self._job = job_constraint(config)
        self._kind = config.kind
        if self._column is None:
            return
        assert not isinstance(config, NoConstraintConfig)
        if self._column not in features:
            raise ConfigError(
                f"constraint.column: the data set has no column {self._column!r}: choose among "
                f"{', '.join(features)}"
            )
        self._feature = features[self._column]
        # Rows often share theirs, and a schema takes time to check.
        self._made = lru_cache(MAX_CACHED)(partial(_made, config))

    def of(self, row: Row) -> Constraint | None:
        """None if the row may write anything.

        Raises:
            RequestError: bad_constraint, the row's cell holds none.
        """
        if self._column is None:
            return self._job
        try:
            text = cell_text(self._kind, row.fields.get(self._column), self._feature)
            return None if text is None else self._made(text)
        except ConstraintError as error:
            raise RequestError("bad_constraint", f"column {self._column!r}: {error}") from None


def cell_text(kind: str, cell: Any, feature: Any) -> str | None:
    """What a column holds for one row, as text: of choices, schemas and tags their JSON.

    Args:
        feature: of the column, in datasets' words.

    Raises:
        ConstraintError: it is no text, nor what else may stand there.
    """
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, dict) and kind in ("json_schema", "structural_tag"):
        return compact_json(without_filled_nulls(cell, feature))
    if isinstance(cell, list) and kind == "choice":
        return compact_json(cell)
    raise ConstraintError(f"must hold {_MUST_HOLD[kind]}, got {_short(cell)}")


def choices_of(text: str) -> list[str]:
    """The choices that `cell_text` has as text.

    Raises:
        ConstraintError: it is not JSON of a list of texts.
    """
    try:
        choices = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"must hold {_MUST_HOLD['choice']}: {error}") from None
    if not (isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        raise ConstraintError(f"must hold {_MUST_HOLD['choice']}, got {_short(choices)}")
    return choices


def _made(config: AnyConstraintConfig, text: str) -> Constraint:
    return make_constraint(config, choices_of(text) if config.kind == "choice" else text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
