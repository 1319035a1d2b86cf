"""The row step `Dedupe` drops rows that repeat an earlier one, exactly or nearly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """Takes out each row that is the same as an earlier row, or nearly the same, in the columns
    `by`.

    With `near`, texts are nearly the same if the Jaccard similarity of their sets of word n-grams
    is `near` or more: the number of n-grams in both texts over that in either one. Case and
    punctuation do not count. MinHash finds candidates: 95 of 100 pairs whose similarity is just
    `near`, and nearly all pairs that are more similar. Their similarity is then computed in full,
    so no row is taken out that is less similar. A million rows take about 100 MB of memory, and 8
    bytes of a temporary file for each word.

    With `cosine`, vectors, such as those of a job's column `embedding`, are nearly the same if
    their cosine similarity is `cosine` or more. Each vector is compared with all that were kept, so
    the time grows with the square of the number of rows. Memory holds four bytes for each number of
    a vector that is kept.

    Attributes:
        by: a column, or a list of columns that are compared together.
        near: the minimum similarity of texts, from 0.5 to 1; null takes out equal values only.
        ngram: the number of words of an n-gram, for `near`.
        cosine: the minimum similarity of vectors in one column, above -1 and at most 1; null if the
            column does not hold vectors.
    """

    stable = True
    has_state = True

    by: tuple[str, ...]
    near: float | None = None
    ngram: int = 3
    cosine: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", columns_of(self.by))
        if not self.by or len(set(self.by)) != len(self.by):
            raise ConfigError(f"by must be a column or a list of columns, got {self.by!r}")
        if self.near is not None and not 0.5 <= self.near <= 1:
            raise ConfigError(f"near must be null or from 0.5 to 1, got {self.near!r}")
        if not 1 <= self.ngram <= 100:
            raise ConfigError(f"ngram must be from 1 to 100, got {self.ngram!r}")
        if self.cosine is not None and not -1 < self.cosine <= 1:
            raise ConfigError(f"cosine must be null or above -1 to 1, got {self.cosine!r}")
        if self.cosine is not None and (self.near is not None or len(self.by) > 1):
            raise ConfigError(
                "cosine compares the vectors of one column: leave near out, and name one column in "
                "by"
            )

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return self.by

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        if self.cosine is not None:
            return _Vectors(self.by[0], self.cosine)
        return _Exact(self) if self.near is None else _Near(self, self.near)


class _Exact:
    """A pass of `Dedupe` for equal values. A row that is kept takes 20 bytes of memory, and 16
    bytes and its id on disk."""

    full = False

    def __init__(self, step: Dedupe) -> None:
        self._names = step.field_names
        self._table, self._kept = HashTable(), SpillFile()

    def take(self, row: StepRow) -> Taken:
        key = digest(key_text(row.fields, self._names))
        value = int.from_bytes(key[:8], "little")
        for number in self._table.find(value):
            kept = self._kept.read(number)  # the digest (16 bytes) and the id of a row
            if kept[:16] == key:
                return Dropped(f"same as {kept[16:].decode('utf-8', 'surrogatepass')}")
        kept = key + row.id.encode("utf-8", "surrogatepass")
        self._table.add(value, self._kept.append(kept))
        return KEPT

    def close(self) -> None:
        self._kept.close()


class _Near:
    """A pass of `Dedupe` for texts that are nearly the same."""

    full = False

    def __init__(self, step: Dedupe, near: float) -> None:
        self._names, self._ngram = step.field_names, step.ngram
        self._texts = NearDuplicates(near)

    def take(self, row: StepRow) -> Taken:
        texts = [required_value(row.fields, name) for name in self._names]
        for name, text in zip(self._names, texts, strict=True):
            if not isinstance(text, str):
                raise BadRow(f"column {name!r} must hold text to be compared, got {text!r:.50}")
        earlier = self._texts.earlier(ngram_hashes("\n".join(texts), self._ngram), row.id)
        return (
            KEPT if earlier is None else Dropped(f"near {earlier.name}, {earlier.similarity:.2f}")
        )

    def close(self) -> None:
        self._texts.close()


_PRODUCT_ERROR = 1e-4
"""The maximum error of a dot product in float32."""
_STORED_ERROR = 1e-6
"""The maximum error of the cosine of two stored vectors, whose numbers are rounded to float32. This
tolerance lets `cosine: 1` drop equal vectors."""


class _Vectors:
    """A pass of `Dedupe` for vectors: the vectors of the kept rows, [N, size] float32, each divided
    by its length."""

    full = False

    def __init__(self, name: str, minimum: float) -> None:
        self._name, self._minimum = name, minimum
        self._ids: list[str] = []
        self._kept = np.empty((0, 0), np.float32)

    def take(self, row: StepRow) -> Taken:
        vector = self._vector(required_value(row.fields, self._name))
        count = len(self._ids)
        products = self._kept[:count] @ vector if count else np.empty(0, np.float32)
        for index in np.flatnonzero(products >= self._minimum - _PRODUCT_ERROR).tolist():
            # Exact sums, so that no two machines decide differently.
            cosine = math.fsum(self._kept[index].astype(np.float64) * vector)
            if cosine >= self._minimum - _STORED_ERROR:
                return Dropped(f"near {self._ids[index]}, {cosine:.4f}")
        if count == len(self._kept):
            grown = np.empty((max(2 * count, 256), len(vector)), np.float32)
            if count:
                grown[:count] = self._kept
            self._kept = grown
        self._kept[count] = vector
        self._ids.append(row.id)
        return KEPT

    def _vector(self, value: object) -> npt.NDArray[np.float32]:
        """Return a row's vector [size], divided by its length. Raises BadRow if the value is no
        such vector."""
        is_numeric = isinstance(value, list) and all(type(x) in (int, float) for x in value)
        try:
            vector = np.array(value if is_numeric else [], np.float64)
            length = math.sqrt(math.fsum(vector * vector))
        except OverflowError:  # an integer, or the sum of the squares, is beyond float64
            length = math.inf
        if not 0 < length < math.inf or (self._ids and len(vector) != self._kept.shape[1]):
            raise BadRow(
                f"column {self._name!r} must hold vectors of one size to be compared, with numbers "
                f"that are not all 0, got {value!r:.50}"
            )
        return (vector / length).astype(np.float32)

    def close(self) -> None:
        self._kept = np.empty((0, 0), np.float32)
