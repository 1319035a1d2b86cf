"""Compares the outputs of two jobs, and reads what a killed job left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.storage.folder.read_job import JobFolderReader

TOLERANCE = 1e-5
"""How much floats may differ."""


def compare_outputs(expected: Path, found: Path) -> int:
    """Compare two output folders shard by shard; returns the number of rows.

    Raises:
        AssertionError: if they differ; the message says where.
    """
    names = [path.name for path in sorted((expected / "data").iterdir())]
    assert names == [path.name for path in sorted((found / "data").iterdir())], "other shards"
    rows = 0
    for name in names:
        one, two = (pq.read_table(folder / "data" / name) for folder in (expected, found))
        assert one.schema.equals(two.schema, check_metadata=True), f"{name}: other schema"
        assert one.num_rows == two.num_rows, f"{name}: {one.num_rows} and {two.num_rows} rows"
        keys = list(zip(two["row_index"].to_pylist(), two["sample_index"].to_pylist(), strict=True))
        assert keys == sorted(set(keys)), f"{name}: rows out of order or twice"
        for column in one.column_names:
            assert _equal(one[column], two[column]), f"{name}: column {column} differs"
        rows += one.num_rows
    return rows


def finished_rows(folder: Path) -> int:
    """Count the output rows in the shards and the journals of a job, each once."""
    if not (folder / "manifest.json").is_file():
        return 0
    return sum(batch.num_rows for batch in JobFolderReader(folder).batches(["row_index"]))


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts in the folder's metrics.json; none if there is no such file."""
    path = folder / "metrics.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["attempts"] if path.exists() else []
    return found


def _equal(one: pa.ChunkedArray, two: pa.ChunkedArray) -> bool:
    if one.equals(two):
        return True
    one, two = one.combine_chunks(), two.combine_chunks()
    while pa.types.is_list(one.type) or pa.types.is_fixed_size_list(one.type):
        if pa.types.is_list(one.type) and not one.offsets.equals(two.offsets):
            return False
        one, two = one.flatten(), two.flatten()
    if not pa.types.is_floating(one.type) or one.null_count or two.null_count:
        return False
    return np.allclose(one.to_numpy(), two.to_numpy(), rtol=0, atol=TOLERANCE)
