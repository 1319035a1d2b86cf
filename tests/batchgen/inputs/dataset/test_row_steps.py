"""Steps of `rows`: columns that prompts and outputs have besides those of the data set."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.evals.graders.choices import OrderChoices
from batchgen.inputs.dataset.row_source import open_dataset
from batchgen.inputs.dataset.row_steps import SteppedSource
from batchgen.inputs.dataset.source import Row
from batchgen.util.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"q": "1?", "right": "yes", "wrong": "no", "choices": "old"},
    {"q": "2?", "right": "no", "wrong": None, "choices": "old"},
    {"q": "3?", "right": "a", "wrong": "b", "choices": "old"},
]


def source(tmp_path: Path, *steps: OrderChoices, **keys: Any) -> SteppedSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return SteppedSource(open_dataset(DatasetConfig(kind="files", path=str(path), **keys)), steps)


ROTATED = OrderChoices(columns=("right", "wrong"), order="rotated")


def test_columns_are_added_and_replaced(tmp_path: Path) -> None:
    stepped = source(tmp_path, ROTATED)
    rows = list(stepped.rows())
    assert [row.fields["choices"] for row in rows] == [["no", "yes"], "old", ["b", "a"]]
    assert stepped.schema.names == ["q", "right", "wrong", "choices", "target"]
    assert set(stepped.features) == {"q", "right", "wrong", "choices", "target"}
    assert str(stepped.schema.field("choices").type) == "list<item: string>"
    written = [stepped.passthrough(row) for row in rows]
    assert written[0] == {**ROWS[0], "choices": ["no", "yes"], "target": "B"}
    assert written[1] == {**ROWS[1], "choices": None, "target": None}


def test_a_row_in_which_a_step_fails_says_so(tmp_path: Path) -> None:
    failures = [row.failure for row in source(tmp_path, ROTATED).rows()]
    assert failures[0] is None and failures[2] is None
    assert failures[1] is not None and failures[1].type == "bad_choices"
    assert "no value in column 'wrong'" in str(failures[1])


def test_a_row_is_the_same_wherever_reading_starts(tmp_path: Path) -> None:
    stepped = source(tmp_path, ROTATED, columns=["q"])
    assert [row.fields for row in stepped.rows(2)] == [row.fields for row in stepped.rows()][2:]
    assert stepped.schema.names == ["q", "choices", "target"]
    assert all(isinstance(row, Row) for row in stepped.rows())


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\[0\]: OrderChoices reads the column 'c'"):
        source(tmp_path, OrderChoices(columns=("right", "c")))
