"""Rejection sampling (`sampling.until`): when a row has enough samples, and which of them it keeps.

A row keeps the samples 0…m, where m is the first sample with one of these properties: with it,
`valid` samples are valid, or the interval of their share is at most `width` wide; it is the
`most`-th sample; or it has an error from before the engine, which all samples of the row would
have. Later samples are not part of the result. So the result depends on the samples alone, and not
on which of them happened to run.

`SampleWaves` begins samples by these rules, and the publisher of a shard drops the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.storage.shards.row_order import RowsInOrder, rows_of_keys

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

VALID, OUTCOME, NUM_VALID, NUM_SAMPLES = "valid", "outcome", "num_valid", "num_samples"
ENOUGH_COLUMNS = (
    (
        VALID,
        pa.bool_(),
        "whether the sample fulfils sampling.until.where; null for an error, and where the "
        "expression has no value",
    ),
    (
        OUTCOME,
        pa.string(),
        "enough: the row has sampling.until.valid valid samples, or the interval of their share is "
        "as narrow as sampling.until.width; exhausted: neither, with sampling.until.most samples; "
        "failed: nothing could be sampled. The same in all samples of a row; null or failed until "
        "all rows of the shard are finished",
    ),
    (
        NUM_VALID,
        pa.int32(),
        "how many samples of the row are valid; null until all rows of the shard are finished",
    ),
    (
        NUM_SAMPLES,
        pa.int32(),
        "how many samples the row has; null until all rows of the shard are finished",
    ),
)
"""The columns of jobs with `sampling.until`: name, type and meaning. The last three follow from all
samples of a row, and are filled when the shard is published."""
FAILED = "failed"
OUTCOMES = ("enough", "exhausted", FAILED)
METADATA = b"batchgen.until"
"""The key in a shard's metadata whose value is the `Enough` by which it was published."""
_Z = 1.959963984540054  # the 97.5% quantile of the normal distribution
_SLACK = 1e-9
"""The largest rounding error of a product of two counts."""


