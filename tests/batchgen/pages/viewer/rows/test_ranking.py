"""Sorted lists, the votes of a question, and the rows of a filter as a file."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.pages.viewer.job_view import JobView, votes
from batchgen.pages.viewer.rows import ranking
from batchgen.pages.viewer.rows.download import JobDownload
from batchgen.pages.viewer.rows.filters import SampleFilter
from batchgen.pages.viewer.rows.ranking import ORDERS, Ranking, Rankings, orders
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.jobs.written_job import grade_job, write_job

ROWS, SAMPLES, PER_SHARD = 47, 4, 10


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobView:
    folder = tmp_path_factory.mktemp("jobs") / "out"
    write_job(folder, ROWS, SAMPLES, rows_per_shard=PER_SHARD, errors=0.1)
    grade_job(folder, scored=True)
    return JobView(JobFolderReader(folder), "out")


def samples_by_row(job: JobView) -> dict[int, list[dict[str, Any]]]:
    schema = job.rows.schema
    assert schema is not None
    tables = (t for s in job.rows.shards for t in job.rows.whole_rows(s, schema.names))
    rows = [row for table in tables for row in table.to_pylist()]
    return {i: list(g) for i, g in itertools.groupby(rows, key=lambda row: row["row_index"])}


def value(order: str, sample: dict[str, Any], row: list[dict[str, Any]]) -> float | None:
    """What a sample is ordered by, in the plainest way."""
    column = ORDERS[order].column
    if column == "num_generated_tokens":
        return float(sample[column])
    if column == "logprobs":
        return sum(sample[column]) / len(sample[column]) if sample[column] else None
    if column.endswith("answer_key"):
        given = Counter(one[column] for one in row if one[column] is not None)
        return max(given.values(), default=0) / len(row)
    marks = [one[column] for one in row if one[column] is not None]
    return sum(marks) / len(marks) if marks else None


@pytest.mark.quick(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wanted", [SampleFilter(), SampleFilter(mark="wrong")])
def test_orders(job: JobView, order: str, wanted: SampleFilter) -> None:
    sign = ORDERS[order].sign
    expected, samples = [], samples_by_row(job)
    for index, row in samples.items():
        some = [s for s in row if not wanted.mark or s["grades/mark"] == 0]
        values = [v for s in some if (v := value(order, s, row)) is not None]
        if values:
            expected.append((sign * min(sign * v for v in values), index))
    expected.sort(key=lambda pair: (sign * pair[0], pair[1]))
    found = Ranking(job.rows, wanted, order)
    found.go_on()
    assert found.next_row is None and found.searched == ROWS * SAMPLES
    assert [place.row for place in found.entries] == [row for _, row in expected]
    assert [place.value for place in found.entries] == pytest.approx([v for v, _ in expected])
    if not ORDERS[order].of_row:  # the sample that is shown is the one with the value
        for place in found.entries:
            row = samples[place.row]
            assert value(order, row[place.samples[0]], row) == pytest.approx(place.value)


def test_a_ranking_goes_on_where_it_was(job: JobView) -> None:
    """With a clock that is always late, each call is one shard; the end is the same."""
    late, whole = (Ranking(job.rows, SampleFilter(), "longest") for _ in range(2))
    whole.go_on()
    for shard in range(1, 5):
        late.go_on(clock=itertools.count().__next__, seconds=0.5)
        assert late.next_row == shard * PER_SHARD
        assert late.searched == shard * PER_SHARD * SAMPLES
    late.go_on(clock=itertools.count().__next__, seconds=0.5)
    assert late.next_row is None and late.entries == whole.entries


def test_a_ranking_keeps_the_first_rows_only(job: JobView, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Ranking(job.rows, SampleFilter(), "unlikely")
    whole.go_on()
    monkeypatch.setattr(ranking, "MOST", 5)
    some = Ranking(job.rows, SampleFilter(), "unlikely")
    some.go_on()
    assert some.entries == whole.entries[:5] and some.matching == whole.matching == ROWS


def test_rankings_are_kept_and_made_anew(job: JobView, tmp_path: Path) -> None:
    kept = Rankings(job.rows)
    assert kept.of(SampleFilter(), "longest") is kept.of(SampleFilter(), "longest")
    assert kept.of(SampleFilter(least="1"), "longest") is not kept.of(SampleFilter(), "longest")
    write_job(tmp_path / "bare", 3, 1)
    bare = JobView(JobFolderReader(tmp_path / "bare"), "bare")
    assert set(orders(bare.rows.schema)) == {"longest", "shortest", "unlikely", "likely"}
    for order, message in (("worst", "needs the column grades/mark"), ("x", "sort must be one of")):
        with pytest.raises(ConfigError, match=message):
            bare.rankings.of(SampleFilter(), order)


def test_votes(job: JobView) -> None:
    for index, row in samples_by_row(job).items():
        found = votes(job.row(index, tokens=False))
        given = Counter(s["grades/answer_key"] for s in row)
        if set(given) == {None}:
            continue
        assert sum((Counter({vote.key: vote.count}) for vote in found), Counter()) == given
        counts = [vote.count for vote in found if vote.key is not None]
        assert counts == sorted(counts, reverse=True)
        right = [vote.key for vote in found if vote.verdict.name == "right"]
        assert right == [str(index)] * (str(index) in given)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "wanted", [SampleFilter(), SampleFilter(mark="wrong"), SampleFilter(text="no such text")]
)
def test_downloads(job: JobView, wanted: SampleFilter) -> None:
    expected = [
        (s["row_id"], s["sample_index"], s["text"], s["grades/mark"])
        for row in samples_by_row(job).values()
        for s in row
        if not wanted.text and (not wanted.mark or s["grades/mark"] == 0)
    ]
    file = JobDownload(job.rows, wanted, job.columns(per_token=True))
    lines = b"".join(file.chunks("jsonl")).decode().splitlines()
    names = ("row_id", "sample_index", "text", "mark")
    assert [tuple(json.loads(line)[n] for n in names) for line in lines] == expected
    table = pq.read_table(io.BytesIO(b"".join(file.chunks("parquet"))))
    assert list(zip(*(table[n].to_pylist() for n in names), strict=True)) == expected
    assert {"logprobs", "token_ids", "answer_key"} <= set(table.column_names)
    few = JobDownload(job.rows, wanted, job.columns(per_token=False))
    cells = list(csv.DictReader(io.StringIO(b"".join(few.chunks("csv")).decode())))
    assert [(c["row_id"], int(c["sample_index"])) for c in cells] == [e[:2] for e in expected]
    assert "logprobs" not in few.columns and "grades/mark" in few.columns
