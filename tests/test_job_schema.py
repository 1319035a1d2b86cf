"""The JSON Schema of job files, docs/reference/job.schema.json, takes what batchgen takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from batchgen.config.compose.job_file import read_job_file

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file
    for folder in ("examples", "examples/pipelines", "conf/pipeline")
    for file in (ROOT / folder).glob("*.yaml")
)
VALIDATOR = Draft202012Validator(
    json.loads((ROOT / "docs/reference/job.schema.json").read_text(encoding="utf-8"))
)


def problems(values: dict[str, Any]) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(values)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_that_come_with_batchgen_fit(file: Path) -> None:
    Draft202012Validator.check_schema(VALIDATOR.schema)
    assert problems(read_job_file(file)[0]) == []


@pytest.mark.parametrize(
    "values",
    [
        {"model": "hf", "model.path": "x", "sampling": {"choice": "sample", "n": 4, "seed": 7}},
        {"dataset.columns": ["id", "question"], "prompt": {"user": "{{ q }}"}, "post": None},
        {"output.dir": "${model.name}", "sampling.stop": "\n\n", "engine.max_num_seqs": "${x}"},
        {"experiment": ["gpqa"], "rows": [{"Explode": {"column": "a"}}], "model.dtype": "float16"},
    ],
)
def test_other_files_that_fit(values: dict[str, Any]) -> None:
    assert problems(values) == []


@pytest.mark.parametrize(
    "values",
    [
        {"modle": "hf"},
        {"model": {"paht": "x"}},
        {"sampling.temprature": 1},
        {"sampling.n": "four"},
        {"model.dtype": "float8"},
        {"sampling": "samples"},
        {"steps": {"one": {"form": "two"}}},
        {"post": {"Grade": {}}},
        {"experiment": "gpqaa"},
    ],
)
def test_mistakes_are_seen(values: dict[str, Any]) -> None:
    assert problems(values) != []
