"""Data sets with very many columns, and very deep rows, are refused before anything reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.row_source import open_dataset
from batchgen.util.errors import ConfigError


def test_very_many_columns_of_json_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({f"c{i}": 1 for i in range(10_001)}))
    with pytest.raises(ConfigError, match="has 10,001 columns, and at most 10,000 can"):
        open_dataset(DatasetConfig(kind="files", path=str(path)))


def test_very_many_columns_of_csv_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(f"c{i}" for i in range(100_000)) + "\n")
    with pytest.raises(ConfigError, match="has 100,000 columns, and at most 10,000 can"):
        open_dataset(DatasetConfig(kind="files", path=str(path)))


@pytest.mark.parametrize("text", ['{"q": %s}', "[%s]"])
def test_a_very_deep_row_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text % ("[" * 100_000 + "]" * 100_000))
    with pytest.raises(ConfigError, match=r"nested too deeply|recursion"):
        open_dataset(DatasetConfig(kind="files", path=str(path)))
