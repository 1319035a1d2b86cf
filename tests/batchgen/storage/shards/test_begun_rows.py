"""Records of rows that are begun: the longest of a sample counts, as long as it is of the row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchgen.engine.interface.outputs import Begun, OutputColumn, RowCount
from batchgen.storage.leases.lease_files import BEGUN
from batchgen.storage.shards.begun_rows import BegunRow, BegunRows, begun_schema, encode_begun
from batchgen.storage.shards.journal import Journal
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.output_writer import OutputWriter
from tests.support.jobs.output_rows import SCHEMA, finished_row, open_writer

KEY, OTHER = b"k" * 16, b"o" * 16


def tokens(start: int, stop: int, of: int = 0) -> Begun:
    ids = [1000 * of + i for i in range(start, stop)]
    values = np.array(ids, np.float32)
    best = np.repeat(values, 6).reshape(-1, 2, 3)
    return Begun(ids, {"logprobs": -values, "top_logprobs": best})


def record(row: int, sample: int, start: int, stop: int, key: bytes = KEY) -> BegunRow:
    return BegunRow(row, sample, key, start, tokens(start, stop))


def found(writer: OutputWriter, row: int, sample: int, key: bytes = KEY) -> list[int] | None:
    begun = writer.begun(row, sample, lambda: key)
    if begun is None:
        return None
    expected = tokens(0, len(begun.token_ids))
    for name, values in expected.columns.items():
        np.testing.assert_array_equal(begun.columns[name], values, strict=True)
    return begun.token_ids


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "journal").glob(f"*{BEGUN}"))


def test_records_of_every_kind_of_column_come_back() -> None:
    columns = (
        OutputColumn("flag", np.dtype(np.bool_)),
        OutputColumn("small", np.dtype(np.uint8), (2, 3)),
        OutputColumn("seen", np.dtype(np.uint16), (2,), "context"),
        OutputColumn("scored", np.dtype(np.float32), (), "answer"),
    )
    counts = (RowCount("num_forwards", "forwards"),)
    schema = OutputSchema.build(pa.schema([]), columns, counts, prompt_token_ids=False)
    assert [name for name in begun_schema(schema).names if name in ("seen", "scored")] == ["seen"]
    rng, rows = np.random.default_rng(0), BegunRows(range(10, 20))
    whole = {
        "flag": rng.random(9) < 0.5,
        "small": rng.integers(0, 255, (9, 2, 3)).astype(np.uint8),
        "seen": rng.integers(0, 60000, (4 + 8, 2)).astype(np.uint16),  # a prompt of 4 tokens
    }
    for start, stop in ((0, 2), (2, 3), (3, 9)):
        of_context = slice(4 + start - 1 if start else 0, 4 + stop - 1)
        part = {
            name: values[of_context if name == "seen" else slice(start, stop)]
            for name, values in whole.items()
        }
        begun = Begun(list(range(start, stop)), part, {"num_forwards": stop})
        other = BegunRow(12, 1, KEY, 0, Begun([5], {n: v[:1] for n, v in whole.items()}, {}))
        batch = encode_begun(schema, [other, BegunRow(11, 0, KEY, start, begun)])
        rows.take(batch, attempt=1)
    read = rows.find(11, 0, lambda: KEY, schema, retried=False)
    assert read is not None
    assert read.token_ids == list(range(9)) and read.counts == {"num_forwards": 9}
    for name, values in whole.items():
        np.testing.assert_array_equal(read.columns[name], values, strict=True)


def test_the_longest_record_of_a_sample_counts(tmp_path: Path) -> None:
    with open_writer(tmp_path, worker=1) as first:
        first.take(0)
        first.write_begun([record(1, 0, 0, 4), record(1, 1, 0, 3)])
        first.write_begun([record(1, 0, 4, 6)])
        with open_writer(tmp_path, worker=2, older=first.older) as second:
            second.take(0)
            assert found(second, 1, 0) == list(range(6))
            second.write_begun([record(1, 0, 0, 5), record(1, 1, 0, 7)])
            first.write_begun([record(1, 0, 6, 8)])
            with open_writer(tmp_path, worker=3, older=first.older) as third:
                third.take(0)
                assert found(third, 1, 0) == list(range(8))
                assert found(third, 1, 1) == list(range(7))
                assert found(third, 1, 2) is found(third, 2, 0) is None
                assert found(third, 1, 0, OTHER) is None


def test_a_record_behind_a_gap_is_passed_over(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.take(0)
        writer.write_begun([record(1, 0, 0, 4), record(1, 1, 3, 6), record(100, 0, 0, 2)])
        writer.write_begun([record(1, 0, 5, 9), record(1, 0, 4, 6, OTHER)])
        assert found(writer, 1, 0) == list(range(4))
        assert found(writer, 1, 1) is None
        writer.write_begun([record(1, 0, 0, 2)])  # it has begun again
    with open_writer(tmp_path) as writer:
        writer.take(0)
        assert found(writer, 1, 0) == list(range(2))


def test_records_go_with_their_shard(tmp_path: Path) -> None:
    with open_writer(tmp_path, worker=1) as writer:
        for shard in (0, 1):
            writer.take(shard)
        writer.write_begun([record(1, 0, 0, 4), record(6, 0, 0, 4)])
        assert len(names(tmp_path)) == 2
        writer.write([finished_row(row, sample) for row in range(5) for sample in range(3)])
        writer.flush()
        assert names(tmp_path) == ["part-00001.0001.begun"]
        writer.write_begun([record(1, 1, 0, 4)])  # of a shard that is not open
        assert names(tmp_path) == ["part-00001.0001.begun"]
        assert writer.begun(1, 1, lambda: KEY) is None


def test_records_of_rows_that_the_job_has_no_longer_are_passed_over(tmp_path: Path) -> None:
    """After a lower dataset.limit."""
    with open_writer(tmp_path) as writer:
        writer.take(0)
        writer.write([finished_row(0, 0)])
        writer.write_begun([record(1, 0, 0, 4), record(4, 0, 0, 4)])
    with open_writer(tmp_path, num_rows=3) as writer:
        writer.take(0)
        assert found(writer, 1, 0) == list(range(4))


def test_a_finished_row_makes_its_record_superfluous(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.take(0)
        writer.write_begun([record(1, 0, 0, 4), record(2, 0, 0, 4)])
    with open_writer(tmp_path) as writer:
        writer.take(0)
        writer.write([finished_row(1, 0), finished_row(2, 0)])
    with open_writer(tmp_path) as writer:
        assert writer.resumed == 2 and names(tmp_path) == []


@pytest.mark.parametrize("published", [False, True])
def test_an_error_that_is_computed_again_begins_again(tmp_path: Path, published: bool) -> None:
    """A row that is no error goes on, and so does one that was begun in the round of retries."""
    with open_writer(tmp_path, worker=1) as writer:
        writer.take(0)
        writer.write_begun([record(3, 0, 0, 4), record(1, 0, 0, 4)])
        records = (tmp_path / "journal/part-00000.0001.begun").read_bytes()
        rows = [finished_row(row, sample) for row in range(5) for sample in range(3)]
        writer.write(rows if published else rows[5:])  # row 3 has an error
    if published:  # a kill has left them
        (tmp_path / "journal/part-00000.0001.begun").write_bytes(records)
    with open_writer(tmp_path, worker=2, retry_errors=True) as writer:
        assert writer.retried == 3
        writer.take(0)
        assert found(writer, 3, 0) is None
        if not published:
            assert found(writer, 1, 0) == list(range(4))
        writer.write_begun([record(3, 0, 0, 5)])
    with open_writer(tmp_path, worker=3, retry_errors=True) as writer:
        writer.take(0)
        assert found(writer, 3, 0) == list(range(5))


def test_records_with_other_columns_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    narrow = OutputSchema.build(pa.schema([]), SCHEMA.columns[:1], (), prompt_token_ids=False)
    journal = Journal(tmp_path / "journal", SCHEMA.arrow, begun=begun_schema(narrow))
    row = BegunRow(1, 0, KEY, 0, Begun([1], {"logprobs": np.zeros(1, np.float32)}))
    journal.append(0, encode_begun(narrow, [row]), BEGUN)
    with open_writer(tmp_path) as writer:
        writer.take(0)
        assert found(writer, 1, 0) is None
