"""What a change of a pipeline computes anew, step by step, and that its rows are then right.

Each line of the table in docs/guides/pipelines.md is a case. A pipeline runs in one folder before
and after the change; its rows are then those of the changed pipeline in a folder of its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchgen.jobs.run.shared_engine import EnginePort
from tests.support.jobs.pipeline_job import EXTRACT, folders, run, shards, values, written
from tests.support.jobs.real_job import ROWS, VOCAB, save_tokenizer

Counts = dict[str, int]


class Case(NamedTuple):
    """A pipeline that was run, the file with its rows, and what each step has asked the engine
    since."""

    folder: Path
    given: dict[str, Any]
    asked: Counts

    def run(self, given: dict[str, Any]) -> Counts:
        """Run with other values; returns how many requests each step made."""
        self.asked.clear()
        assert run(written(self.folder / "pipeline.yaml", given)) in (0, 3)
        return dict(self.asked)

    def check(self, given: dict[str, Any]) -> None:
        """The rows are those of a pipeline that was never anything else."""
        alone = copy.deepcopy(given) | {
            "output": {**given["output"], "dir": str(self.folder / "x")}
        }
        assert run(written(self.folder / "alone.yaml", alone)) in (0, 3)
        assert shards(self.folder / "out") == shards(self.folder / "x")

    def changed(self, step: str | None = None, **keys: Any) -> dict[str, Any]:
        found = copy.deepcopy(self.given)
        (found if step is None else found["steps"][step]).update(keys)
        return found

    def rows(self, step: str) -> int:
        return sum(map(len, shards(self.folder / "out")[step].values()))


@pytest.fixture
def case(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Six rows, two drafts of each, a judge of those that hold, and a last step."""
    asked: Counts = {}
    add = EnginePort.add_request

    def added(self: EnginePort, *args: Any, **more: Any) -> None:
        name = self.name
        asked[name] = asked.get(name, 0) + 1
        add(self, *args, **more)

    monkeypatch.setattr(EnginePort, "add_request", added)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:6]))
    given = values(model, rows, tmp_path / "out")
    given["sampling"]["max_new_tokens"] = 4
    given["steps"]["judge"]["dataset"]["where"] = "sample_index == 0 or row_id == 'r3'"
    given["export"] = {"from": "last", "out": "last.csv", "columns": ["row_id", "text"]}
    made = Case(tmp_path, given, asked)
    assert made.run(given) == {"draft": 12, "judge": 7, "last": 7}
    yield made


def test_nothing_changed_computes_nothing(case: Case) -> None:
    before = folders(case.folder / "out")
    assert case.run(case.given) == {}
    assert folders(case.folder / "out") == before


@pytest.mark.slow
def test_a_prompt_computes_its_step_and_what_its_answers_change(case: Case) -> None:
    given = case.changed("judge", **{"prompt.user": "{{ q }} {{ reply }}!"})
    before = folders(case.folder / "out")
    asked = case.run(given)
    assert asked.get("draft") is None and asked["judge"] == 7
    assert folders(case.folder / "out")["draft"] == before["draft"]
    case.check(given)


@pytest.mark.thorough
def test_a_filter_computes_rows_that_were_not_there(case: Case) -> None:
    wider = case.changed("judge", dataset={"where": "true", "text_as": "reply"})
    assert case.run(wider) == {"judge": 5, "last": 5}
    case.check(wider)
    assert case.run(case.given) == {}, "the narrower version is still there"


@pytest.mark.thorough
def test_more_rows_are_added_in_every_step(case: Case) -> None:
    rows = case.folder / "rows.jsonl"
    before = folders(case.folder / "out")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:8]))
    assert case.run(case.given) == {"draft": 4, "judge": 2, "last": 2}
    assert folders(case.folder / "out") == before
    case.check(case.given)


@pytest.mark.slow
def test_a_limit_that_grows_adds_rows(case: Case) -> None:
    fewer = case.changed(dataset={**case.given["dataset"], "limit": 4})
    fewer["output"]["dir"] = str(case.folder / "grown")
    case.run(fewer)
    fewer["dataset"]["limit"] = 6
    assert case.run(fewer) == {"draft": 4, "judge": 2, "last": 2}
    assert shards(case.folder / "grown") == shards(case.folder / "out")


@pytest.mark.slow
def test_more_samples_compute_the_new_ones(case: Case) -> None:
    given = case.changed("draft", **{"sampling.n": 3})
    before = folders(case.folder / "out")
    assert case.run(given) == {"draft": 6, "judge": 1, "last": 1}
    after = folders(case.folder / "out")
    assert before["draft"] == after["draft"] and before["judge"] != after["judge"]
    case.check(given)


