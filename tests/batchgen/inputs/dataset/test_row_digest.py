"""The digest of rows is of their content alone, and grows with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.inputs.dataset.row_source import open_dataset

ROWS: list[dict[str, Any]] = [
    {
        "text": None if i % 7 == 3 else "ä漢" * (i % 5),
        "number": None if i % 5 == 2 else i,
        "flag": None if i % 3 == 1 else i % 2 == 0,
        "score": i / 3,
        "when": datetime(2024, 1, 1 + i % 28),
        "price": Decimal(i) / 4,
        "raw": bytes([i % 256]),
        "list": None if i % 4 == 0 else [None, f"x{i}"][: i % 3],
        "struct": None if i % 6 == 0 else {"a": i, "b": [{"c": None if i % 5 else "y"}]},
        "pair": None if i % 9 == 0 else [float(i), None],
        "nothing": None,
    }
    for i in range(2345)
]
SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "number": pa.int32(),
        "flag": pa.bool_(),
        "score": pa.float32(),
        "when": pa.timestamp("us"),
        "price": pa.decimal128(10, 2),
        "raw": pa.large_binary(),
        "list": pa.list_(pa.string()),
        "struct": pa.struct({"a": pa.int64(), "b": pa.large_list(pa.struct({"c": pa.string()}))}),
        "pair": pa.list_(pa.float64(), 2),
        "nothing": pa.null(),
    }
)


@dataclass
class Rows:
    """Rows that lie in chunks of `chunk` rows, each a slice of a longer table."""

    rows: list[dict[str, Any]]
    chunk: int = 10_000
    schema: pa.Schema = SCHEMA

    @property
    def num_ready(self) -> int:
        return len(self.rows)

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        table = pa.Table.from_pylist([{}, *self.rows[:stop]], schema=self.schema)
        parts = [table.slice(1 + start, self.chunk) for start in range(0, stop, self.chunk)]
        whole = pa.concat_tables(parts) if parts else table.slice(0, 0)
        for start in range(0, stop, size):
            yield whole.slice(start, size)


def digest(rows: list[dict[str, Any]], **keys: Any) -> list[str]:
    found = rows_digest(Rows(rows, **keys), len(rows))
    assert found is not None
    return found


def test_chunks_and_slices_play_no_part() -> None:
    want = digest(ROWS)
    assert len(set(want)) == len(want) == 3
    assert digest(ROWS, chunk=7) == digest(ROWS, chunk=999) == want


def test_what_lies_under_a_null_plays_no_part() -> None:
    values = pa.array([1, 2, 3])
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], values, mask=pa.array([False, True, False]))
    structs = pa.StructArray.from_arrays([values], ["a"], mask=pa.array([False, True, False]))

    @dataclass
    class Table:
        table: pa.Table
        num_ready: int | None = 3

        def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
            yield self.table

    dirty = pa.table({"l": lists, "s": structs})
    clean = pa.Table.from_pylist(dirty.to_pylist(), schema=dirty.schema)
    assert rows_digest(Table(dirty), 3) == rows_digest(Table(clean), 3)


@pytest.mark.parametrize("column", list(SCHEMA.names)[:-1])
def test_every_value_counts(column: str) -> None:
    changed = [dict(row) for row in ROWS]
    i, j = 1507, 1508
    changed[i][column], changed[j][column] = changed[j][column], changed[i][column]
    assert changed != ROWS
    want, got = digest(ROWS), digest(changed)
    assert got[0] == want[0] and got[1] != want[1] and got[2] != want[2]


def test_names_types_and_borders_count() -> None:
    texts = [{"a": "xy", "b": "z"}], [{"a": "x", "b": "yz"}], [{"a": "xy", "b": None}]
    two = pa.schema({"a": pa.string(), "b": pa.string()})
    found = {digest(rows, schema=two)[0] for rows in texts}
    found |= {digest([{"a": value}], schema=pa.schema({"a": kind}))[0] for value, kind in (
        (1, pa.int64()), (1, pa.int32()), (1.0, pa.float64()), (None, pa.int64()), (None, pa.null())
    )}  # fmt: skip
    found.add(digest([{"b": 1}], schema=pa.schema({"b": pa.int64()}))[0])
    found.add(digest([{"a": [1]}, {"a": []}], schema=pa.schema({"a": pa.list_(pa.int64())}))[0])
    found.add(digest([{"a": []}, {"a": [1]}], schema=pa.schema({"a": pa.list_(pa.int64())}))[0])
    assert len(found) == 11


def test_added_rows_keep_the_digests_before_them() -> None:
    want = digest(ROWS)
    assert rows_digest(Rows(ROWS), 2000) == want[:2] == digest(ROWS[:2000])
    assert rows_digest(Rows(ROWS), 1500) == digest(ROWS[:1500]) != want[:2]
    assert rows_digest(Rows(ROWS), 0) == []


def test_files_of_several_formats_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))
    table = pa.table({"i": list(range(1200)), "q": [f"q{i}" for i in range(1200)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    for name, start in (("1.jsonl", 0), ("2.jsonl", 500)):
        part = table.slice(start, 500 if start == 0 else 700).to_pandas()
        part.to_json(tmp_path / name, orient="records", lines=True)
    found = []
    for path in ("a.parquet", "[12].jsonl"):
        config = DatasetConfig(kind="files", path=str(tmp_path / path))
        source = open_dataset(config)
        assert source.num_rows == 1200
        found.append(rows_digest(source, 1200))
    assert found[0] == found[1]
    limited = open_dataset(
        DatasetConfig(kind="files", path=str(tmp_path / "a.parquet"), limit=1000)
    )
    assert found[0] is not None and rows_digest(limited, 1000) == found[0][:1]
    stream = DatasetConfig(kind="files", path=str(tmp_path / "a.parquet"), streaming=True)
    assert rows_digest(open_dataset(stream), 5) is None
