"""A budget above the steps of a pipeline is that of all steps together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.__main__ import run_command
from tests.support.jobs.pipeline_job import folders, run, shards, values, written


def used(out: Path, *steps: str) -> int:
    """The tokens of the finished rows of these steps."""
    found = 0
    for name, folder in folders(out).items():
        path = folder / "metrics.json"
        for attempt in json.loads(path.read_text())["attempts"] if path.exists() else ():
            found += (name in steps) * (attempt["prompt_tokens"] + attempt["generated_tokens"])
    return found


@pytest.mark.thorough
def test_steps_share_a_budget(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = ("draft", "judge", "last")
    whole, out = tmp_path / "whole", tmp_path / "out"
    given = values(model, rows, out)
    given["engine"]["max_num_seqs"] = 2
    pipeline = written(tmp_path / "pipeline.yaml", given)
    assert run(pipeline, f"output.dir={whole}") == 0
    total = used(whole, *every)
    draft = used(whole, "draft")
    assert run(pipeline, f"budget.tokens={draft + 100}") == 4
    assert "The budget is spent: " in capsys.readouterr().err
    assert draft + 100 <= used(out, *every) < total
    assert run_command(["status", str(out)]) == 0
    assert run(pipeline, f"budget.tokens={draft + 100}") == 4  # at once, and nothing more
    assert used(out, *every) < total
    assert run(pipeline, "budget.tokens=1e6") == 0
    assert shards(out) == shards(whole) and used(out, *every) == total


@pytest.mark.slow
def test_a_step_with_a_budget_of_its_own_counts_alone(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    pipeline = written(tmp_path / "pipeline.yaml", values(model, rows, out))
    limits = ["budget.tokens=100000", "judge.budget.tokens=50"]
    assert run(pipeline, *limits) == 4
    assert used(out, "judge") >= 50 and used(out, "draft") > 50
    assert run(pipeline, "budget.tokens=100000") == 0
