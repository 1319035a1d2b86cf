"""Shards of a job that grew: equal to those of a job that ran so from the start."""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import batchgen.storage.shards.publisher as publisher_module
from batchgen.storage.shards.output_schema import FinishedRow
from batchgen.storage.shards.output_writer import OutputWriter
from tests.support.jobs.output_rows import (
    PER_SHARD,
    all_rows,
    finished_row,
    open_writer,
    shards,
    split,
)

SIZES = [(7, 1), (13, 1), (13, 3), (23, 3)]
"""Rows and samples of a job that grows three times."""


def _missing(writer: OutputWriter, num_rows: int) -> list[FinishedRow]:
    first = writer.num_leading_rows
    return [finished_row(i, s) for i in range(first, num_rows) for s in writer.missing(i)]


def _mended(row: FinishedRow) -> FinishedRow:
    """The row as it would be without its error."""
    other = finished_row(0, row.sample_index)
    return row._replace(error=None, output=other.output) if row.error else row


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(6))
def test_grown_shards_equal_those_from_the_start(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    seen: list[tuple[int, int]] = []
    for num_rows, samples in SIZES:
        complete = False
        while not complete:  # the writer is left before all is written, as by a kill
            with open_writer(tmp_path / "grown", samples=samples) as writer:
                assert writer.resumed == len(seen)
                left = _missing(writer, num_rows)
                assert len(seen) + len(left) == num_rows * samples
                rng.shuffle(left)
                parts = split(left, rng) if len(left) > 1 else [left]
                complete = rng.random() < 0.4
                for part in parts if complete else parts[: len(parts) // 2]:
                    writer.write(part)
                    seen += [(row.row_index, row.sample_index) for row in part]
                if complete:
                    writer.finish(num_rows)
        with open_writer(tmp_path / f"{num_rows}x{samples}", samples=samples) as writer:
            writer.write(all_rows(num_rows, samples))
            writer.finish(num_rows)
        assert shards(tmp_path / "grown") == shards(tmp_path / f"{num_rows}x{samples}")
    assert len(seen) == len(set(seen))


class _Killed(Exception):
    pass


@pytest.mark.quick(4)
@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("retry", [False, True])
def test_killed_at_each_step_of_publishing_again(
    tmp_path: Path, step: int, retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `step` steps of one publishing happen, and then the process is gone."""
    small, big = 3, 5
    with open_writer(tmp_path, samples=1) as writer:
        writer.write(all_rows(small + 1, 1))  # row 3 is an error
        writer.finish(small + 1)
    steps = iter(range(100))

    def killed_before(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(steps) >= step:
                raise _Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    with open_writer(tmp_path, samples=1, retry_errors=retry) as writer:
        assert writer.retried == (1 if retry else None)
        left = [_mended(row) for row in _missing(writer, big)]
        assert len(left) == (2 if retry else 1)
        for owner, name in (
            (publisher_module, "mapped_shard"),
            (publisher_module, "write_shard"),
            (writer._round, "finished"),
            (publisher_module, "publish_shard"),
            (writer._publisher, "_delete"),
        ):
            killed_before(owner, name)
        with pytest.raises(_Killed) if step < 5 else nullcontext():
            writer.write(left)
            writer.finish(big)
    monkeypatch.undo()
    with open_writer(tmp_path, samples=1, retry_errors=retry) as writer:
        assert _missing(writer, big) == []  # also the error that was computed again
        writer.finish(big)
    expected = [_mended(row) if retry else row for row in all_rows(big, 1)]
    with open_writer(tmp_path / "whole", samples=1) as writer:
        writer.write(expected)
        writer.finish(big)
    assert shards(tmp_path) == shards(tmp_path / "whole")


def test_errors_are_retried_once_in_a_round(tmp_path: Path) -> None:
    """Rows 3, 10 and 17 are errors; 3 fails again, 10 does not, 17 waits for the second attempt."""

    def missing(writer: OutputWriter) -> list[int]:
        return [row.row_index for row in _missing(writer, 20)]

    with open_writer(tmp_path, samples=1) as writer:
        writer.write(all_rows(18, 1))
        writer.flush()
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.retried == 3 and writer.resumed == 15
        assert missing(writer) == [3, 10, 17, 18, 19]
        writer.write([finished_row(3, 0), _mended(finished_row(10, 0)), finished_row(19, 0)])
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.retried is None and missing(writer) == [17, 18]
        writer.write([finished_row(17, 0), finished_row(18, 0)])
        writer.finish(20)
    assert [p.name for p in (tmp_path / "journal").iterdir()] == ["retry"]
    (tmp_path / "journal" / "retry").unlink()  # as a complete job does
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.retried == 2 and missing(writer) == [3, 17]
    with open_writer(tmp_path, samples=1) as writer:
        assert writer.retried is None and missing(writer) == []
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.retried == 2, "without retry_errors the round had ended"


def test_a_round_that_was_killed_while_it_began_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_writer(tmp_path, samples=1) as writer:
        writer.write(all_rows(20, 1))
        writer.flush()
    touch = Path.touch

    def killed(path: Path) -> None:
        if path.name.startswith("part-00002"):
            raise _Killed
        touch(path)

    monkeypatch.setattr(Path, "touch", killed)
    with pytest.raises(_Killed):
        open_writer(tmp_path, samples=1, retry_errors=True)
    monkeypatch.undo()
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.retried == 3


def test_attempts_go_on_counting_in_a_round(tmp_path: Path) -> None:
    """Else a row that was computed again would look as if it were from before the round."""
    with open_writer(tmp_path, samples=1) as writer:
        writer.write([finished_row(i, 0) for i in (0, 1, 2, 4, *range(5, 10))])  # 10: no error
        writer.flush()
    with open_writer(tmp_path, samples=1) as writer:
        writer.write([finished_row(3, 0), finished_row(10, 0)])
        writer.flush()
    assert PER_SHARD == 5
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.retried == 2
    for path in (tmp_path / "journal").glob("*.journal"):
        path.unlink()
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        writer.write([finished_row(3, 0)])
        writer.flush()
    with open_writer(tmp_path, samples=1, retry_errors=True) as writer:
        assert writer.missing(3) == []


def test_done_rows_are_those_that_need_no_computing(tmp_path: Path) -> None:
    columns = ["row_index", "finish_reason"]

    def done(**options: Any) -> list[int]:
        with open_writer(tmp_path, samples=1, **options) as writer:
            tables = list(writer.done_rows(columns))
            assert all(table.column_names == columns for table in tables)
            found = [index for table in tables for index in table["row_index"].to_pylist()]
            assert len(found) == writer.resumed
            return sorted(found)

    with open_writer(tmp_path, samples=1) as writer:
        writer.write(all_rows(8, 1))
        writer.flush()
    assert done() == list(range(8))
    assert done(retry_errors=True) == [0, 1, 2, 4, 5, 6, 7]
