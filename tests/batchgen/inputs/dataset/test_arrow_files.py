"""Parquet and Arrow files of any writer: what other rows and files have is no part of a row."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import row_reader
from tests.support.jobs.row_files import BOTH, fields, source

pytestmark = pytest.mark.usefixtures("in_folder")
FORMATS = pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])


def write(kind: str, *tables: pa.Table) -> str:
    """A folder with a file of each table."""
    Path(kind).mkdir(exist_ok=True)
    for number, table in enumerate(tables):
        path = f"{kind}/{number}.{'parquet' if kind == 'parquet' else 'arrow'}"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            with pa.OSFile(path, "wb") as file, new(file, table.schema) as out:
                out.write_table(table)
    return kind


def column(values: list[Any], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"v": pa.array(values, kind)})


CALLS = [
    {"calls": [{"name": "f", "arguments": {"city": "Oslo"}}], "note": None},
    {"calls": [{"name": "g", "arguments": {"a": 2}}], "note": "x"},
    {"calls": [], "note": "x"},
]


@pytest.mark.quick(2)
@BOTH
@FORMATS
def test_fields_that_only_other_rows_have_are_in_no_struct(kind: str, streaming: bool) -> None:
    data = source(write(kind, pa.Table.from_pylist(CALLS)), streaming=streaming)
    assert fields(data) == CALLS
    if not streaming:
        assert [row.fields for row in data.rows_at([1, 0])] == [CALLS[1], CALLS[0]]
    out = pa.Table.from_pylist([data.passthrough(row) for row in data.rows()], schema=data.schema)
    given = pa.schema([f.with_metadata({"meaning": "as in the input"}) for f in data.schema])
    assert list(map(row_reader(given), out.to_pylist())) == CALLS


def test_a_row_is_the_same_alone() -> None:
    whole = fields(source(write("parquet", pa.Table.from_pylist(CALLS))))
    for row, want in zip(CALLS, whole, strict=True):
        (alone,) = fields(source(write("parquet", pa.Table.from_pylist([row]))))
        assert alone == want


VIEWS: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
    (pa.array(["x", None], pa.string_view()), pa.string(), ["x", None]),
    (pa.array([["x"], None], pa.list_(pa.string_view())), pa.list_(pa.string()), [["x"], None]),
    (pa.array([[1], [2, 3]], pa.list_view(pa.int64())), pa.list_(pa.int64()), [[1], [2, 3]]),
    (pa.array(["x", "x"]).dictionary_encode(), pa.string(), ["x", "x"]),
    (pa.array(["x"], pa.large_string()), pa.large_string(), ["x"]),
    (pa.array([b"x"], pa.binary_view()), pa.binary(), [b"x"]),
    (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), pa.string(), ["a", "a", "b"]),
    (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16))),
        pa.string(),
        [str(UUID(bytes=b"0123456789abcdef"))],
    ),
    (
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"007"', '{"a":[1]}'])),
        pa.string(),
        ["007", {"a": [1]}],
    ),
]


@pytest.mark.quick(3)
@BOTH
@FORMATS
@pytest.mark.parametrize("case", VIEWS, ids=lambda case: str(case[0].type))
def test_types_of_newer_writers(case: Any, kind: str, streaming: bool) -> None:
    array, stored, want = case
    if pa.types.is_run_end_encoded(array.type) and kind == "parquet":
        pytest.skip("Parquet has no such type")
    data = (
        source(write(kind, pa.table({"v": array})), streaming=streaming, columns=("v",))
        if not pa.types.is_binary_view(array.type)
        else source(write(kind, pa.table({"v": array})), streaming=streaming)
    )
    assert [row["v"] for row in fields(data)] == want
    assert data.schema.field("v").type == stored
    out = [data.passthrough(row) for row in data.rows()]
    assert pa.Table.from_pylist(out, schema=data.schema).take([0]).num_rows == 1
    assert streaming or rows_digest(data, len(want))


DAY, TIME = datetime(2020, 1, 2), datetime(2021, 3, 4, 5, 6, 7, 890)
FILES: list[tuple[pa.Table, pa.Table]] = [
    (column([7]), column(["007", "x"])),
    (column(["x"]), column([7])),
    (column([7]), column([1.5])),
    (column([1.5]), column([7])),
    (column([7], pa.int32()), column([2**40])),
    (column([2**63 + 1], pa.uint64()), column([-1])),
    (column([DAY], pa.timestamp("s")), column([TIME])),
    (column([TIME]), column([DAY], pa.timestamp("s"))),
    (column([Decimal("1.10")]), column([Decimal("12345.67")])),
    (column([True]), column([1])),
    (column([None]), column(["x"])),
    (column([["x"], []]), column([[]])),
    (column([[]]), column([["x"]])),
    (column([{"a": 1}]), column([{"b": "x"}])),
    (column([{"a": {"c": 1}}]), column([{"a": {"c": "1"}}])),
    (column([{"a": 1}]), column(["x"])),
    (column(["x"], pa.large_string()), column(["y"])),
    (column([1]), pa.table({"w": [1], "v": [2]})),
]


@pytest.mark.quick(2)
@BOTH
@FORMATS
@pytest.mark.parametrize("number", range(len(FILES)))
def test_files_of_other_types_and_columns(number: int, kind: str, streaming: bool) -> None:
    tables = FILES[number]
    rows = [row for table in tables for row in table.to_pylist()]
    names = dict.fromkeys(name for table in tables for name in table.column_names)
    data = source(write(kind, *tables), streaming=streaming)
    want = [{name: row.get(name) for name in names} for row in rows]
    assert repr(fields(data)) == repr(want)
    out = [data.passthrough(row) for row in data.rows()]
    read = row_reader(data.schema)
    got = map(read, pa.Table.from_pylist(out, schema=data.schema).to_pylist())
    if "{" not in repr(want[0]["v"]):
        assert repr(list(got)) == repr(want)


UNLIKE = [
    pa.array([TIME]),
    pa.array([DAY.date()]),
    pa.array([TIME], pa.timestamp("us", "UTC")),
    pa.array([Decimal("1.10")]),
    pa.array([Decimal("1.1234")]),
    pa.array([timedelta(1)]),
    pa.array([b"x"]),
    pa.array([[DAY.date()]]),
    pa.array([{"a": DAY.date()}]),
    pa.array(["2021-03-04"]),
    pa.array([7]),
    pa.array([0.1]),
]


@pytest.mark.parametrize("second", range(len(UNLIKE)))
def test_no_value_is_converted_to_the_type_of_another_file(second: int) -> None:
    """A time would lose its hours as a date, and 0.1 become 0.10 as a decimal."""
    for first in range(min(second, 9)):
        for i, k in ((first, second), (second, first)):
            unlike = pa.table({"v": UNLIKE[i]}), pa.table({"v": UNLIKE[k]})
            with pytest.raises(ConfigError, match=r"parquet/1.parquet: column 'v' has the type .*"):
                source(write("parquet", *unlike))


def test_what_cannot_be_a_row_is_named() -> None:
    intervals = pa.table({"m": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pytest.raises(ConfigError, match=r"arrow/0.arrow: column 'm' has the type month_day"):
        source(write("arrow", intervals))
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ConfigError, match=r"0.parquet has two columns 'a': rename one"):
        source(write("parquet", twice))
