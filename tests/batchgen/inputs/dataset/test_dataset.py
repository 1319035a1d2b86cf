"""Rows come out as they lie in the files, whatever the format, and every bad data set is named."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset import row_ids
from batchgen.inputs.dataset.row_ids import IdSet
from batchgen.inputs.dataset.row_source import open_dataset
from batchgen.inputs.dataset.source import Row
from batchgen.util.errors import ConfigError
from tests.support.jobs.row_files import BOTH, fields, jsonl, source

pytestmark = pytest.mark.usefixtures("in_folder")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif ".csv" in path.suffixes:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if path.name == "rows.json":
            text = json.dumps(rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(2**40), 2**40),
            "text": st.from_regex(r"[a-z0-9 \"',;\n\r\tä漢🙂-]{0,20}", fullmatch=True),
            "score": st.floats(-1e9, 1e9, allow_subnormal=False).map(lambda x: x + 0.5),
        }
    ),
    min_size=1,
    max_size=20,
)
NAMES = ["rows.jsonl", "rows.json", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.parquet", "a.arrow"]


@pytest.mark.quick(3, thorough=5)
@BOTH
@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=ROWS)
def test_every_format_gives_the_same_rows(
    name: str, streaming: bool, rows: list[dict[str, Any]]
) -> None:
    write(Path(name), rows)
    types = {"types": {"id": "int64", "score": "float64"}} if ".csv" in name else {}
    data = source(name, streaming=streaming, **types)
    assert [row.index for row in data.rows()] == list(range(len(rows)))
    got = [data.passthrough(row) for row in data.rows()]
    assert [(g["id"], g["text"]) for g in got] == [(r["id"], r["text"]) for r in rows]
    assert [g["score"] for g in got] == pytest.approx([r["score"] for r in rows], rel=1e-12)
    assert pa.Table.from_pylist(got, schema=data.schema).num_rows == len(rows)
    assert data.num_rows == (None if streaming else len(rows))


@BOTH
def test_types_pass_through_as_they_are(streaming: bool) -> None:
    table = pa.table(
        {
            "when": pa.array([datetime(2024, 5, 17, 1, 2, 3)], pa.timestamp("us")),
            "small": pa.array([7], pa.int8()),
            "nested": pa.array([{"a": [1, None], "b": {"c": "x"}}]),
            "raw": pa.array([b"\x00\xff"]),
            "nothing": pa.array([None], pa.float32()),
        }
    )
    pq.write_table(table, "t.parquet")
    data = source("t.parquet", streaming=streaming)
    (row,) = data.rows()
    assert data.schema.equals(table.schema)
    assert pa.Table.from_pylist([data.passthrough(row)], schema=data.schema).equals(table)


@BOTH
def test_mixed_json_is_parsed_for_templates_and_text_in_the_output(streaming: bool) -> None:
    rows = [{"a": 1, "m": {"k": 1}}, {"a": "x", "m": {"q": [1]}}, {"a": None, "m": None}]
    data = source(jsonl("mixed.jsonl", rows), streaming=streaming)
    assert fields(data) == rows
    assert data.schema.types == [pa.string(), pa.string()]
    out = [data.passthrough(row) for row in data.rows()]
    assert [json.loads(o["a"]) for o in out[:2]] == [1, "x"]
    assert [json.loads(o["m"]) for o in out[:2]] == [{"k": 1}, {"q": [1]}]
    assert pa.Table.from_pylist(out, schema=data.schema).num_rows == 3


@BOTH
def test_folders_globs_and_order(streaming: bool) -> None:
    for i in (3, 1, 10, 2):
        jsonl(f"d/part-{i:02}.jsonl", [{"i": 10 * i + j} for j in range(3)])
    want = [10 * i + j for i in (1, 2, 3, 10) for j in range(3)]
    for path in ("d", "d/*.jsonl", "**/*.jsonl"):
        assert [f["i"] for f in fields(source(path, streaming=streaming))] == want
    jsonl("odd[1] name.jsonl", [{"i": 5}])
    assert fields(source("odd[1] name.jsonl", streaming=streaming)) == [{"i": 5}]


@BOTH
def test_splits_of_folders_and_saved_datasets(streaming: bool) -> None:
    jsonl("d/train.jsonl", [{"i": 1}])
    jsonl("d/test.jsonl", [{"i": 2}])
    both = {name: datasets.Dataset.from_dict({"i": [n]}) for name, n in (("a", 3), ("b", 4))}
    datasets.DatasetDict(both).save_to_disk("saved")
    both["a"].save_to_disk("one")
    for path, split, value in (("d", "test", 2), ("saved", "b", 4), ("one", None, 3)):
        assert fields(source(path, split=split, streaming=streaming)) == [{"i": value}]


@BOTH
def test_an_output_folder_is_a_data_set(streaming: bool) -> None:
    """Its README.md says which files are rows; manifest.json is not one of them."""
    Path("out/data").mkdir(parents=True)
    write(Path("out/data/part-00000.parquet"), [{"text": "a"}])
    Path("out/manifest.json").write_text("{}")
    Path("out/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: data/*.parquet\n---\n"
    )
    assert fields(source("out", streaming=streaming)) == [{"text": "a"}]


def test_rows_anywhere_are_those_of_the_whole() -> None:
    given = [{"key": f"k{i}", "m": {"k": 1} if i % 2 else i} for i in range(700)]
    data = source(jsonl("at.jsonl", given), id_column="key")
    rows = list(data.rows())
    for indices in ([], [5], [699, 3, 4, 300], list(range(0, 700, 2))):
        assert list(data.rows_at(indices)) == [rows[index] for index in indices]


@BOTH
def test_limit_start_columns_and_ids(streaming: bool) -> None:
    path = jsonl("r.jsonl", [{"key": f"k{i}", "i": i} for i in range(1000)])
    data = source(path, limit=600, columns=("i",), id_column="key", streaming=streaming)
    rows = list(data.rows())
    assert rows == [Row(i, f"k{i}", {"key": f"k{i}", "i": i}) for i in range(600)]
    assert data.schema == pa.schema({"i": pa.int64()})
    assert data.passthrough(rows[3]) == {"i": 3}
    assert data.columns == ("key", "i")
    for start in (0, 1, 255, 256, 599, 600, 700):
        assert list(data.rows(start)) == rows[start:]
    assert source(path, limit=600, columns=(), streaming=streaming).schema.names == []
    assert next(source(path, streaming=streaming).rows(7)).id == "7"


def test_a_changed_file_is_never_read_from_the_cache() -> None:
    path = jsonl("r.jsonl", [{"i": 1}])
    times = path.stat()
    first = source(path)
    assert fields(first) == [{"i": 1}]
    jsonl("r.jsonl", [{"i": 2}])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = source(path)
    assert fields(second) == [{"i": 2}]
    assert first.fingerprint != second.fingerprint


def test_fingerprints_are_of_content_and_split() -> None:
    jsonl("d/train.jsonl", [{"i": 1}])
    jsonl("d/test.jsonl", [{"i": 1}])
    jsonl("e/train.jsonl", [{"i": 1}])
    train = source("d", split="train")
    assert train.fingerprint == source("d", split="train", streaming=True).fingerprint
    assert train.fingerprint == source("e").fingerprint == source("e/train.jsonl").fingerprint
    assert train.fingerprint != source("d", split="test").fingerprint


def test_map_style_ids_are_checked_with_a_hash_that_collides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal hashes alone are no duplicates, in neither kind of data set."""

    class SameHash(IdSet):
        def add(self, row_id: str) -> bool:
            return super().add("one")

    monkeypatch.setattr(row_ids, "IdSet", SameHash)
    monkeypatch.setattr("batchgen.inputs.dataset.row_source.IdSet", SameHash)
    path = jsonl("r.jsonl", [{"i": i} for i in range(5)])
    for streaming in (False, True):
        data = source(path, id_column="i", streaming=streaming)
        assert [row.id for row in data.rows()] == list("01234")


