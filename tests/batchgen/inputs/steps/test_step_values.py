"""Values in row steps: keys that can be equal, and pieces that stay what they are."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features, Value

from batchgen.inputs.row_index.chain import Chain
from batchgen.inputs.steps.join import Join
from batchgen.inputs.steps.pieces import Cross
from batchgen.inputs.steps.table_step import Tools
from batchgen.util.errors import ConfigError

FEATURES = Features({"text": Value("string")})


def test_the_id_of_the_row_is_text(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text('{"id": 1, "note": "n"}\n')
    step = Join(path=str(tmp_path / "j.jsonl"), on={"row_id": "id"}, columns=("note",))
    with pytest.raises(ConfigError, match=r"'row_id' holds text, .* whole numbers.*: write both"):
        Chain([step], FEATURES)


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        ("int64", "float64", False),  # pandas makes floats of whole numbers beside a null
        ("int32", "bool", False),
        ("string", "date32", False),
        ("timestamp[us]", "timestamp[us, tz=UTC]", False),
        ("decimal128(3, 2)", "decimal128(5, 4)", False),
        ("timestamp[s]", "timestamp[us]", True),
        ("int32", "uint64", True),
        ("float32", "float64", True),
        ("null", "int64", True),
    ],
)
def test_keys_must_have_types_that_can_be_equal(
    tmp_path: Path, ours: str, theirs: str, equal: bool
) -> None:
    kind, path = Features({"k": Value(theirs)}).arrow_schema.field("k").type, tmp_path / "j.parquet"
    pq.write_table(pa.table({"k": pa.nulls(1, kind), "note": ["n"]}), path)
    step = Join(path=str(path), on={"key": "k"}, columns=("note",))
    if equal:
        Chain([step], Features({"key": Value(ours)}))
        return
    with pytest.raises(ConfigError, match=r"on: column 'key' holds .* so they are never equal"):
        Chain([step], Features({"key": Value(ours)}))


@pytest.mark.parametrize(
    "pieces",
    [
        [1, 2.5],
        [[1, 2.5]],
        [{"a": 1}, {"a": 2.5}],
        [True, 1],
        [10**25],
        [2**63],
        [{}],
        [{"tools": {}}],
        [{"a": None, "b": 1}],
        [[2**53 + 1, 0.5]],
        ["\ud83d"],
    ],
)
def test_pieces_that_would_change_are_refused(pieces: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"p: pieces must all be of one type, .*as text"):
        Chain([Cross(pieces={"p": pieces})], FEATURES)


@pytest.mark.parametrize(
    "pieces",
    [
        [1.0, 2.5, float("nan")],
        [{"b": 1, "a": [None, 2]}, {"a": []}],
        [-(2**63), 2**63 - 1],
        [[], ["x"]],
        [False, True],
    ],
)
def test_pieces_of_one_type_are_kept(pieces: list[Any]) -> None:
    assert Chain([Cross(pieces={"p": pieces})], FEATURES)


def test_half_of_a_pair_in_another_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"text": "a", "note": "\\ud83d"}\n')
    named = r"path: .*j.jsonl: a text in note has half of a UTF-16 pair .*: cut texts"
    with pytest.raises(ConfigError, match=named):
        Chain([Cross(pieces={"note": str(path)})], FEATURES)
    join = Join(path=str(path), on=("text",), columns=("note",))
    with pytest.raises(ConfigError, match=named):
        join.start(Tools(FEATURES))