@dataclass(frozen=True)
class Enough:
    """The rule by which a row has enough samples.

    Attributes:
        valid: the number of valid samples that is enough; None with `width`.
        most: the most samples of a row.
        width: the 95% interval of Wilson (1927) of the share of valid samples is enough if it is at
            most this wide from end to end; None with `valid`.
    """

    valid: int | None
    most: int
    width: float | None = None

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """The entry in a shard's metadata."""
        return {METADATA: json.dumps(self.values).encode()}

    @property
    def values(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @staticmethod
    def of(metadata: Mapping[bytes, bytes] | None) -> Enough | None:
        """Read the settings from a shard's metadata; None if it has none."""
        try:
            return Enough.decoded(json.loads((metadata or {})[METADATA]))
        except (KeyError, ValueError, TypeError):
            return None

    @staticmethod
    def decoded(values: Mapping[str, Any]) -> Enough:
        """Make the settings from their JSON `values`."""
        return Enough(values.get("valid"), values["most"], values.get("width"))

    @property
    def fewest(self) -> int:
        """The fewest samples that a row can have, errors aside.

        By `width` these are all valid, or none is; the interval is then z² / (n + z²) wide.
        """
        if self.width is None:
            assert self.valid is not None
            return self.valid
        return max(1, math.ceil(_Z * _Z * (1 / self.width - 1) - _SLACK))

    @cached_property
    def _most_mixed(self) -> Floats:
        """[most] For n = 1, 2, … samples, the largest product of the numbers of valid and other
        samples for which the interval is narrow enough; negative if it never is.

        With k of n valid, the interval is 2z / (n + z²) · sqrt(k(n−k)/n + z²/4) wide. So it is at
        most `width` wide if k(n−k) ≤ n · ((width · (n + z²) / 2z)² − z²/4).
        """
        assert self.width is not None
        n = np.arange(1, self.most + 1)
        square = np.square(self.width * (n + _Z * _Z) / (2 * _Z)) - _Z * _Z / 4
        largest: Floats = np.floor(n * square + _SLACK)
        return largest

    def is_reached(self, valid: Ints | Floats, n: Ints) -> Bools:
        """Whether `valid` of the first `n` samples are enough, without regard to `most`."""
        if self.valid is not None:
            return np.asarray(valid >= self.valid)
        return np.asarray(valid * (n - valid) <= self._most_mixed[n - 1])

    def num_kept(self, done: Bools, valid: Bools, failed: Bools) -> Ints:
        """[R] The number of samples that each row keeps; 0 if that is not known yet.

        Args:
            done: [R, most] whether the sample is computed.
            valid: [R, most] whether it is valid.
            failed: [R, most] whether it has an error from before the engine.
        """
        leading = np.logical_and.accumulate(done, axis=1)
        ends = self.is_reached(_so_far(valid, axis=1), self._numbers) | failed
        ends[:, -1] = True  # a row ends at its `most`-th sample in any case
        ends &= leading  # not known beyond the first sample that is missing
        kept: Ints = np.where(ends.any(axis=1), np.argmax(ends, axis=1) + 1, 0)
        return kept

    def wanted(
        self, done: Bools, valid: Bools, begun: Collection[int], rate: float | None = None
    ) -> list[int]:
        """The samples of one row to begin now.

        With `rate` None these are the missing samples that the row keeps in any case. Otherwise
        they are those that it keeps if each missing sample counts as `rate` valid ones.

        Args:
            done: [most] whether the sample is computed.
            valid: [most] whether it is valid.
            begun: samples that have begun, and are left out.
        """
        valid_done, open_ = _so_far(valid & done), _so_far(~done)
        # A row ends at the earliest if all open samples are valid or, as the interval is also
        # narrow then, if none is. By `valid`, the second case changes nothing.
        if rate is None:
            ends = self.is_reached(valid_done, self._numbers)
            ends |= self.is_reached(valid_done + open_, self._numbers)
        else:
            ends = self.is_reached(valid_done + rate * open_, self._numbers)
        kept = int(np.argmax(ends)) + 1 if ends.any() else self.most
        return [int(i) for i in np.flatnonzero(~done[:kept]) if int(i) not in begun]

    @cached_property
    def _numbers(self) -> Ints:
        return np.arange(1, self.most + 1)


def _so_far(flags: Bools, axis: int = 0) -> Ints:
    """The number of flags that are set up to each index."""
    counts: Ints = np.cumsum(flags, axis=axis, dtype=np.int64)
    return counts


def marks_of(rows: pa.RecordBatch | pa.Table) -> tuple[Bools, Bools]:
    """[R], [R]: whether each sample is valid, and whether it has an error from before the
    engine."""
    valid = pc.fill_null(rows[VALID], fill_value=False).to_numpy(zero_copy_only=False)
    failed = pc.fill_null(pc.equal(rows[OUTCOME], FAILED), fill_value=False)
    return valid, failed.to_numpy(zero_copy_only=False)


def enough_text(until: Mapping[str, Any]) -> str:
    """Describe the values of `sampling.until` in a configuration in words."""
    if until.get("width") is not None:
        return f"the interval of valid ones is at most {until['width']:g} wide"
    return f"{until['valid']:,} are valid"


class KeptRows:
    """The rows of a shard that are kept, with values for the columns that follow from all samples
    of a row. The publisher of a shard uses it.

    Attributes:
        indices: [K] the indices of the kept rows in `RowsInOrder`.
    """

    def __init__(self, rows: RowsInOrder, enough: Enough) -> None:
        """Find the kept samples; every row must be complete."""
        marks = rows.table(np.arange(len(rows.keys)), [VALID, OUTCOME])
        valid, failed = marks_of(marks)
        # `group` numbers the input rows. Without rows the prepended True is cut off again.
        differs = np.diff(rows_of_keys(rows.keys)) != 0
        first = np.append(True, differs)[: len(rows.keys)]
        starts = np.flatnonzero(first)
        group = np.cumsum(first) - 1
        so_far = _so_far(valid)
        # For each sample, the number of valid samples in the shard before its row.
        before: Ints = (so_far - valid)[starts][group]
        # The number of each sample within its row, from 1. `is_reached` knows up to `most` samples.
        numbers = np.minimum(np.arange(1, len(group) + 1) - starts[group], enough.most)
        reached = enough.is_reached(so_far - before, numbers)
        ends = reached | failed
        # A sample is kept if no earlier sample of its row ends the row.
        earlier: Ints = np.cumsum(ends) - ends
        self.indices: Ints = np.flatnonzero(earlier == earlier[starts][group])
        kept = group[self.indices]
        sizes = np.bincount(kept, minlength=len(starts))
        valids = np.bincount(kept, valid[self.indices], len(starts)).astype(np.int64)
        fails = np.bincount(kept, failed[self.indices], len(starts)) > 0
        self._sizes, self._valids = sizes[kept], valids[kept]
        is_enough = enough.is_reached(valids, np.maximum(sizes, 1))
        outcomes = np.where(fails, 2, np.where(is_enough, 0, 1))  # indices into OUTCOMES
        self._outcomes = outcomes[kept]

    def filled(self, table: pa.Table, at: slice) -> pa.Table:
        """Fill the columns of a table that has the kept rows `at`."""
        values = {
            OUTCOME: pa.array(OUTCOMES).take(pa.array(self._outcomes[at])),
            NUM_VALID: pa.array(self._valids[at], pa.int32()),
            NUM_SAMPLES: pa.array(self._sizes[at], pa.int32()),
        }
        for name, column in values.items():
            index = table.schema.get_field_index(name)
            table = table.set_column(index, table.schema.field(index), column)
        return table