def test_demo_rows() -> None:
    data = open_dataset(DatasetConfig(kind="demo", id_column="id"))
    rows = list(data.rows())
    assert len({row.id for row in rows}) == len(rows) == data.num_rows == 24
    assert all(row.fields["question"] and row.fields["answer"] for row in rows)
    assert Counter(row.fields["category"] for row in rows) == {
        "question": 10,
        "extraction": 7,
        "arithmetic": 7,
    }
    assert data.schema.names == ["id", "category", "question", "answer"]


def test_rows_inside_a_package() -> None:
    path = "package://batchgen/data/nano_sdar/eval.jsonl"
    data = open_dataset(DatasetConfig(kind="files", path=path, id_column="id"))
    assert data.num_rows == 500
    assert data.schema.names == ["id", "kind", "question", "answer", "final"]
    assert {field.type for field in data.schema} == {pa.string()}
    with pytest.raises(ConfigError, match=r"dataset\.path: package://.*/no\.jsonl: .* contain no"):
        open_dataset(DatasetConfig(kind="files", path="package://batchgen/no.jsonl"))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    jsonl("bad.jsonl", [{"a": 1}]).open("a").write("{")
    for path in (jsonl("r.jsonl", [{"a": 1}]), "bad.jsonl"):
        for streaming in (False, True):
            try:
                fields(source(path, streaming=streaming))
            except ConfigError:
                assert path == "bad.jsonl"
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
