"""Every reader that the card names reads the rows of a job with the line that stands there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.jobs.run.graded_job import graded_card
from batchgen.storage.folder.how_to_read import how_to_read, rows_with_grades
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.finished_job import finished_job, row


def _query(line: str) -> list[dict[str, Any]]:
    found = duckdb.sql(line)
    assert found is not None
    rows: list[dict[str, Any]] = found.pl().to_dicts()
    return rows


READERS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "datasets": lambda line: eval(line, {"load_dataset": datasets.load_dataset}).to_list(),
    "pandas": lambda line: json.loads(eval(line, {"pd": pd}).to_json(orient="records")),
    "polars": lambda line: eval(line, {"pl": pl}).to_dicts(),
    "duckdb": _query,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.quick(1)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["out", "lr=0.1", 'Ann\'s "best" job'])
def test_each_reader_reads_all_rows(
    tmp_path: Path, reader: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several shards, error rows without text, lists, lists of lists of a fixed size."""
    out = tmp_path / name
    FakeJob(str(out), rows=40, rows_per_shard=16).run()
    found = READERS[reader](how_to_read(str(out))[reader])
    line = how_to_read(".")[reader]
    assert f"- {reader}: `{line}`\n" in (out / "README.md").read_text()
    moved = out.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    assert READERS[reader](line) == found  # who has the folder reads it by its card
    moved.rename(out)
    expected = list(JobFolderReader(out).rows())
    assert len(expected) == 80 and any(row["text"] is None for row in expected)
    assert [*found[0]] == [*expected[0]]
    assert json.loads(json.dumps(found, default=list)) == expected


@pytest.mark.parametrize("column", ["answer", "Answer", "grades_answer", "topic"])
def test_the_query_of_the_card_gives_every_column_once(
    tmp_path: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the data set has a column of a name that the grades have, for duckdb at least."""
    rows = [row(n, text=f"so {n}") | {column: f"given {n}"} for n in range(5)]
    out = finished_job(tmp_path / "Ann's job", rows, [pa.field(column, pa.string())], graded=True)
    card = graded_card("## How to read it", out)
    monkeypatch.chdir(out)
    (query,) = re.findall("^```sql\n(.*)\n```$", card, re.MULTILINE)
    found = _query(query)
    (code,) = re.findall("^```python\n(.*?)\n```$", card, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"pd": pd}
    exec(code, names)
    assert names["both"]["mark"].tolist() == [values["mark"] for values in found]
    assert len(names["both"]) == 5
    grades = pq.read_table(out / "grades/part-00000.parquet").to_pylist()
    data = pq.read_table(out / "data/part-00000.parquet").to_pylist()
    taken = {"answer": "grades_answer"} if column.lower() == "answer" else {}
    for values, given, made in zip(found, data, grades, strict=True):
        keys = ("row_id", "row_index", "sample_index")
        more = {taken.get(name, name): made[name] for name in made if name not in keys}
        assert values == given | more and len(values) == len(given) + len(made) - len(keys)


def test_no_name_of_a_column_leaves_the_query_of_the_card(tmp_path: Path) -> None:
    """A prefix of a step may hold anything."""
    query = rows_with_grades(['a"b mark', "x", "grades_x"], ["X", "text"], str(tmp_path))
    assert 'grades."a""b mark", grades."x" AS "grades_grades_x", grades."grades_x" FROM' in query


def test_load_dataset_tells_folders_of_one_name_apart(tmp_path: Path) -> None:
    """It keeps what it has read under the folder's name and the head of its card."""

    def read(folder: str, rows: int) -> int:
        line = how_to_read(str(tmp_path / folder))["datasets"]
        FakeJob(str(tmp_path / folder), rows=rows, samples=1).run()
        return len(READERS["datasets"](line))

    assert (read("a/out", 3), read("b/out", 5), read("a/out", 7)) == (3, 5, 7)


def test_the_summary_has_a_line(tmp_path: Path) -> None:
    message = FakeJob(str(tmp_path), rows=4).run().message
    assert (
        f'load_dataset("{tmp_path}", split="train") (pandas, polars, duckdb: README.md)' in message
    )


def test_a_job_before_its_first_shard(tmp_path: Path) -> None:
    """`load_dataset` says that there are no data; without a card it would take metrics.json."""
    with pytest.raises(RuntimeError):
        FakeJob(str(tmp_path), rows_per_shard=1000, fail_at_step=5).run()
    assert list(JobFolderReader(tmp_path).rows())
    card = (tmp_path / "README.md").read_text()
    assert "This job is not complete." in card and "## How to read it" in card
    with pytest.raises(FileNotFoundError, match=r"No \(supported\) data files found in"):
        READERS["datasets"](how_to_read(str(tmp_path))["datasets"])
