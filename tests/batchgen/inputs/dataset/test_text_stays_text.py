"""What stands in files of text reaches the rows as it stands there."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.inputs.dataset.row_source import RowSource, open_dataset
from batchgen.inputs.tables import json_tables, text_tables
from batchgen.util.errors import ConfigError
from tests.support.jobs.row_files import BOTH, fields

pytestmark = pytest.mark.usefixtures("in_folder")


def source(path: str, content: str | bytes | None = None, **keys: Any) -> RowSource:
    if content is not None:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_dataset(DatasetConfig(kind="files", path=path, **keys))


@BOTH
@pytest.mark.parametrize(
    "cell",
    ["001", "02134", "NA", "None", "null", "nan", "1e5", "  padded ", "true", "", "2024-01-01"],
)
def test_a_cell_of_csv_is_the_text_that_it_is(cell: str, streaming: bool) -> None:
    data = source("a.csv", f"a,b\n{cell},x\n{cell},y\n", streaming=streaming)
    assert fields(data) == [{"a": cell, "b": "x"}, {"a": cell, "b": "y"}]
    assert data.schema == pa.schema({"a": pa.string(), "b": pa.string()})


@BOTH
def test_quotes_byte_order_marks_blank_lines_and_line_ends(streaming: bool) -> None:
    content = b'\xef\xbb\xbf"a",b\r\n"x\r\ny","say ""hi"", you"\r\n\r\n5" pipe,\r\n'
    want = [{"a": "x\r\ny", "b": 'say "hi", you'}, {"a": '5" pipe', "b": ""}]
    assert fields(source("a.csv", content, streaming=streaming)) == want
    assert fields(source("a.csv.gz", gzip.compress(content), streaming=streaming)) == want


def test_the_index_that_pandas_writes_has_a_name() -> None:
    assert fields(source("a.csv", ",q\n0,x\n")) == [{"Unnamed: 0": "0", "q": "x"}]


def test_cells_may_be_long_and_files_may_end_anywhere() -> None:
    before = csv.field_size_limit()
    assert fields(source("a.csv", f"a\n{'x' * 200_000}")) == [{"a": "x" * 200_000}]
    assert csv.field_size_limit() == before


@BOTH
def test_delimiters_and_tables_of_several_chunks(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_tables, "_ROWS", 2)
    rows = [{"a": str(i), "b": f"x, {i}\t{i}"} for i in range(5)]
    for name, mark, keys in (
        ("a.csv", ";", {"delimiter": ";"}),
        ("a.tsv", "\t", {"quote_char": '"'}),
    ):
        text = io.StringIO()
        writer = csv.DictWriter(text, ["a", "b"], delimiter=mark)
        writer.writeheader()
        writer.writerows(rows)
        assert fields(source(name, text.getvalue(), streaming=streaming, **keys)) == rows
    assert fields(source("b.csv", "a\tb\n1\t2\n", delimiter=r"\t")) == [{"a": "1", "b": "2"}]


MYSQL = {"escape_char": "\\"}


@pytest.mark.parametrize(
    ("name", "content", "keys", "cells"),
    [
        ("a.tsv", 'q\n"efg\nhij\nklm"\n', {"quote_char": None}, ['"efg', "hij", 'klm"']),
        ("a.tsv", 'q\n"Hello" she said\n', {"quote_char": None}, ['"Hello" she said']),
        ("a.tsv", 'q\nshe said "Hello"\n', {}, ['she said "Hello"']),
        ("a.tsv", '"q"\n"say ""a\tb"""\n', {"quote_char": '"'}, ['say "a\tb"']),
        ("a.csv", 'q\n"Hello" she said\n', {"quote_char": None}, ['"Hello" she said']),
        ("a.csv", "q\n'a,\"b'\n'it''s'\n", {"quote_char": "'"}, ['a,"b', "it's"]),
        ("a.csv", 'q\n"say \\"hi\\", \\\\ now"\n', MYSQL, ['say "hi", \\ now']),
        ("a.csv", 'q\n\\"a\\,b\\\nc\\\rd\n', MYSQL, ['"a,b\nc\rd']),
        ("a.tsv", 'q\n"a\\\tb\\\\"\n', MYSQL | {"quote_char": None}, ['"a\tb\\"']),
        ("a.csv", 'q\n"say ""hi"""\n"\\""\n', MYSQL, ['say "hi"', '"']),
        ("a.csv", 'q\n""\n\n5" pipe\n', {}, ["", '5" pipe']),
    ],
)
def test_quotes_and_escapes(
    name: str, content: str, keys: dict[str, Any], cells: list[str]
) -> None:
    assert fields(source(name, content, **keys)) == [{"q": cell} for cell in cells]


