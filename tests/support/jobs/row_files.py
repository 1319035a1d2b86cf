"""Files of rows, and their rows as a job reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.row_source import RowSource, open_dataset

BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])


def source(path: str | Path, **keys: Any) -> RowSource:
    return open_dataset(DatasetConfig(kind="files", path=str(path), **keys))


def jsonl(name: str, rows: list[Any]) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(name)


def fields(rows: RowSource) -> list[dict[str, Any]]:
    return [row.fields for row in rows.rows()]


def text(name: str, content: str | bytes) -> Callable[[], object]:
    data = content if isinstance(content, bytes) else content.encode()

    def make() -> None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)

    return make
