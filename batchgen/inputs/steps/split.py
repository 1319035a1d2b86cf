"""The row step `Explode`, which makes a row of each item of a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.inputs.steps.table_step import BadRow, Dropped, SplittingStep, StepRow, Taken
from batchgen.inputs.steps.values import feature_of, field_of
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features


@dataclass(frozen=True, kw_only=True)
class Explode(SplittingStep):
    """Makes a row of each item of a list. The new rows have the id of the old one with `#0`, `#1` …
    at its end.

    An empty list gives no rows. The output does not contain the list any more, but prompts can
    still use it. A row without a list becomes an error row.

    Attributes:
        column: the list. The path of a list inside a struct has dots: `plan.questions`.
        as_: the name of the column with the item; null for the name of the list's column.
        most: a row with a longer list becomes an error row.
    """

    column: str
    as_: str | None = None
    most: int = 1000

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"most must be at least 1, got {self.most!r}")

    def made(self, features: Features) -> Features:
        """Return the item's column. Raises ConfigError if the column does not hold lists."""
        from datasets import Features
        from datasets.features import Json, LargeList, List, Value

        feature = feature_of(features, self.column)
        if isinstance(feature, (List, LargeList)):
            return Features({self.name: feature.feature})
        if isinstance(feature, list):
            return Features({self.name: feature[0]})
        if isinstance(feature, Json) or feature == Value("null"):
            return Features({self.name: Json()})
        kind = getattr(feature, "dtype", type(feature).__name__)
        raise ConfigError(f"column {self.column!r} holds {kind}, and Explode takes lists")

    def stored(self, features: Features) -> Features:
        """Return no columns: the row index stores no items, because `restored` reads them from the
        list in the data set."""
        from datasets import Features

        return Features({})

    def take(self, row: StepRow) -> Taken:
        """Return a row for each item. Raises BadRow for no list, or one that is too long."""
        items = field_of(row.fields, self.column)
        if not isinstance(items, list):
            what = "null" if items is None else f"{type(items).__name__} {items!r:.40}"
            raise BadRow(f"column {self.column!r} must hold a list, got {what}")
        if len(items) > self.most:
            raise BadRow(
                f"column {self.column!r} has {len(items):,} items, more than most={self.most:,}"
            )
        return [{self.name: item} for item in items] or Dropped("the list is empty")

    def restored(self, fields: Mapping[str, Any], k: int, stored: Mapping[str, Any]) -> Any:
        """Return the item's column with item `k` of the list, which is read from `fields`, a row of
        the data set."""
        return {self.name: field_of(fields, self.column)[k]}
