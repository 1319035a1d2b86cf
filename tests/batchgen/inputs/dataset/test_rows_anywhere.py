"""A row is the same alone, beside any others, in any order of any files, and in every format that
can say what it holds: its prompt, target, id and columns."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.row_source import RowSource
from batchgen.util.templates.row_expression import ExpressionFailed, RowExpression
from batchgen.util.templates.row_templates import RowTemplate
from tests.support.jobs.row_files import jsonl, read_back, source

pytestmark = pytest.mark.usefixtures("in_folder")

Rows = list[dict[str, Any]]
COLUMNS = ("i", "v", "w")
LIKE_DATA = ["007", "null", "true", "1e5", "NaN", "[1, 2]", '{"k": 1}', '"q"', "2024-01-01", "1_0"]
LIKE_CSV = ['"', '""', 'a "b"', "a,b", "a\tb", "a\nb", "a\r\nb", "a\rb", "\\", " x ", "", "\u2028"]
SIGNS = "aé日🙂\x00\x85\ufeff\"'\\,:{}[]0. \n\t"
TEXTS = st.sampled_from([*LIKE_DATA, *LIKE_CSV]) | st.text(SIGNS, max_size=5)
NUMBERS = st.sampled_from([0, -1, 7, 2**53 + 1, 2**63, 2**70, -0.0, 1.0, 0.5, 1e300])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "b", "items", "é"]), inner, max_size=2)
    ),
    max_leaves=4,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"]), "content": st.none() | TEXTS},
    optional={"name": TEXTS, "calls": st.lists(st.fixed_dictionaries({"arguments": VALUES}))},
)
KINDS = [VALUES, SCALARS, TEXTS, TEXTS | st.none(), NUMBERS, st.lists(MESSAGES, max_size=2)]
TEMPLATES = [
    RowTemplate("prompt.user", text, COLUMNS)
    for text in ("{{ v|tojson }}", "{{ v }}", "{{ w or '-' }}", "{{ v.a or v[0] or '-' }}{{ w }}")
]
WHERES = [
    RowExpression("where", text, COLUMNS)
    for text in ("v", "w", "v.a", "v.a is none", "v[0]", "v == w", "w > 1")
]
SOME = settings(max_examples=settings().max_examples // 4)
_NUMBERS = count()


@st.composite
def several_rows(draw: st.DrawFn) -> Rows:
    """Rows whose columns are each of one kind, which may hold values of many types."""
    v, w = draw(st.sampled_from(KINDS)), draw(st.sampled_from(KINDS))
    ids = draw(st.lists(TEXTS.filter(bool), min_size=2, max_size=4, unique=True))
    return [{"i": i, "v": draw(v), "w": draw(w)} for i in ids]


def folder() -> Path:
    """A folder of its own for each example."""
    path = Path(f"rows-{next(_NUMBERS)}")
    path.mkdir()
    return path


def tried(make: Callable[[], Any]) -> str:
    """What a call gives, or its error."""
    try:
        return f"gives {json.dumps(make())}"
    except (RequestError, ExpressionFailed) as error:
        return f"{type(error).__name__}: {error}"


def without_nulls(value: Any) -> Any:
    """A value as Arrow can say it: its objects lack the fields that are null, and the order of the
    others is that of a column, not of a row."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in sorted(value.items()) if v is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def facts(data: RowSource, *, is_parquet: bool = False) -> dict[str, list[str]]:
    """What jobs make of each row, by its id."""
    found = {}
    for row, columns in zip(data.rows(), read_back(data), strict=True):
        fields = {name: without_nulls(row.fields[name]) for name in COLUMNS}
        seen = fields if is_parquet else row.fields
        found[row.id] = [
            json.dumps(seen),
            json.dumps({name: without_nulls(columns[name]) for name in COLUMNS}),
            *(tried(partial(template.render, seen)) for template in TEMPLATES),
            *(tried(partial(where.value, seen)) for where in WHERES),
        ]
    return found


def opened(path: Path, streaming: bool) -> RowSource:
    return source(path, id_column="i", streaming=streaming)


