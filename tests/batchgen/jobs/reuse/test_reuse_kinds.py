"""Copied rows of real jobs have every column as if they had been computed, and plans count them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import plan_text
from batchgen.jobs.planning.planned_reuse import PlannedReuse
from batchgen.jobs.planning.planner import make_plan
from tests.support.jobs.real_job import ROWS, contents, overrides, run

KINDS = {
    "plain": ["output.columns=[logprobs,top_logprobs,prompt_token_ids]", "sampling.stop=a"],
    "speculation": ["strategy=ar_spec", "output.columns=[step_map,draft_accepted]"],
    "scored": [
        "sampling.n=1",
        "sampling.max_new_tokens=0",
        "prompt.answer='{{ id }}'",
        "output.columns=[top_logprobs]",
    ],
    "choice": ["sampling.n=1", "constraint=choice", "constraint.choices=[yes,no]",
               "constraint.scores=true"],
    "thoughts": ["output.reasoning_end=' '", "output.text_column=answer"],
}  # fmt: skip
QUICK = ("plain", "choice")


def changed(rows: Path) -> Path:
    """Two rows with another question, and one more at the start, so that all places move."""
    new = [{"id": "first", "q": "Who?"}, *ROWS]
    new = [row | {"q": "Why?"} if row["id"] in ("r2", "r7") else row for row in new]
    path = rows.with_name("changed.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in new))
    return path


def data(out: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(out).items() if name.startswith("data/")}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kind",
    [k if k in ("plain", "choice") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def test_copied_rows_are_equal_to_the_byte(
    kind: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    old, new, whole = tmp_path / "old", tmp_path / "new", tmp_path / "whole"
    given = KINDS[kind]
    run(overrides(model, rows, old, "output.reuse=[]", *given))
    run(overrides(model, changed(rows), new, f"output.reuse=[{old}]", *given))
    run(overrides(model, changed(rows), whole, *given))
    assert data(new) == data(whole)
    figures = json.loads((new / "metrics.json").read_text())
    samples = 1 if "sampling.n=1" in given else 2
    assert figures["rows_copied"] == samples * (len(ROWS) - 2) == figures["rows"] - 3 * samples


@pytest.mark.slow
@pytest.mark.parametrize(("key", "first", "then"), [("valid", 1, 2), ("width", 0.65, 0.5)])
def test_samples_until_enough_are_valid_are_copied(
    key: str, first: float, then: float, model: Path, rows: Path, tmp_path: Path
) -> None:
    """From a job that asked for fewer valid ones, or a wider interval, in another folder: the new
    samples alone are computed."""
    old, new, whole = tmp_path / "old", tmp_path / "new", tmp_path / "whole"

    def until(value: float) -> list[str]:
        rule = f"{{where: text|length > 11, {key}: {value}, most: 6}}"
        return [f"sampling.until={rule}"]

    given = [a for a in overrides(model, rows, old) if not a.startswith("sampling.n=")]
    run([*given, *until(first), "output.reuse=[]"])
    run([*given, *until(then), f"output.dir={whole}"])
    args = [*given, *until(then), f"output.dir={new}", f"output.reuse=[{old}]"]
    before = finished(old)
    assert planned(args).reuse == PlannedReuse(before, len(ROWS), True)
    run(args)
    assert data(new) == data(whole)
    figures = json.loads((new / "metrics.json").read_text())
    assert figures["rows_copied"] == before < figures["rows"]


def finished(out: Path) -> int:
    found: int = json.loads((out / "metrics.json").read_text())["rows"]
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "other",
    [
        ["sampling.seed=4"],
        ["sampling.max_new_tokens=11"],
        ["engine.max_model_len=100"],
        ["model.dtype=bfloat16"],
        ["sampling.stop=a"],
    ],
)
def test_other_jobs_have_other_keys(
    other: list[str], model: Path, rows: Path, tmp_path: Path
) -> None:
    run(overrides(model, rows, tmp_path / "old", "output.reuse=[]"))
    args = overrides(model, rows, tmp_path / "new", f"output.reuse=[{tmp_path}/old]", *other)
    assert planned(args).reuse == PlannedReuse(0, 11, True)


def planned(arguments: list[str], **settings: Any) -> Any:
    return make_plan(compose({}, arguments), PlanSettings(**settings))


@pytest.mark.thorough
def test_a_plan_counts_what_is_copied(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    given = ["sampling.n=3", "budget.price_per_hour=2"]
    run(overrides(model, rows, old, "output.reuse=[]"))
    args = overrides(model, changed(rows), new, f"output.reuse=[{old}]", *given)
    plan = planned(args)
    copied = 2 * (len(ROWS) - 2)
    assert plan.reuse == PlannedReuse(copied, len(ROWS) + 1, True)
    assert plan.answers == 3 * (len(ROWS) + 1) - copied
    assert f"\n             {copied} answers are copied from older jobs" in plan_text(plan)
    whole = planned(overrides(model, changed(rows), new, *given))
    assert plan.price.likely < whole.price.likely
    run([*args, "dataset.limit=4"])
    assert planned(args).reuse == PlannedReuse(copied - 2 * 2, len(ROWS) + 1, True)
    monkeypatch.setattr("batchgen.jobs.forecast.scan.sample_indices", lambda n: range(6))
    guess = planned([*args, f"output.dir={tmp_path}/other"]).reuse
    assert not guess.is_exact and guess.answers == pytest.approx(copied, rel=0.3)
    assert "about" in guess.text and "from a sample of 6 rows" in guess.text