@pytest.mark.slow
def test_other_grades_compute_no_draft(case: Case) -> None:
    given = case.changed("draft", post=[{**EXTRACT, "pattern": "([A-Z])"}])
    before = folders(case.folder / "out")
    assert case.run(given) == {}, "what the judge reads has not changed, so that rows are copied"
    assert folders(case.folder / "out")["draft"] == before["draft"]
    case.check(given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"sampling.temperature": 0.3}, {"sampling.seed": 5}, {"sampling.top_k": 3}]
)
def test_sampling_computes_the_step_and_all_behind_it(case: Case, change: dict[str, Any]) -> None:
    given = case.changed("draft", **change)
    asked = case.run(given)
    assert asked["draft"] == 12 and "judge" in asked
    case.check(given)


@pytest.mark.slow
def test_a_row_that_has_changed_is_computed_alone(case: Case) -> None:
    rows = case.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace("What is 2 + 2", "How much is 2 + 2"))
    before = folders(case.folder / "out")
    assert case.run(case.given) == {"draft": 2, "judge": 1, "last": 1}
    assert set(folders(case.folder / "out").values()).isdisjoint(before.values())
    case.check(case.given)


@pytest.mark.slow
def test_an_export_computes_nothing(case: Case) -> None:
    given = case.changed(export={"from": "judge", "to": "sft"})
    before = folders(case.folder / "out")
    assert case.run(given) == {}
    assert folders(case.folder / "out") == before
    assert (case.folder / "out/export/judge.sft.jsonl").exists()


@pytest.mark.slow
def test_a_step_that_is_gone_and_comes_again_is_as_it_was(case: Case) -> None:
    fewer = case.changed(export=None)
    del fewer["steps"]["last"]
    before = folders(case.folder / "out")
    assert case.run(fewer) == {} and "last" not in folders(case.folder / "out")
    assert case.run(case.given) == {}
    assert folders(case.folder / "out") == before


@pytest.mark.thorough
def test_a_threshold_that_drops_more_computes_nothing(case: Case) -> None:
    rows = [{"Filter": {"where": "reply|length > 0"}}, {"Dedupe": {"by": "reply", "near": 0.9}}]
    given = case.changed("judge", rows=rows)
    assert case.run(given) == {}
    case.check(given)


@pytest.mark.slow
def test_another_model_computes_its_step_alone_and_what_its_answers_change(
    case: Case, tiny_model: Callable[..., Path]
) -> None:
    other = tiny_model("qwen3", **VOCAB)
    save_tokenizer(other)
    before = folders(case.folder / "out")
    given = case.changed("judge", **{"model.path": str(other)})
    asked = case.run(given)
    assert "draft" not in asked and asked["judge"] == 7 and "last" in asked
    assert folders(case.folder / "out")["draft"] == before["draft"]
    case.check(given)


@pytest.mark.slow
def test_errors_that_are_retried_are_computed_and_what_follows_from_them(case: Case) -> None:
    """The cache is too small for the longest prompts first."""
    given = case.changed(most_errors=1)
    given["output"]["dir"] = str(case.folder / "errors")
    given["steps"]["draft"]["engine"] = {**given["engine"], "kv_cache_gib": 5e-5}
    case.run(given)
    drafts = [row for rows in shards(case.folder / "errors")["draft"].values() for row in rows]
    errors = [row["row_id"] for row in drafts if row["error"] is not None]
    assert errors == ["r2", "r2", "r3", "r3"]
    retried = copy.deepcopy(given)
    retried["steps"]["draft"] |= {"engine": given["engine"], "output": {"retry_errors": True}}
    assert case.run(retried) == {"draft": 4, "judge": 3, "last": 3}
    assert shards(case.folder / "errors") == shards(case.folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("key", "first", "then"), [("valid", 1, 2), ("width", 0.65, 0.55)])
def test_more_valid_samples_compute_what_is_missing(
    case: Case, key: str, first: float, then: float
) -> None:
    def until(value: float) -> dict[str, Any]:
        rule = {"where": "text|length > 2", key: value, "most": 5}
        given = case.changed("draft", **{"sampling.until": rule})
        del given["steps"]["draft"]["sampling.n"]
        given["output"]["dir"] = str(case.folder / "enough")
        return given

    case.run(until(first))
    before = shards(case.folder / "enough")
    number = sum(map(len, before["draft"].values()))
    asked = case.run(until(then))
    after = shards(case.folder / "enough")
    more = sum(map(len, after["draft"].values())) - number
    # Samples that ran beside the last one that counts are computed, and trimmed.
    assert more <= asked["draft"] < number + more
    judged = [sum(map(len, found["judge"].values())) for found in (before, after)]
    assert asked["judge"] == judged[1] - judged[0]