@pytest.mark.parametrize(
    ("name", "content", "keys", "why"),
    [
        ("a.tsv", '1\tab\n2\t"efg\n3\tklm"\n', {}, "line 2: a cell begins with a quote"),
        ("a.tsv", 'a\tb\n\t"Hello"\n', {}, "dataset.quote_char=null if they are text"),
        ("a.csv", 'a,b\n1,2\n3,"Hello" she said\n', {}, 'line 3: there is text after the "'),
        ("a.csv", 'q\n"a\nb" c\n', {}, "line 2: there is text after"),
        ("a.csv", 'q\n"say \\"hi\\" now"\n', {}, "set dataset.escape_char if"),
        ("a.csv", 'q\n"say \\"\n', MYSQL, "line 2: a quote that opens in this row is never"),
        ("a.csv", "q\nC:\\new\n", MYSQL, r"line 2: dataset.escape_char \\ comes before 'n'"),
        ("a.csv", "q\na\\", MYSQL, r"line 2: dataset.escape_char \\ comes before ''"),
        ("a.csv", 'q\n"say \\"hi\\', MYSQL, r"line 2: dataset.escape_char \\ comes before ''"),
        ("a.csv", "q\r\na\\\r\nb\r\n", MYSQL, r"line 2: dataset.escape_char \\ comes before"),
        ("a.csv", '"q\n', {}, "line 1: a quote that opens in this row is never closed"),
        ("a.csv", 'a,b\n"1,2",3\n', {"quote_char": None}, "hold ',' need dataset.quote_char"),
        ("a.parquet", "", {"quote_char": '"'}, "dataset.quote_char is for .csv and .tsv files"),
        ("a.jsonl", "{}", {"escape_char": "!"}, "dataset.escape_char is for .csv and .tsv files"),
    ],
)
def test_quotes_that_lose_nothing_in_silence(
    name: str, content: str, keys: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        source(name, content, **keys)


def test_the_default_quote_is_the_same_data() -> None:
    plain, given = source("a.csv", 'q\n"a"\n'), source("a.csv", quote_char='"')
    assert plain.fingerprint == given.fingerprint != source("a.csv", quote_char=None).fingerprint
    assert fields(source("a.tsv", 'q\n"a"\n', quote_char='"')) == [{"q": "a"}]
    with pytest.raises(ConfigError, match="begins with a quote"):  # also if the rows are in a cache
        source("a.tsv")


@BOTH
def test_types_are_as_told(streaming: bool) -> None:
    kinds = {"i": "int64", "f": "float64", "b": "bool", "d": "date32"}
    content = "i,f,b,d,s\n007,1e5,true,2024-01-31,007\n,,,,\n"
    first, second = fields(source("a.csv", content, types=kinds, streaming=streaming))
    assert (first["i"], first["f"], first["b"], first["s"]) == (7, 1e5, True, "007")
    assert str(first["d"]) == "2024-01-31"
    assert second == {"i": None, "f": None, "b": None, "d": None, "s": ""}


def test_the_cache_knows_how_a_file_was_read() -> None:
    found = [
        source("a.csv", "a;b\n1;2\n", **keys)
        for keys in ({}, {"delimiter": ";"}, {"delimiter": ";", "types": {"a": "int64"}}, {})
    ]
    assert [next(data.rows()).fields for data in found] == [
        {"a;b": "1;2"},
        {"a": "1", "b": "2"},
        {"a": 1, "b": "2"},
        {"a;b": "1;2"},
    ]
    assert len({data.fingerprint for data in found}) == 3


@BOTH
def test_text_of_json_that_looks_like_a_date_stays_text(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_tables, "_CHUNK", 100)
    rows = [
        {
            "d": "2024-01-01",
            "n": {"t": "2024-01-01 00:00:00"},
            "l": ["2024-05-01T00:00:00Z"],
            "i": i,
        }
        for i in range(7)
    ]
    data = source("a.jsonl", "".join(json.dumps(r) + "\n" for r in rows), streaming=streaming)
    assert fields(data) == rows
    assert data.schema.field("d").type == pa.string()
    assert fields(source("b.json", json.dumps(rows), streaming=streaming)) == rows


def test_dates_beside_values_of_several_types() -> None:
    rows = [{"d": "2024-01-01", "m": 1}, {"d": "2024-01-02", "m": {"k": "2024-01-03"}}]
    data = source("a.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    assert fields(data) == rows


def test_dates_only_in_a_later_part_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row is no date; later ones look like dates, and one is a number."""
    monkeypatch.setattr(json_tables, "_CHUNK", 30)
    Path("1.jsonl").write_text('{"d": "unknown"}\n')
    Path("2.jsonl").write_text('{"d": "2024-01-01"}\n{"d": "2024-01-02"}\n{"d": 7}\n')
    want = ["unknown", "2024-01-01", "2024-01-02", 7]
    assert [f["d"] for f in fields(source("[12].jsonl"))] == want


def test_numbers_of_json_are_exact() -> None:
    rows = [{"i": 2**63 - 1, "f": 0.1234567890123456789, "e": 1e300}]
    assert fields(source("a.jsonl", json.dumps(rows[0]) + "\n")) == rows


def test_rows_are_no_logs_of_agents() -> None:
    """datasets makes other rows of files that have these columns."""
    row = {"id": "a", "source": "b", "model": "c", "system_prompt": "d", "messages": [{"x": 1}]}
    assert fields(source("a.jsonl", json.dumps(row) + "\n")) == [row]


@BOTH
def test_a_row_per_line_of_text(streaming: bool) -> None:
    content = "first\r\n\n  second \n \t\n{{ third }}\x0b,\u2028"
    want = [{"line": "first"}, {"line": "  second "}, {"line": "{{ third }}\x0b,\u2028"}]
    assert fields(source("a.txt", content, streaming=streaming)) == want


@BOTH
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "gb18030"])
def test_encodings(encoding: str, streaming: bool) -> None:
    word = "Käse" if encoding == "latin-1" else "漢字"
    keys: dict[str, Any] = {"encoding": encoding, "streaming": streaming}
    csv_rows = fields(source("a.csv", f"a,b\r\n{word},2\r\n".encode(encoding), **keys))
    assert csv_rows == [{"a": word, "b": "2"}]
    assert fields(source("a.txt.gz", gzip.compress(word.encode(encoding)), **keys)) == [
        {"line": word}
    ]
    lines = (json.dumps({"a": word}, ensure_ascii=False) + "\n").encode(encoding)
    assert fields(source("a.jsonl", lines, **keys)) == [{"a": word}]


def test_notes_beside_rows_are_no_rows() -> None:
    Path("d").mkdir()
    Path("d/LICENSE.txt").write_text("free\n")
    Path("d/rows.jsonl").write_text('{"q": 1}\n')
    Path("e").mkdir()
    Path("e/a.txt").write_text("one\n")
    assert fields(source("d")) == [{"q": 1}]
    assert fields(source("e")) == [{"line": "one"}]


def test_a_readme_that_names_files_leaves_their_text_alone() -> None:
    Path("d").mkdir()
    Path("d/a.csv").write_text("zip\n02134\n")
    declared = "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n{}---\n"
    Path("d/README.md").write_text(declared.format(""))
    assert fields(source("d")) == [{"zip": "02134"}]
    Path("d/README.md").write_text(declared.format('  sep: ";"\n'))
    Path("d/a.csv").write_text("zip;b\n02134;1\n")
    assert fields(source("d")) == [{"zip": 2134, "b": 1}]


def test_a_moved_and_renamed_file_has_the_same_fingerprint() -> None:
    old = source("a.csv", "a\n1\n")
    Path("far").mkdir()
    Path("a.csv").rename("far/b.csv")
    new = source("far/b.csv")
    assert new.fingerprint == old.fingerprint
    assert rows_digest(new, 1) == rows_digest(old, 1)
    assert new.fingerprint != source("c.txt", "a\n1\n").fingerprint


def test_a_home_folder_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home/d").mkdir(parents=True)
    Path("home/d/a.jsonl").write_text('{"i": 1}\n')
    Path("link").symlink_to("home/d")
    Path("~").mkdir()
    Path("~/a.jsonl").write_text('{"i": 2}\n')
    for path in ("~/d/a.jsonl", "~/d/*.jsonl", "~/d/", "link/a.jsonl", "x/../home//d"):
        assert fields(source(path)) == [{"i": 1}]
    assert fields(source("./~/a.jsonl")) == [{"i": 2}]
    with pytest.raises(ConfigError, match="there is no user 'nobody-here'"):
        source("~nobody-here/a.jsonl")


class Stdin:
    """Standard input that holds some bytes."""

    def __init__(self, content: bytes, is_terminal: bool = False) -> None:
        self.buffer, self._is_terminal = io.BytesIO(content), is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_rows_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(content: bytes, **keys: Any) -> RowSource:
        monkeypatch.setattr(sys, "stdin", Stdin(content, **keys))
        return source("-")

    first = piped(b'{"i": 1}\n{"i": 2}\n')
    assert fields(first) == fields(first) == [{"i": 1}, {"i": 2}]
    assert piped(b'{"i": 1}\n{"i": 2}\n').fingerprint == first.fingerprint
    assert piped(b'{"i": 1}\n').fingerprint != first.fingerprint
    with pytest.raises(ConfigError, match=r"^dataset.path=-: standard input is empty: pipe"):
        piped(b"")
    with pytest.raises(ConfigError, match=r"standard input, which is a terminal: pipe rows"):
        piped(b"", is_terminal=True)
    with pytest.raises(ConfigError, match=r"^dataset.path: standard input, line 2: not JSON"):
        piped(b'{"i": 1}\n{\n')


@BOTH
def test_nested_ids(streaming: bool) -> None:
    rows = [{"m": {"id": f"k{i}"}, "a.b": i, "x": i if i else {"y": 1}} for i in range(3)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    data = source("a.jsonl", content, id_column="m.id", streaming=streaming)
    assert [row.id for row in data.rows()] == ["k0", "k1", "k2"]
    data = source("a.jsonl", content, id_column="a.b", streaming=streaming)
    assert [row.id for row in data.rows()] == ["0", "1", "2"]
    mixed = [{"x": {"id": "a"}}, {"x": {"id": "b", "n": [1, "s"]}}]
    content = "".join(json.dumps(row) + "\n" for row in mixed)
    data = source("b.jsonl", content, id_column="x.id", streaming=streaming)
    assert [row.id for row in data.rows()] == ["a", "b"]
