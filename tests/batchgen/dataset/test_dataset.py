"""Rows come out as they lie in the files, whatever the format, and every bad data set is named."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.config.dataset_config import DatasetConfig
from batchgen.dataset import row_ids
from batchgen.dataset.dataset_files import LoadedDataset
from batchgen.dataset.row_ids import IdSet, check_unique
from batchgen.dataset.row_source import RowSource, open_dataset
from batchgen.dataset.source import Row
from batchgen.engine.base.outputs import RequestError
from batchgen.util.errors import ConfigError, JobError

BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests run in a folder of their own, datasets' cache included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))
    yield


def source(path: str | Path, **keys: Any) -> RowSource:
    return open_dataset(DatasetConfig(kind="files", path=str(path), **keys))


def jsonl(name: str, rows: list[Any]) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(name)


def fields(rows: RowSource) -> list[dict[str, Any]]:
    return [row.fields for row in rows.rows()]


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
    monkeypatch.setattr("batchgen.dataset.row_source.IdSet", SameHash)
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
    with pytest.raises(ConfigError, match=r"dataset\.path: package://batchgen/no\.jsonl: .*no no"):
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


def text(name: str, content: str | bytes) -> Callable[[], object]:
    data = content if isinstance(content, bytes) else content.encode()

    def make() -> None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)

    return make


def several(*makers: Callable[[], object]) -> Callable[[], object]:
    return lambda: [make() for make in makers]


def rows_of(name: str, rows: list[Any]) -> Callable[[], object]:
    return lambda: jsonl(name, rows)


def images() -> None:
    features = datasets.Features({"q": datasets.Value("string"), "img": datasets.Image()})
    rows = [{"q": "x", "img": {"bytes": b"", "path": None}}]
    pq.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema), "img.parquet")


ID = {"id_column": "i"}
FORMATS = r"\.jsonl, \.json, \.csv, \.tsv, \.txt, \.parquet, \.arrow"
# name, what lies there, keys, the message (a pattern of all of it after the key)
WRONG: list[tuple[str, Callable[[], object], dict[str, Any], str]] = [
    (
        "missing",
        text("x", ""),
        {"path": "no.jsonl"},
        r"dataset.path: no.jsonl does not exist in .*",
    ),
    (
        "hub name",
        text("x", ""),
        {"path": "openai/gsm8k"},
        r"dataset.path: openai/gsm8k does not exist in .*; for a data set of the hub use "
        r"dataset=hub",
    ),
    (
        "empty glob",
        text("x", ""),
        {"path": "no/*.csv"},
        r"dataset.path: no file matches no/\*\.csv \(from .*\)",
    ),
    (
        "extension",
        text("a.doc", "x"),
        {"path": "a.doc"},
        rf"dataset.path: a.doc is of no known format: use {FORMATS} \(those of text also with "
        r"\.gz\)",
    ),
    (
        "folder without data",
        lambda: Path("d").mkdir(),
        {"path": "d"},
        rf"dataset.path: folder d has no files of {FORMATS}",
    ),
    (
        "mixed folder",
        several(rows_of("d/a.jsonl", [{"a": 1}]), text("d/b.csv", "a\n1\n")),
        {"path": "d"},
        r"dataset.path: files of several formats, json \(a.jsonl\), csv \(b.csv\): choose one "
        r"with a glob such as 'd/\*.jsonl'",
    ),
    ("empty file", text("a.jsonl", ""), {"path": "a.jsonl"}, r"dataset.path: a.jsonl is empty"),
    ("empty csv", text("a.csv", ""), {"path": "a.csv"}, r"dataset.path: a.csv is empty"),
    (
        "damaged dataset_dict.json",
        text("d/dataset_dict.json", '{"splits":'),
        {"path": "d"},
        r"dataset.path: d/dataset_dict.json is damaged: JSONDecodeError: .*",
    ),
    (
        "csv files of several headers",
        several(text("d/a.csv", "q\n1\n"), text("d/b.csv", "p\nx\n")),
        {"path": "d"},
        r"dataset.path: .*d/b.csv has the columns p, and .*d/a.csv has q: give all files the same "
        r"header",
    ),
    ("header only", text("a.csv", "a,b\n"), {"path": "a.csv"}, r"dataset.path: a.csv has no rows"),
    (
        "broken line",
        text("a.jsonl", '{"a": 1}\n{"a": 2\n{"a": 3}\n'),
        {"path": "a.jsonl"},
        r"dataset.path: a.jsonl, line 2: not JSON: Expecting ',' delimiter at column 1",
    ),
    (
        "not an object",
        text("a.jsonl", "17\n"),
        {"path": "a.jsonl"},
        r"dataset.path: a.jsonl, line 1: a row must be a JSON object \{…\}",
    ),
    (
        "broken list",
        text("a.json", '[{"a": 1},\n {"a": 2]'),
        {"path": "a.json"},
        r"dataset.path: a.json is not a JSON list: Expecting ',' delimiter: line 2 column 9 .*",
    ),
    (
        "list of numbers",
        text("a.json", "[1, 2]"),
        {"path": "a.json"},
        r"dataset.path: a.json: all rows must be JSON objects \{…\}",
    ),
    ("empty list", text("a.json", "[]"), {"path": "a.json"}, r"dataset.path: a.json is empty"),
    (
        "not UTF-8",
        text("a.jsonl", b'{"a": "x"}\n{"a": "\xff"}\n'),
        {"path": "a.jsonl"},
        r"dataset.path: a.jsonl, line 2: not UTF-8: invalid start byte at byte 7: set "
        r"dataset.encoding if the file has another encoding",
    ),
    (
        "torn gz",
        lambda: Path("a.jsonl.gz").write_bytes(gzip.compress(b'{"a":1}\n')[:-8]),
        {"path": "a.jsonl.gz"},
        r"dataset.path: a.jsonl.gz: EOFError: Compressed file ended before .*",
    ),
    (
        "ragged csv",
        text("a.csv", "a,b\n1,2\n1,2,3,4\n"),
        {"path": "a.csv"},
        r"dataset.path: a.csv, line 3: 4 cells, and the header has 2: put cells that hold ',' in "
        r"quotes, or set dataset.delimiter",
    ),
    (
        "short row after a cell of several lines",
        text("a.csv", 'a,b\n1,"x\ny"\n\n2\n'),
        {"path": "a.csv"},
        r"dataset.path: a.csv, line 5: 1 cells, and the header has 2: put .*",
    ),
    (
        "open quote",
        text("a.csv", 'a,b\n1,2\n3,"x\n4,5\n'),
        {"path": "a.csv"},
        r"dataset.path: a.csv, line 3: a quote that opens in this row is never closed",
    ),
    (
        "a column twice",
        text("a.csv", "a,b,a\n1,2,3\n"),
        {"path": "a.csv"},
        r"dataset.path: the header of a.csv names 'a' twice",
    ),
    (
        "csv not UTF-8",
        text("a.csv", b"a\nx\n\xe4\n"),
        {"path": "a.csv"},
        r"dataset.path: a.csv, line 3: not utf-8: invalid continuation byte at byte 4 of the file: "
        r"set dataset.encoding to the encoding that the file has, such as latin-1 or utf-16",
    ),
    (
        "txt not of its encoding",
        text("a.txt", b"x\ny\xff\n"),
        {"path": "a.txt", "encoding": "ascii"},
        r"dataset.path: a.txt, line 2: not utf-8: invalid start byte at byte 3 of the file: .*",
    ),
    (
        "jsonl not of its encoding",
        text("a.jsonl", '{"a": "x"}\n{"a": "y"}\n'.encode("utf-16") + b"\x00\xd8"),
        {"path": "a.jsonl", "encoding": "utf-16"},
        r"dataset.path: a.jsonl, line 3: not utf-16: unexpected end of data at byte 46 of the "
        r"file: .*",
    ),
    (
        "cell of another type",
        text("a.csv", 'a,b\n"x\ny",1\nx,\nx,1.5\n'),
        {"path": "a.csv", "types": {"b": "int64"}},
        r"dataset.types: a.csv, line 5: '1.5' in column 'b' is no int64",
    ),
    (
        "type of no column",
        text("a.csv", "a\n1\n"),
        {"path": "a.csv", "types": {"b": "int64"}},
        r"dataset.types: a.csv has no column 'b': choose among a",
    ),
    (
        "types of JSON",
        rows_of("a.jsonl", [{"a": 1}]),
        {"path": "a.jsonl", "types": {"a": "int64"}},
        r"dataset.types is for \.csv and \.tsv files, and a.jsonl is json: drop it",
    ),
    (
        "nested id that is no id",
        rows_of("a.jsonl", [{"m": {"i": [1]}}]),
        {"path": "a.jsonl", "id_column": "m.i"},
        r"dataset.id_column: column 'm.i' holds list<.*>: ids must be strings or integers",
    ),
    (
        "nested column that is not there",
        rows_of("a.jsonl", [{"m": {"i": 1}}]),
        {"path": "a.jsonl", "id_column": "m.j"},
        r"dataset.id_column: no column 'm.j': choose among m",
    ),
    (
        "not parquet",
        text("a.parquet", "hello"),
        {"path": "a.parquet"},
        r"dataset.path: datasets cannot read a.parquet: ArrowInvalid: .*",
    ),
    (
        "files that differ",
        several(rows_of("1.jsonl", [{"a": 1}]), rows_of("2.jsonl", [{"a": "x", "b": 2}])),
        {"path": "[12].jsonl"},
        r"dataset.path: datasets cannot read 2 files, 1.jsonl …: .*: give every row the same keys "
        r"and types",
    ),
    (
        "several splits",
        several(rows_of("d/train.jsonl", [{"a": 1}]), rows_of("d/test.jsonl", [{"a": 1}])),
        {"path": "d"},
        r"dataset.split: d has several splits, choose among train, test",
    ),
    (
        "file of no split",
        several(rows_of("d/train.jsonl", [{"a": 1}]), rows_of("d/more.jsonl", [{"a": 1}])),
        {"path": "d"},
        r"dataset.path: d/more.jsonl belongs to no split, though other files are named like splits "
        r"\(train, test, …\): name the files you mean with a glob",
    ),
    (
        "unknown split",
        rows_of("a.jsonl", [{"a": 1}]),
        {"path": "a.jsonl", "split": "val"},
        r"dataset.split: a.jsonl has no 'val', only train",
    ),
    (
        "name of a file",
        rows_of("a.jsonl", [{"a": 1}]),
        {"path": "a.jsonl", "name": "main"},
        r"dataset.name is for hub data sets and folders, a.jsonl is neither",
    ),
    (
        "unknown column",
        rows_of("a.jsonl", [{"a": 1, "b": 2}]),
        {"path": "a.jsonl", "columns": ("c",)},
        r"dataset.columns: no column 'c': choose among a, b",
    ),
    (
        "unknown id column",
        rows_of("a.jsonl", [{"a": 1}]),
        {"path": "a.jsonl", **ID},
        r"dataset.id_column: no column 'i': choose among a",
    ),
    (
        "ids that are no ids",
        rows_of("a.jsonl", [{"i": 1.5}]),
        {"path": "a.jsonl", **ID},
        r"dataset.id_column: column 'i' holds double: ids must be strings or integers",
    ),
    (
        "no id",
        rows_of("a.jsonl", [{"i": "a"}, {"i": None}]),
        {"path": "a.jsonl", **ID},
        r"dataset.id_column: row 1 has no 'i': choose a column without nulls, or null to number "
        r"the rows",
    ),
    (
        "the same id",
        rows_of("a.jsonl", [{"i": "a"}, {"i": "b"}, {"i": "a"}]),
        {"path": "a.jsonl", **ID},
        r"dataset.id_column: ids in 'i' must be unique, but 'a' in rows 0, 2 \(rows count from "
        r"0\): choose another column, or null to number the rows",
    ),
    (
        "the image",
        images,
        {"path": "img.parquet", "columns": ("img",)},
        r"dataset.columns: column 'img' \(Image\) cannot be copied to the output: choose among q",
    ),
]


@BOTH
@pytest.mark.parametrize(
    ("make", "keys", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_wrong_data(
    make: Callable[[], object], keys: dict[str, Any], message: str, streaming: bool
) -> None:
    make()
    with pytest.raises(ConfigError) as raised:
        fields(source(**keys, streaming=streaming))
    assert re.fullmatch(message, str(raised.value))
    assert raised.value.__cause__ is None


def test_images_are_left_out_of_the_fields() -> None:
    images()
    assert fields(source("img.parquet", columns=("q",))) == [{"q": "x"}]


def test_unreadable_file() -> None:
    jsonl("a.jsonl", [{"a": 1}])
    Path("link.jsonl").symlink_to("a.jsonl")
    Path("a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"dataset.path: link.jsonl does not exist"):
        source("link.jsonl")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl("a.jsonl", [{"a": 1}])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/dev/null/cache")
    with pytest.raises(ConfigError) as raised:
        source(path)
    assert str(raised.value) == (
        "dataset.path: datasets cannot write its cache /dev/null/cache: Not a directory: set "
        "HF_DATASETS_CACHE to another folder, or use dataset.streaming=true"
    )


def test_many_duplicates_are_named_in_short() -> None:
    ids = [str(i % 5) for i in range(50)]
    with pytest.raises(ConfigError) as raised:
        check_unique(lambda: ids, "i")
    assert str(raised.value) == (
        "dataset.id_column: ids in 'i' must be unique, but '0' in rows 0, 5, 10 and 7 more; '1' in "
        "rows 1, 6, 11 and 7 more; '2' in rows 2, 7, 12 and 7 more; and 2 more ids (rows count "
        "from 0): choose another column, or null to number the rows"
    )


@given(st.lists(st.text(max_size=3)))
def test_id_set_is_a_set(ids: list[str]) -> None:
    ours, theirs = IdSet(), set[str]()
    for row_id in ids:
        assert ours.add(row_id) == (row_id not in theirs)
        theirs.add(row_id)
    assert len(ours) == len(theirs)


def test_id_set_is_small() -> None:
    ids = IdSet()
    for i in range(100_000):
        assert ids.add(str(i))
    assert not any(ids.add(str(i)) for i in range(0, 100_000, 997))
    assert ids.num_bytes <= 24 * 100_000


def stream_of(generate: Callable[[], Iterator[dict[str, Any]]], **keys: Any) -> RowSource:
    config = DatasetConfig(kind="hub", path="some/data", streaming=True, **keys)
    return RowSource(LoadedDataset(datasets.IterableDataset.from_generator(generate), "f"), config)


def test_a_stream_without_features_takes_those_of_its_first_rows() -> None:
    def generate() -> Iterator[dict[str, Any]]:
        yield from ({"i": i, "q": "x"} for i in range(1100))
        yield {"i": "no number", "q": "y"}
        yield {"q": "z"}

    data = stream_of(generate)
    assert data.schema == pa.schema({"i": pa.int64(), "q": pa.string()})
    rows = list(data.rows())
    assert len(rows) == 1102
    assert data.passthrough(rows[1099]) == {"i": 1099, "q": "x"}
    with pytest.raises(RequestError, match="column 'i' is not int64") as raised:
        data.passthrough(rows[1100])
    assert raised.value.type == "bad_row"
    assert data.passthrough(rows[1101]) == {"i": None, "q": "z"}


def test_a_stream_has_the_columns_of_all_its_first_rows() -> None:
    data = stream_of(lambda: iter([{"q": "a"}, {"q": "b", "note": "n"}]))
    assert data.columns == ("q", "note")
    assert data.passthrough(next(data.rows())) == {"q": "a", "note": None}


def test_first_rows_of_several_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot read its first rows: .*'x'.* int64"):
        stream_of(lambda: iter([{"q": 1}, {"q": "x"}]))


def test_a_stream_that_breaks_stops_the_job() -> None:
    calls = iter(range(100))

    def generate() -> Iterator[dict[str, Any]]:
        yield {"i": 1}
        if next(calls) > 0:
            raise ConnectionError("gone")

    rows = stream_of(generate).rows()
    with pytest.raises(JobError, match=r"some/data: cannot read row .*gone; run the same command"):
        list(rows)


class FakeBuilder:
    """What `load_dataset_builder` returns for a data set on the hub."""

    hash = "commit1"
    config = datasets.BuilderConfig(name="main")

    def __init__(self) -> None:
        infos = {n: datasets.SplitInfo(n, num_examples=1) for n in ("train", "test")}
        self.info = datasets.DatasetInfo(splits=datasets.SplitDict(infos))
        self.downloaded = False

    def download_and_prepare(self) -> None:
        self.downloaded = True

    def as_dataset(self) -> datasets.DatasetDict:
        parts = {name: datasets.Dataset.from_dict({"q": [name]}) for name in ("train", "test")}
        return datasets.DatasetDict(parts)

    def as_streaming_dataset(self) -> datasets.IterableDatasetDict:
        parts = {name: data.to_iterable_dataset() for name, data in self.as_dataset().items()}
        return datasets.IterableDatasetDict(parts)


@BOTH
def test_hub(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    builder = FakeBuilder()
    asked = []

    def load(path: str, name: str | None, revision: str | None) -> FakeBuilder:
        asked.append((path, name, revision))
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load)

    def hub(**keys: Any) -> RowSource:
        return open_dataset(
            DatasetConfig(kind="hub", path="o/d", name="main", streaming=streaming, **keys)
        )

    with pytest.raises(
        ConfigError, match=r"^dataset.split: o/d has several splits, .* train, test$"
    ):
        hub()
    assert not builder.downloaded
    data = hub(split="test", revision="v1")
    assert asked[-1] == ("o/d", "main", "v1")
    assert fields(data) == [{"q": "test"}]
    assert data.fingerprint == hub(split="test").fingerprint != hub(split="train").fingerprint
    builder.hash = "commit2"
    assert data.fingerprint != hub(split="test").fingerprint


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **keys: Any) -> None:
        raise ConnectionError("Couldn't reach 'o/d' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    with pytest.raises(
        ConfigError, match=r"^dataset.path: cannot load o/d: ConnectionError: Couldn'"
    ):
        open_dataset(DatasetConfig(kind="hub", path="o/d"))