@SOME
@given(rows=several_rows(), seed=st.integers(0, 9), streaming=st.booleans())
def test_rows_of_json(rows: Rows, seed: int, streaming: bool) -> None:
    at, rng = folder(), random.Random(seed)
    alone: dict[str, list[str]] = {}
    for number, row in enumerate(rows):
        alone |= facts(opened(jsonl(f"{at}/alone/{number}.jsonl", [row]), streaming))
    assert list(alone) == [row["i"] for row in rows]
    assert [json.loads(found[0]) for found in alone.values()] == rows
    assert facts(opened(jsonl(f"{at}/all.jsonl", rows), streaming)) == alone
    mixed = rng.sample(rows, len(rows))
    cut = rng.randrange(len(rows) + 1)
    for number, part in enumerate([mixed[:cut], mixed[cut:]]):
        jsonl(f"{at}/parts/{number}.jsonl", part)
    assert facts(opened(at / "parts", streaming)) == alone
    (at / "list.json").write_text(json.dumps(mixed, indent=1))
    assert facts(opened(at / "list.json", streaming)) == alone
    shutil.rmtree(at)


NULLS = {"role": "user", "content": None}


@example([{"i": "a", "v": [], "w": None}, {"i": "b", "v": [NULLS, NULLS], "w": None}], 0, False)
@SOME
@given(rows=several_rows(), seed=st.integers(0, 9), streaming=st.booleans())
def test_rows_of_parquet(rows: Rows, seed: int, streaming: bool) -> None:
    """Values that Arrow holds in one column, with its padding."""
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, OverflowError):
        return
    if json.dumps(without_nulls(table.to_pylist())) != json.dumps(without_nulls(rows)):
        return
    at, rng = folder(), random.Random(seed)
    mixed = rng.sample(rows, len(rows))
    try:
        pq.write_table(table, at / "all.parquet", row_group_size=1)
        (at / "parts").mkdir()
        for number, row in enumerate(mixed):
            pq.write_table(pa.Table.from_pylist([row]), at / f"parts/{number}.parquet")
    except pa.ArrowException:  # an object without fields
        return
    want = facts(opened(jsonl(f"{at}/all.jsonl", rows), streaming), is_parquet=True)
    assert facts(opened(at / "all.parquet", streaming), is_parquet=True) == want
    assert facts(opened(at / "parts", streaming), is_parquet=True) == want
    shutil.rmtree(at)


def write_csv(path: Path, rows: Sequence[dict[str, Any]], **form: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, **form)
        writer.writeheader()
        writer.writerows(rows)


@SOME
@given(
    cells=st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=4),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    escape=st.booleans(),
    seed=st.integers(0, 9),
    streaming=st.booleans(),
)
def test_rows_of_csv(
    cells: list[tuple[str, str]], quoting: Any, escape: bool, seed: int, streaming: bool
) -> None:
    rows = [{"i": str(i), "v": v, "w": w} for i, (v, w) in enumerate(cells)]
    at, rng = folder(), random.Random(seed)
    want = facts(opened(jsonl(f"{at}/all.jsonl", rows), streaming))
    mixed = rng.sample(rows, len(rows))
    form: dict[str, Any] = {"doublequote": False, "escapechar": "\\"} if escape else {}
    keys = {"escape_char": "\\"} if escape else {}
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        more = keys | ({"quote_char": '"'} if name == "tsv" else {})
        for number, part in enumerate([mixed[:1], mixed[1:]]):
            file = at / f"{name}s/{number}.{name}"
            write_csv(file, part, quoting=quoting, delimiter=delimiter, **form)
        data = source(at / f"{name}s", id_column="i", streaming=streaming, **more)
        assert facts(data) == want
    shutil.rmtree(at)


@pytest.mark.parametrize("inner", ["list", "object", "both"])
def test_deeply_nested_rows_can_be_read_from_a_shard(inner: str) -> None:
    """Parquet files with over 49 lists in each other can be written but not read."""
    value: Any = [1, "x"]
    for _ in range(120):
        value = (
            [value] if inner == "list" else {"a": value} if inner == "object" else [{"a": value}]
        )
    data = source(jsonl("a.jsonl", [{"v": value}, {"v": None}]))
    out = [data.passthrough(row) for row in data.rows()]
    pq.write_table(pa.Table.from_pylist(out, schema=data.schema), "shard.parquet")
    assert pq.read_table("shard.parquet").num_rows == 2
    assert [row["v"] for row in read_back(data)] == [value, None]
