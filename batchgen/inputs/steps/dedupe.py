"""The step that takes out rows which say what one before has said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.inputs.ngrams.kept_rows import HashTable, SpillFile
from batchgen.inputs.ngrams.near_duplicates import NearDuplicates
from batchgen.inputs.ngrams.word_ngrams import ngram_hashes
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
from batchgen.inputs.steps.values import columns_of, digest, key_text, required_value
from batchgen.util.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Dedupe(TableStep):
    """Takes out rows whose values were there before; the first row stays.

    Nearly the same are texts whose sets of word n-grams have a Jaccard similarity (those in both
    over those in any) of `near` or more. They are found by MinHash, 95 of 100 pairs that are just
    as similar as `near` and nearly all that are more similar, and then compared in full, so none is
    taken out that is less similar. Case and punctuation do not count. A million rows take about
    100 MB of memory, and 8 bytes of a temporary file for each word.

    Attributes:
        by: a column, or a list of columns that are compared together.
        near: null for the same values; from 0.5 to 1 for texts that are nearly the same.
        ngram: with `near`, how many words are compared at a time.
    """

    stable = True
    has_state = True

    by: tuple[str, ...]
    near: float | None = None
    ngram: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", columns_of(self.by))
        if not self.by or len(set(self.by)) != len(self.by):
            raise ConfigError(f"by must be a column or a list of columns, got {self.by!r}")
        if self.near is not None and not 0.5 <= self.near <= 1:
            raise ConfigError(f"near must be null or from 0.5 to 1, got {self.near!r}")
        if not 1 <= self.ngram <= 100:
            raise ConfigError(f"ngram must be from 1 to 100, got {self.ngram!r}")

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return self.by

    def start(self, tools: Tools) -> Pass:
        """The step at the first row."""
        return _Exact(self) if self.near is None else _Near(self, self.near)


class _Exact:
    """The values that were there so far: 20 bytes of memory a row, on the disk 16 and its id."""

    full = False

    def __init__(self, step: Dedupe) -> None:
        self._names = step.field_names
        self._table, self._kept = HashTable(), SpillFile()

    def take(self, row: StepRow) -> Taken:
        found = digest(key_text(row.fields, self._names))
        value = int.from_bytes(found[:8], "little")
        for number in self._table.find(value):
            kept = self._kept.read(number)
            if kept[:16] == found:
                return Dropped(f"same as {kept[16:].decode('utf-8', 'surrogatepass')}")
        kept = found + row.id.encode("utf-8", "surrogatepass")
        self._table.add(value, self._kept.append(kept))
        return KEPT

    def close(self) -> None:
        self._kept.close()


class _Near:
    full = False

    def __init__(self, step: Dedupe, near: float) -> None:
        self._names, self._ngram = step.field_names, step.ngram
        self._texts = NearDuplicates(near)

    def take(self, row: StepRow) -> Taken:
        texts = [required_value(row.fields, name) for name in self._names]
        for name, text in zip(self._names, texts, strict=True):
            if not isinstance(text, str):
                raise BadRow(f"column {name!r} must hold text to be compared, got {text!r:.50}")
        found = self._texts.earlier(ngram_hashes("\n".join(texts), self._ngram), row.id)
        return KEPT if found is None else Dropped(f"near {found.name}, {found.similarity:.2f}")

    def close(self) -> None:
        self._texts.close()
