"""Pipelines for tests: three steps with a tiny model, which read each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from batchgen.__main__ import run_command
from batchgen.cli.verb_table import VERBS
from batchgen.config.compose.trust import TYPED
from batchgen.pipelines.run.pipeline import Pipeline, compose_pipeline
from batchgen.pipelines.run.pipeline_file import read_pipeline
from batchgen.storage.folder.step_folders import find_record

EXTRACT = {
    "_target_": "batchgen.grading.extract.Extract", "methods": ["regex"], "pattern": "([a-z])"
}  # fmt: skip
STEPS: dict[str, Any] = {
    "draft": {"sampling.n": 2, "post": [EXTRACT]},
    "judge": {
        "from": "draft",
        "dataset": {"where": "sample_index == 1 or row_id != 'r3'", "text_as": "reply"},
        "rows": [{"Filter": {"where": "reply|length > 0"}}],
        "prompt.user": "{{ q }} {{ reply }}",
    },
    "last": {
        "from": "judge",
        "dataset.text_as": "verdict",
        "rows": [{"Join": {"from": "draft", "on": "row_id", "columns": {"q": "again"}}}],
        "prompt.user": "{{ verdict }}",
    },
}


def values(model: Path, rows: Path, out: Path) -> dict[str, Any]:
    """A pipeline file of three steps: eleven rows, some of which the second step leaves out."""
    return {
        "model.path": str(model),
        "dataset": {"choice": "files", "path": str(rows), "id_column": "id"},
        "prompt.user": "{{ q }}",
        "sampling": {"choice": "sample", "max_new_tokens": 8},
        "engine": {"kv_cache_gib": 0.01, "device": "cpu"},
        "output": {"dir": str(out), "rows_per_shard": 4, "report": False},
        "steps": copy.deepcopy({k: v for k, v in STEPS.items() if k != "last"})
        | {"last": {**copy.deepcopy(STEPS["last"]), "rows": []}},
    }


def written(path: Path, given: Mapping[str, Any]) -> str:
    """The path of a pipeline file with these values."""
    path.write_text(yaml.safe_dump(dict(given), sort_keys=False), encoding="utf-8")
    return str(path)


def composed(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline of values and arguments."""
    return compose_pipeline(read_pipeline(given, {}, overrides, VERBS), TYPED)


def run(path: str, *overrides: str) -> int:
    """Run a pipeline file and return the exit code."""
    return run_command([path, *overrides])


def folders(out: Path) -> dict[str, Path]:
    """The current folders of the steps."""
    record = find_record(str(out))
    assert record is not None
    return {name: out / folder for name, folder in record.current.items()}


def shards(out: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The rows of every shard of the current folders, by step and file."""
    return {
        name: {path.name: pq.read_table(path).to_pylist() for path in sorted(_data(folder))}
        for name, folder in folders(out).items()
    }


def _data(folder: Path) -> list[Path]:
    return list((folder / "data").glob("*.parquet"))
