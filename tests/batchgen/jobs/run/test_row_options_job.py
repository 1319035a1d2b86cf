"""Jobs whose rows bring their own options: a row alone is the row in any company."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.planner import make_plan
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
OPTIONS: list[dict[str, Any] | None] = [
    None,
    {"temperature": 0, "max_tokens": 3},
    {"temperature": 1.5, "seed": 11},
    {"temperature": 1.5, "seed": 12, "top_k": 5, "min_p": 0.01},
    {"top_p": 0.3, "max_completion_tokens": 20},
    {"presence_penalty": 2, "frequency_penalty": 1, "repetition_penalty": 1.3},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}, "max_tokens": 25},
    {"stop": ["a", "e", "i"], "ignore_eos": True, "logit_bias": {}},
    {"temprature": 1},
    {"max_tokens": 100_000},
    {"n": 3},
]
FAILED = {9: "bad_option", 10: "prompt_too_long", 11: "bad_option"}
KEY = "sampling.column=options"


def write(path: Path, rows: dict[int, dict[str, Any] | None]) -> Path:
    lines = [
        {"id": f"r{i}", "q": "Say: " + "ab" * i, "options": json.dumps(options)}
        for i, options in rows.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows = pq.read_table(out / "data", partitioning=None).to_pylist()
    return {(row["row_id"], row["sample_index"]): row for row in rows}


@pytest.mark.thorough
def test_a_row_alone_is_the_row_in_its_batch(model: Path, tmp_path: Path) -> None:
    given = dict(enumerate(OPTIONS))
    out = tmp_path / "all"
    run(overrides(model, write(tmp_path / "all.jsonl", given), out, KEY))
    found = answers(out)
    assert len(found) == 2 * len(OPTIONS)
    for i, options in given.items():
        alone = tmp_path / f"alone{i}"
        more = "output.on_all_errors=continue"
        run(overrides(model, write(tmp_path / f"{i}.jsonl", {i: options}), alone, KEY, more))
        for key, row in answers(alone).items():
            assert {**row, "row_index": i} == found[key]
    for i, type in FAILED.items():
        assert found[f"r{i}", 0]["error"]["type"] == type
    assert "'temprature'" in found["r9", 1]["error"]["message"]
    lengths = {i: len(found[f"r{i}", 0]["token_ids"]) for i in range(9)}
    assert lengths[1] <= 3 and lengths[4] <= 20 and lengths[5] <= 12 < lengths[4]
    assert found["r1", 0]["token_ids"] == found["r1", 1]["token_ids"]
    assert found["r2", 0]["token_ids"] != found["r2", 1]["token_ids"]
    for i in (6, 7):
        for sample in range(2):
            row = found[f"r{i}", sample]
            if row["constraint_satisfied"]:
                assert isinstance(json.loads(row["text"]), dict)
            else:
                assert row["finish_reason"] == "length"
    assert found["r6", 0]["constraint_satisfied"]
    assert found["r0", 0]["constraint_satisfied"] is None


def test_rows_without_options_are_those_of_a_job_without_the_key(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    run(overrides(model, rows, tmp_path / "plain"))
    lines = [json.loads(line) | {"o": None} for line in rows.read_text().splitlines()]
    lines[-1]["o"] = {"temperature": 0.0}
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(overrides(model, rows, tmp_path / "column", "sampling.column=o"))
    plain, column = answers(tmp_path / "plain"), answers(tmp_path / "column")
    same = {key: row["token_ids"] for key, row in plain.items() if key[0] != lines[-1]["id"]}
    assert same == {key: column[key]["token_ids"] for key in same}


def test_the_plan_counts_the_tokens_of_rows(model: Path, tmp_path: Path) -> None:
    given: dict[int, dict[str, Any] | None] = {i: {"max_tokens": 30} for i in range(9)}
    path = write(tmp_path / "rows.jsonl", {**given, 9: None, 10: {"x": 1}})
    config = compose({}, overrides(model, path, tmp_path / "out", KEY))
    plan = make_plan(config, PlanSettings())
    assert plan.scan.longest_answer == 29  # (9 · 30 + 12) / 10, rounded up
    assert plan.forecast is not None
    assert plan.forecast.generated_tokens.bound == pytest.approx(29 * plan.answers, rel=0.2)
    assert plan.scan.bad["bad_option"].count == 1


@pytest.mark.thorough
def test_what_the_paradigm_cannot_do_is_an_error_of_that_row(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model("sdar", **VOCAB)
    save_tokenizer(folder)
    path = write(tmp_path / "rows.jsonl", {0: {"presence_penalty": 1}, 1: {"temperature": 0.5}})
    dllm = ("strategy=dllm", "strategy.block_length=4", KEY)
    run(overrides(folder, path, tmp_path / "out", *dllm))
    found = answers(tmp_path / "out")
    assert found["r0", 0]["error"]["type"] == "bad_option"
    assert "strategy dllm draws tokens" in found["r0", 0]["error"]["message"]
    assert found["r1", 0]["error"] is None
