"""Rows of a job by place, by filter and by id, while it runs and when it is graded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchgen.pages.rows.grade_columns import PREFIX
from batchgen.pages.rows.job_rows import JobRows
from batchgen.pages.viewer.rows.filters import MARKS, SampleFilter
from batchgen.pages.viewer.rows.row_id_index import RowIds, StillSearching
from batchgen.pages.viewer.rows.search import Search, SearchResult, excerpts
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.jobs.written_job import grade_job, write_job

ROWS, SAMPLES, PER_SHARD = 47, 3, 10


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graded job of ROWS rows in shards of PER_SHARD, with ids in no order."""
    folder = tmp_path_factory.mktemp("jobs") / "out"
    write_job(folder, ROWS, SAMPLES, rows_per_shard=PER_SHARD, ids="shuffled", errors=0.1)
    grade_job(folder, scored=False)
    return folder


def rows_of(folder: Path) -> JobRows:
    return JobRows(JobFolderReader(folder))


def all_samples(folder: Path) -> list[dict[str, Any]]:
    """The rows with their grades, read in the plainest way."""
    rows = rows_of(folder)
    schema = rows.schema
    assert schema is not None
    return [
        sample
        for shard in rows.shards
        for table in rows.whole_rows(shard, schema.names)
        for sample in table.to_pylist()
    ]


def every(search: Search, count: int) -> dict[int, list[int]]:
    """The hits of page after page."""
    found: dict[int, list[int]] = {}
    first = 0
    while True:
        page = search.forward(first, count)
        assert len(page.hits) <= count and not set(page.hits) & set(found)
        found |= page.hits
        if page.next_row is None:
            return found
        assert page.next_row > max(page.hits, default=first - 1)
        first = page.next_row


def hits(samples: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    grouped = itertools.groupby(samples, key=lambda sample: sample["row_index"])
    return {row: [sample["sample_index"] for sample in group] for row, group in grouped}


def test_any_row_is_read_by_its_index(graded: Path) -> None:
    rows = rows_of(graded)
    for sample in all_samples(graded):
        table = rows.samples(sample["row_index"], ["row_id", "text", PREFIX + "mark"])
        found = table.to_pylist()[sample["sample_index"]]
        assert found == {name: sample[name] for name in table.column_names}
    assert rows.samples(ROWS, ["text"]).num_rows == 0 == rows.samples(10**6, ["text"]).num_rows


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        (SampleFilter(), lambda s: True),
        (SampleFilter(text="IS 1", column="question"), lambda s: "is 1" in s["question"]),
        (SampleFilter(text="qu"), lambda s: "qu" in (s["text"] or "")),
        (SampleFilter(mark="right"), lambda s: s["grades/mark"] == 1),
        (SampleFilter(mark="wrong", least="60"),
         lambda s: s["grades/mark"] == 0 and s["num_generated_tokens"] >= 60),
        (SampleFilter(least="30", most="50"), lambda s: 30 <= s["num_generated_tokens"] <= 50),
        (SampleFilter(reason="error"), lambda s: s["error"] is not None),
        (SampleFilter(error="bad_messages"), lambda s: s["error"] is not None),
        (SampleFilter(mark="ungraded"), lambda s: False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 4, 100])
