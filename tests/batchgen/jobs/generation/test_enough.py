"""When a row has enough samples: the rule on flags, against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.storage.shards.enough import FAILED, METADATA, OUTCOME, VALID, Enough, KeptRows
from batchgen.storage.shards.row_order import RowsInOrder

MOST = 6
Sample = tuple[bool, bool, bool]  # done, valid, failed
SAMPLES = st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([False] * 5 + [True])),
                   min_size=MOST, max_size=MOST)  # fmt: skip


RULES = st.one_of(
    st.integers(1, 3).map(lambda valid: Enough(valid, MOST)),
    st.sampled_from([0.45, 0.55, 0.65]).map(lambda width: Enough(None, MOST, width)),
)


def wilson_width(valid: int, n: int) -> float:
    """From end to end of the interval as it is usually written, from its two bounds."""
    z, share = 1.959963984540054, valid / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (centre + reach) - (centre - reach)


def _is_enough(rule: Enough, valid: int, n: int) -> bool:
    if rule.width is None:
        return valid >= (rule.valid or 0)
    return wilson_width(valid, n) <= rule.width


def _kept(row: list[Sample], rule: Enough) -> int:
    """How many samples a row keeps, 0 if that is not known, as the docstring of the module says."""
    so_far = 0
    for number, (done, is_valid, failed) in enumerate(row, start=1):
        if not done:
            return 0
        so_far += is_valid
        if _is_enough(rule, so_far, number) or failed or number == MOST:
            return number
    return 0


@given(rows=st.lists(SAMPLES, min_size=1, max_size=5), rule=RULES)
def test_how_many_samples_rows_keep(rows: list[list[Sample]], rule: Enough) -> None:
    done, is_valid, failed = np.moveaxis(np.array(rows), 2, 0)
    found = rule.num_kept(done, is_valid & done, failed & done)
    assert found.tolist() == [_kept(row, rule) for row in rows]
    for row, kept in zip(rows, found, strict=True):
        flags = np.array(row)
        wanted = rule.wanted(flags[:, 0], flags[:, 0] & flags[:, 1], ())
        if not kept:  # something is missing, and no more is begun than is kept in any case
            assert wanted and not flags[wanted, 0].any()
            choices = [[v] if d else [False, True] for d, v, _ in row]
            for valids in itertools.product(*choices):
                whole = [(True, v, d and f) for v, (d, _, f) in zip(valids, row, strict=True)]
                assert _kept(whole, rule) > wanted[-1] or any(f for *_, f in whole)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.2, 0.3, 0.45, 0.65])
def test_the_width_of_an_interval(width: float) -> None:
    rule, most = Enough(None, 400, width), 400
    for n in range(1, most + 1, 1 if width > 0.1 else 7):
        found = rule.is_reached(np.arange(n + 1), np.full(n + 1, n))
        assert found.tolist() == [wilson_width(valid, n) <= width for valid in range(n + 1)]
    ends = [n for n in range(1, most + 1) if rule.is_reached(np.array(0), np.array(n))]
    assert rule.fewest == ends[0]
    assert rule.metadata == {METADATA: b'{"most": 400, "width": %s}' % str(width).encode()}
    assert Enough.of(rule.metadata) == rule
    assert Enough.of({METADATA: b'{"valid": 2, "most": 6}'}) == Enough(2, 6)


@given(rows=st.lists(SAMPLES, min_size=1, max_size=5), rule=RULES)
def test_what_shards_leave_out(rows: list[list[Sample]], rule: Enough) -> None:
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
    kept = KeptRows(RowsInOrder(batches), rule)
    expected = [
        index * MOST + sample
        for index, row in enumerate(whole)
        for sample in range(_kept(row, rule))
    ]
    assert kept.indices.tolist() == expected
