"""When a row has enough samples, in jobs with `sampling.until`, and which of them it keeps.

A row keeps the samples 0…m, where m is the first of these: the sample that makes `valid` samples
valid, the `most`-th sample, or one with an error from before the engine, which all samples of the
row would have. What was computed beyond m is no part of the result, so that this depends on the
samples alone and not on which of them ran.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.storage.shards.row_order import RowsInOrder

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

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
        "enough: the row has sampling.until.valid valid samples; exhausted: it has fewer and "
        "sampling.until.most samples; failed: nothing could be sampled. The same in all samples of "
        "a row; null or failed in a journal",
    ),
    (NUM_VALID, pa.int32(), "how many samples of the row are valid; null in a journal"),
    (NUM_SAMPLES, pa.int32(), "how many samples the row has; null in a journal"),
)
"""The columns of jobs with `sampling.until`. The last three follow from all samples of a row, and
are filled when the shard is published."""
FAILED = "failed"
OUTCOMES = ("enough", "exhausted", FAILED)
METADATA = b"batchgen.until"
"""The key in a shard's metadata that says by which `Enough` it was published."""


@dataclass(frozen=True)
class Enough:
    """A row is complete with `valid` valid samples, or with `max_samples` samples."""

    valid: int
    max_samples: int

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """What a shard's metadata hold."""
        return {METADATA: json.dumps(asdict(self)).encode()}

    @staticmethod
    def of(metadata: Mapping[bytes, bytes] | None) -> Enough | None:
        """What the metadata of a shard say; None if they say nothing."""
        try:
            return Enough(**json.loads((metadata or {})[METADATA]))
        except (KeyError, ValueError, TypeError):
            return None

    def num_kept(self, done: Bools, valid: Bools, failed: Bools) -> Ints:
        """How many samples each row keeps, 0 if that is not known yet. [R]

        Args:
            done: [R, most] which samples are there.
            valid: [R, most] which of them are valid.
            failed: [R, most] which of them have an error from before the engine.
        """
        leading = np.logical_and.accumulate(done, axis=1)
        ends = (np.cumsum(valid, axis=1) >= self.valid) | failed
        ends[:, -1] = True
        ends &= leading
        kept: Ints = np.where(ends.any(axis=1), np.argmax(ends, axis=1) + 1, 0)
        return kept

    def wanted(
        self, done: Bools, valid: Bools, begun: Collection[int], rate: float = 1.0
    ) -> list[int]:
        """The samples of one row to begin now: those that it will keep if each sample that is not
        there yet counts as `rate` valid ones. With a rate of 1 it keeps them in any case.

        Args:
            done: [most] which samples are there.
            valid: [most] which of them are valid.
            begun: further samples that are on their way.
        """
        found, expected = list[int](), 0.0
        for sample in range(self.max_samples):
            if expected >= self.valid:
                break
            if done[sample]:
                expected += float(valid[sample])
                continue
            expected += rate
            if sample not in begun:
                found.append(sample)
        return found


def marks_of(rows: pa.RecordBatch | pa.Table) -> tuple[Bools, Bools]:
    """[R], [R]: which samples are valid, and which have an error from before the engine."""
    valid = pc.fill_null(rows[VALID], False).to_numpy(zero_copy_only=False)
    failed = pc.fill_null(pc.equal(rows[OUTCOME], FAILED), False).to_numpy(zero_copy_only=False)
    return valid, failed


class KeptRows:
    """The rows of a shard without what its input rows do not keep, and with the columns that follow
    from all samples of a row.

    Attributes:
        places: [K] the places in the order of `RowsInOrder`.
    """

    def __init__(self, rows: RowsInOrder, enough: Enough) -> None:
        """Find them among rows of which each is complete."""
        marks = rows.table(np.arange(len(rows.keys)), [VALID, OUTCOME])
        valid, failed = marks_of(marks)
        first = np.append(True, np.diff(rows.keys >> 31) != 0)[: len(rows.keys)]
        starts = np.flatnonzero(first)
        group = np.cumsum(first) - 1
        so_far = np.cumsum(valid)
        before: Ints = (so_far - valid)[starts][group]
        ends = (so_far - before >= enough.valid) | failed
        earlier: Ints = np.cumsum(ends) - ends
        self.places: Ints = np.flatnonzero(earlier == earlier[starts][group])
        kept = group[self.places]
        sizes = np.bincount(kept, minlength=len(starts))
        valids = np.bincount(kept, valid[self.places], len(starts)).astype(np.int64)
        fails = np.bincount(kept, failed[self.places], len(starts)) > 0
        self._sizes, self._valids = sizes[kept], valids[kept]
        outcomes = np.where(fails, 2, np.where(valids >= enough.valid, 0, 1))
        self._outcomes = outcomes[kept]

    def filled(self, table: pa.Table, at: slice) -> pa.Table:
        """The table of the kept rows `at` these places among them, with their columns filled."""
        values = {
            OUTCOME: pa.array(OUTCOMES).take(pa.array(self._outcomes[at])),
            NUM_VALID: pa.array(self._valids[at], pa.int32()),
            NUM_SAMPLES: pa.array(self._sizes[at], pa.int32()),
        }
        for name, column in values.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(place), column)
        return table