def test_filters(graded: Path, wanted: SampleFilter, holds: Any, count: int) -> None:
    samples = all_samples(graded)
    expected = hits([sample for sample in samples if holds(sample)])
    rows = rows_of(graded)
    assert expected or wanted.mark == "ungraded"
    assert every(Search(rows, wanted), count) == expected
    back = Search(rows, wanted).backward(ROWS, 1000)
    assert back.hits == expected and list(back.hits) == sorted(expected, reverse=True)
    if count == 4 and expected:
        middle = sorted(expected)[len(expected) // 2]
        before = Search(rows, wanted).backward(middle, 2).hits
        assert list(before) == [row for row in sorted(expected, reverse=True) if row < middle][:2]


def test_samples_that_disagree(graded: Path) -> None:
    samples = all_samples(graded)
    keys: dict[int, set[Any]] = {}
    for sample in samples:
        keys.setdefault(sample["row_index"], set()).add(sample["grades/answer_key"])
    expected = {row for row, found in keys.items() if len(found) > 1}
    assert 0 < len(expected) < ROWS
    assert set(every(Search(rows_of(graded), SampleFilter(disagree="yes")), 5)) == expected


def test_a_search_ends_in_time_and_goes_on(graded: Path) -> None:
    """With a clock that is always late, each page is one shard."""
    rows = rows_of(graded)
    late = Search(
        rows, SampleFilter(text="no such text"), clock=itertools.count().__next__, seconds=0.5
    )
    first = 0
    for shard in range(1, 5):
        found = late.forward(first, 50)
        assert found == SearchResult({}, shard * PER_SHARD, PER_SHARD * SAMPLES)
        first = shard * PER_SHARD
    assert late.forward(first, 50).next_row is None
    back = late.backward(ROWS, 1)
    assert back == SearchResult({}, 40, (ROWS - 40) * SAMPLES)
    assert late.backward(10, 1).next_row is None
    assert every(late, 50) == {}


def test_lists_show_the_ends_of_long_texts(graded: Path, tmp_path: Path) -> None:
    long = "begin " + "x" * 1000
    write_job(tmp_path / "long", 3, 1, texts=[long])
    search = Search(rows_of(tmp_path / "long"), SampleFilter())
    text = search.rows([1], ["text"])[1]["text"][0].as_py()
    assert text.startswith("begin xxx") and " … xxx" in text and text.endswith(("x 1", "x 2"))
    assert len(text) < 500
    assert list(search.rows([2, 0], ["text"])) == [2, 0]


@pytest.mark.parametrize("type", [pa.string(), pa.large_string()])
def test_excerpts_of_all_kinds_of_texts(type: pa.DataType) -> None:
    texts = ["short", None, "é" * 420, "a" * 300 + "é" * 300, ""]
    table = pa.table({"row_id": pa.array(["x" * 999] * 5, type), "said": pa.array(texts, type)})
    found = excerpts(table)
    assert found["row_id"].equals(table["row_id"]) and found.schema == table.schema
    expected = ["short", None, "é" * 420, "a" * 280 + " … " + "é" * 140, ""]
    assert found["said"].to_pylist() == expected


@pytest.mark.parametrize("seconds", [0.5, 1e9])
def test_ids_in_no_order(graded: Path, seconds: float) -> None:
    """Also where each search may read one shard only and has to be asked again."""
    rows = rows_of(graded)
    ids = RowIds(rows, clock=itertools.count(0, 0.3).__next__, seconds=seconds)

    def found(row_id: str) -> int | None:
        for _ in range(10):
            try:
                return ids.find(row_id)
            except StillSearching as searching:
                assert 0 < searching.searched < ROWS and seconds < 1
        raise AssertionError("it never ends")

    places = {sample["row_id"]: sample["row_index"] for sample in all_samples(graded)}
    assert len(places) == ROWS
    for row_id, place in sorted(places.items()):
        assert found(row_id) == place
        assert ids.find(row_id, near=place) == place
    assert found("nothing") is None and found("7") is None and found("") is None


def test_ids_that_are_positions(tmp_path: Path) -> None:
    write_job(tmp_path / "out", 25, 1, rows_per_shard=10)

    def no_time() -> float:
        raise AssertionError("it reads the ids")

    assert RowIds(rows_of(tmp_path / "out"), clock=no_time).find("17") == 17


def test_grades_of_other_rows_are_none(graded: Path, tmp_path: Path) -> None:
    """A shard that was written after its grades has none, and one that was copied later has."""
    folder = tmp_path / "out"
    write_job(folder, 20, 2, rows_per_shard=10, seed=1)
    grade_job(folder, scored=False)
    names = [PREFIX + "mark"]
    marks = [rows_of(folder).samples(row, names)[names[0]].to_pylist() for row in (3, 13)]
    assert None not in (*marks[0], *marks[1])
    shard = folder / "data" / "part-00000.parquet"
    os.utime(shard, (2e9, 2e9))
    rows = rows_of(folder)
    assert rows.samples(3, names)[names[0]].to_pylist() == marks[0]
    write_job(tmp_path / "other", 20, 2, rows_per_shard=10, seed=2)
    shard.write_bytes((tmp_path / "other" / "data" / "part-00000.parquet").read_bytes())
    os.utime(shard, (2e9 + 1, 2e9 + 1))
    assert rows.samples(3, names)[names[0]].to_pylist() == [None, None]
    assert rows.samples(13, names)[names[0]].to_pylist() == marks[1]
    found = every(Search(rows, SampleFilter(mark="ungraded")), 100)
    assert set(found) == set(range(10))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"mark": "good"}, "mark must be one of right, "),
        ({"reason": "end"}, "reason must be one of stop, "),
        ({"least": "-1"}, "least must be a number"),
        ({"most": "9" * 30}, "most must be a number"),
        ({"text": "x" * 1001}, "at most 1,000 characters"),
    ],
)
def test_filters_that_cannot_be(query: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleFilter.of(query)


def test_filters_need_their_columns(tmp_path: Path) -> None:
    write_job(tmp_path / "out", 3, 1)
    rows = rows_of(tmp_path / "out")
    with pytest.raises(ConfigError, match="no text column 'row_index'"):
        Search(rows, SampleFilter(text="x", column="row_index"))
    with pytest.raises(ConfigError, match="has no grades"):
        Search(rows, SampleFilter(mark="right"))
    assert every(Search(rows, SampleFilter(disagree="yes")), 9) == {}


def test_marks_of_every_kind_have_a_name() -> None:
    assert all(SampleFilter(mark=mark) for mark in MARKS) and not SampleFilter(column="text")
    assert np.dtype("<U11").itemsize // 4 >= max(map(len, MARKS))
