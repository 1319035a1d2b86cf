"""The row step `Against` drops rows that share a passage with another data set, such as a
benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from batchgen.inputs.ngrams.word_ngrams import Hashes, ngram_hashes
from batchgen.inputs.steps.side_table import SideTable
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
from batchgen.inputs.steps.values import field_of, required_value
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Features


@dataclass(frozen=True, kw_only=True)
class Against(TableStep):
    """Takes out rows whose text shares `ngram` consecutive words with a text of another data set.

    This keeps the questions of a benchmark out of training data. Case and punctuation do not count.
    If a text of the other data set has fewer than `ngram` words, a row is taken out if its text has
    exactly these words. The other data set takes 12 bytes of memory for each of its words.

    Attributes:
        path: the other data set: files, a job's folder or the name of a data set on the hub.
        column: the column with the text of a row.
        other: the column with the text in the other data set; null for the same name.
        ngram: the number of consecutive words that are compared.
        name: the configuration of the other data set, if it has several.
        split: the split of the other data set, if it has several.
    """

    stable = True

    path: str
    column: str
    other: str | None = None
    ngram: int = 13
    name: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ngram <= 1000:
            raise ConfigError(f"ngram must be from 1 to 1000, got {self.ngram!r}")

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return (self.column,)

    def fingerprints(self) -> Mapping[str, str]:
        """Return a digest of the other data set."""
        return {"path": self._table.fingerprint}

    def made(self, features: Features) -> Features:
        """Return no columns. Raises ConfigError if the other data set lacks the column."""
        self._table.features([self.other or self.column])
        return super().made(features)

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        return _Against(self, *self._ngrams())

    @cached_property
    def _table(self) -> SideTable:
        return SideTable(self.path, self.name, self.split)

    def _ngrams(self) -> tuple[Hashes, Any]:
        """Return the hashes of the other data set's n-grams, sorted and distinct, [N] uint64; and
        for each the first row that has it, [N] uint32."""
        parts, rows = list[Hashes](), list[Any]()
        column = self.other or self.column
        for number, fields in enumerate(self._table.rows([column])):
            text = field_of(fields, column)
            if isinstance(text, str):
                parts.append(ngram_hashes(text, self.ngram))
                rows.append(np.full(len(parts[-1]), number, np.uint32))
        if not parts:
            raise ConfigError(f"path: {self.path} has no text in column {column!r}")
        hashes, first = np.unique(np.concatenate(parts), return_index=True)
        if not len(hashes):
            raise ConfigError(f"path: {self.path} has no words in column {column!r}")
        return hashes, np.concatenate(rows)[first]


class _Against:
    """A pass of `Against`.

    Args:
        hashes, rows: see `Against._ngrams`.
    """

    full = False

    def __init__(self, step: Against, hashes: Hashes, rows: Any) -> None:
        self._step, self._hashes, self._rows = step, hashes, rows

    def take(self, row: StepRow) -> Taken:
        step = self._step
        text = required_value(row.fields, step.column)
        if not isinstance(text, str):
            raise BadRow(f"column {step.column!r} must hold text to be compared, got {text!r:.50}")
        hashes = ngram_hashes(text, step.ngram)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        same = np.flatnonzero(self._hashes[at] == hashes)
        if not len(same):
            return KEPT
        other = self._rows[at[same]].min()
        return Dropped(f"{step.ngram} words as in row {other} of {step.path}")

    def close(self) -> None:
        pass
