"""When a row has enough samples: the rule on flags, against its definition."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchgen.storage.shards.enough import FAILED, OUTCOME, VALID, Enough, KeptRows
from batchgen.storage.shards.row_order import RowsInOrder

MOST = 6
Sample = tuple[bool, bool, bool]  # done, valid, failed
SAMPLES = st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([False] * 5 + [True])),
                   min_size=MOST, max_size=MOST)  # fmt: skip


def _kept(row: list[Sample], valid: int) -> int:
    """How many samples a row keeps, 0 if that is not known, as the docstring of the module says."""
    so_far = 0
    for number, (done, is_valid, failed) in enumerate(row, start=1):
        if not done:
            return 0
        so_far += is_valid
        if so_far == valid or failed or number == MOST:
            return number
    return 0


@given(rows=st.lists(SAMPLES, min_size=1, max_size=5), valid=st.integers(1, 3))
def test_how_many_samples_rows_keep(rows: list[list[Sample]], valid: int) -> None:
    done, is_valid, failed = np.moveaxis(np.array(rows), 2, 0)
    enough = Enough(valid, MOST)
    found = enough.num_kept(done, is_valid & done, failed & done)
    assert found.tolist() == [_kept(row, valid) for row in rows]
    for row, kept in zip(rows, found, strict=True):
        flags = np.array(row)
        wanted = enough.wanted(flags[:, 0], flags[:, 0] & flags[:, 1], ())
        if not kept:  # something is missing, and no more is begun than is kept in any case
            assert wanted
            for sample in wanted:
                before = [not d or v for d, v, _ in row[:sample]]
                assert sum(before) < valid and not row[sample][0]


@given(rows=st.lists(SAMPLES, min_size=1, max_size=5), valid=st.integers(1, 3))
def test_what_shards_leave_out(rows: list[list[Sample]], valid: int) -> None:
    whole = [[(True, v, f) for _, v, f in row] for row in rows]
    batches = [
        pa.record_batch(
            {
                "row_index": pa.array([index] * MOST, pa.int64()),
                "sample_index": pa.array(range(MOST), pa.int32()),
                VALID: [v for _, v, _ in row],
                OUTCOME: pa.array([FAILED if f else None for _, _, f in row], pa.string()),
            }
        )
        for index, row in enumerate(whole)
    ]
    kept = KeptRows(RowsInOrder(batches), Enough(valid, MOST))
    expected = [
        index * MOST + sample
        for index, row in enumerate(whole)
        for sample in range(_kept(row, valid))
    ]
    assert kept.places.tolist() == expected
