"""Files of rows, and their rows as a job reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.row_source import RowSource, open_dataset
from batchgen.util.text.row_json import row_reader

BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])


def source(path: str | Path, **keys: Any) -> RowSource:
    return open_dataset(DatasetConfig(kind="files", path=str(path), **keys))


def jsonl(name: str, rows: list[Any]) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(name)


def fields(rows: RowSource) -> list[dict[str, Any]]:
    return [row.fields for row in rows.rows()]


def same(got: Any, want: Any) -> bool:
    """Whether two values are written alike: 1 is not 1.0 here, and keys have an order."""
    return json.dumps(got) == json.dumps(want)


def read_back(data: RowSource) -> list[dict[str, Any]]:
    """The rows as they are read of an output file of them."""
    out = [data.passthrough(row) for row in data.rows()]
    read = row_reader(data.schema)
    return [read(row) for row in pa.Table.from_pylist(out, schema=data.schema).to_pylist()]


def text(name: str, content: str | bytes) -> Callable[[], object]:
    data = content if isinstance(content, bytes) else content.encode()

    def make() -> None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)

    return make
