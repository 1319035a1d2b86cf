"""The row steps that select rows: `Filter` by a condition, `Balance` a limited number per kind, and
`Keep` a random share or the first rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.inputs.steps.table_step import (
    KEPT,
    BadRow,
    Dropped,
    Pass,
    StepRow,
    TableStep,
    Taken,
    Tools,
)
from batchgen.inputs.steps.values import (
    columns_of,
    digest,
    field_of,
    hashed_number,
    key_text,
    value_repr,
)
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_expression import ExpressionFailed, RowExpression

if TYPE_CHECKING:
    from datasets import Features


@dataclass(frozen=True, kw_only=True)
class Filter(TableStep):
    """Keeps the rows for which a condition is true. If the condition cannot be computed for a row,
    because a value is null or has another type, the row becomes an error row.

    Attributes:
        where: a Jinja expression over the columns: `language == 'en' and text|length > 200`.
            `row_id` is the row's id, and `row` has all columns: `row['a name']`.
    """

    stable = True

    where: str

    def made(self, features: Features) -> Features:
        """Return no columns. Raises ConfigError if the condition reads a column that does not
        exist."""
        RowExpression("where", self.where, list(features))
        return super().made(features)

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        return _Filter(RowExpression("where", self.where, list(tools.features)), self.where)


class _Filter:
    """A pass of `Filter`."""

    full = False

    def __init__(self, expression: RowExpression, where: str) -> None:
        self._expression = expression
        self._dropped = Dropped(f"{value_repr(where)} is false")

    def take(self, row: StepRow) -> Taken:
        try:
            is_true = self._expression.is_true(row.fields, row.id, row.index)
        except ExpressionFailed as error:
            raise BadRow(str(error)) from None
        return KEPT if is_true else self._dropped

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Balance(TableStep):
    """Keeps at most `most` rows of each kind: the first ones.

    Attributes:
        by: a column, or a list of columns. Rows with the same values in these are of one kind.
        most: the maximum number of rows of a kind.
    """

    stable = True
    has_state = True

    by: tuple[str, ...]
    most: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", columns_of(self.by))
        if not self.by:
            raise ConfigError(f"by must be a column or a list of columns, got {self.by!r}")
        if self.most < 1:
            raise ConfigError(f"most must be at least 1, got {self.most!r}")

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return self.by

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        return _Balance(self)


class _Balance:
    """A pass of `Balance`: the number of rows of each kind so far, by a digest of the kind."""

    full = False

    def __init__(self, step: Balance) -> None:
        self._names, self._most = step.field_names, step.most
        self._counts: dict[bytes, int] = {}

    def take(self, row: StepRow) -> Taken:
        kind = digest(key_text(row.fields, self._names))
        count = self._counts.get(kind, 0)
        if count >= self._most:
            kinds = ", ".join(value_repr(field_of(row.fields, name)) for name in self._names)
            return Dropped(f"{self._most:,} earlier rows have {kinds}")
        self._counts[kind] = count + 1
        return KEPT

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Keep(TableStep):
    """Keeps a random share of the rows, or the first rows. Set either `share` or `rows`.

    Attributes:
        share: the share of rows to keep, from 0 to 1. The hash of a row's id decides, so it does
            not depend on other rows, and a larger share keeps all rows that a smaller one keeps.
        rows: how many rows to keep. Once there are that many, no more of the data set is read.
    """

    stable = True
    takes_failed = True

    share: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.rows is None):
            raise ConfigError("give either share or rows")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share!r}")
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"rows must be at least 1, got {self.rows!r}")

    @property
    def has_state(self) -> bool:  # type: ignore[override]
        """Whether the step remembers rows: with the option `rows`, it counts them."""
        return self.rows is not None

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        # A share needs no state, so the step itself is its pass.
        return self if self.rows is None else _First(self.rows)

    def take(self, row: StepRow) -> Taken:
        """Keep or drop a row by the hash of its id."""
        assert self.share is not None
        return (
            KEPT
            if hashed_number("keep", row.id) < self.share * 2**64
            else Dropped("not in the random share")
        )


class _First:
    """A pass of `Keep` with the option `rows`."""

    def __init__(self, rows: int) -> None:
        self._left = self._rows = rows

    @property
    def full(self) -> bool:
        return not self._left

    def take(self, row: StepRow) -> Taken:
        if not self._left:
            return Dropped(f"after the first {self._rows:,} rows")
        self._left -= 1
        return KEPT

    def close(self) -> None:
        pass
