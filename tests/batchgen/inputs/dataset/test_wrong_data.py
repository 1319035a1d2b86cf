"""Every data set that cannot be read is named, and how to mend it."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.util.errors import ConfigError
from tests.support.jobs.row_files import BOTH, fields, jsonl, source, text

pytestmark = pytest.mark.usefixtures("in_folder")


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
    ("blank lines", text("a.txt", "\n \n"), {"path": "a.txt"}, r"dataset.path: a.txt has no rows"),
    (
        "date after 9999",
        lambda: pq.write_table(pa.table({"a": pa.array([10**7], pa.date32())}), "a.parquet"),
        {"path": "a.parquet"},
        r"dataset.path: datasets cannot read a.parquet: OverflowError: date value out of range",
    ),
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
        r"dataset.path: a.csv, line 3: a quote that opens in this row is never closed: close it, "
        r"or set dataset.quote_char=null if quotes are text",
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
        r"dataset.types: a.csv, line 5: '1.5' in column 'b' is not of type int64",
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
        "a key twice",
        text("a.jsonl", '{"a": 1}\n\n{"b": {"k": 1, "k": 2}}\n'),
        {"path": "a.jsonl"},
        r"dataset.path: a.jsonl, line 3: the key 'k' appears twice in one object",
    ),
    (
        "two rows on one line",
        text("a.jsonl", '{"a": 1}\n{"a": 2}, {"a": 3}\n'),
        {"path": "a.jsonl"},
        r"dataset.path: a.jsonl, line 2: not JSON: Extra data at column 9",
    ),
    (
        "a row over two lines",
        text("a.jsonl", '{"a": 1}\n{"a": [2\n, 3]}\n'),
        {"path": "a.jsonl"},
        r"dataset.path: a.jsonl, line 2: not JSON: .*",
    ),
    (
        "an id that is half a character",
        text("a.jsonl", '{"i": "a"}\n{"i": "\\ud83d"}\n'),
        {"path": "a.jsonl", **ID},
        r"dataset.id_column: the id '\\ud83d' of row 1 has half of a UTF-16 pair, which no file "
        r"can hold: choose another column, or null to number the rows",
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
        r"dataset.split=val: a.jsonl has no splits: leave dataset.split out, and name the file "
        r"with the rows that you mean",
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


@pytest.mark.quick(22)
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
