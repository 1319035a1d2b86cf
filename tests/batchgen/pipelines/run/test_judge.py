"""The key `judge` of a step: what it stands for, what is refused, and a run with all scales."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.pipelines.run.pipeline import Pipeline
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate
from tests.support.jobs.pipeline_job import composed, folders, run, values, written
from tests.support.jobs.pipeline_job import shards as read_shards

ROW = {"q": "How many?", "target": "7", "response": "<think>8?</think> It is 7."}


def given(**steps: dict[str, Any]) -> dict[str, Any]:
    found = values(Path("model"), Path("rows.jsonl"), Path("out"))
    found["steps"] = {"solve": {}, "other": {"sampling.max_new_tokens": 3}, **steps}
    return copy.deepcopy(found)


def judged(**keys: Any) -> Any:
    step = {"from": "solve", "judge": {"question": "q", "target": "target", **keys}}
    return composed(given(rate=step)).steps["rate"].config


def prompt(config: Any, row: dict[str, Any]) -> str:
    return RowTemplate("prompt.user", config.prompt.user, list(row)).render(row)


@pytest.mark.quick(1)
@pytest.mark.parametrize("template", ["simpleqa", "hle", "match"])
def test_a_template_shows_question_target_and_answer(template: str) -> None:
    config = judged(template=template)
    text = prompt(config, ROW)
    for shown in ("How many?", "7", "It is 7."):
        assert shown in text
    assert "8?" not in text and "{{" not in text and "{%" not in text
    assert text == text.strip()
    assert (config.dataset.text_as, config.sampling.temperature) == ("response", 0)
    assert config.sampling.n == 1


def test_simpleqa_is_read_by_its_letters() -> None:
    config = judged(template="simpleqa")
    text = prompt(config, ROW)
    assert text.startswith(
        "Your job is to look at a question, a gold target, and a predicted answer"
    )
    assert "Question: How many?\nGold target: 7\nPredicted answer: It is 7.\n```\n" in text
    assert text.endswith('Just return the letters "A", "B", or "C", with no text around it.')
    assert config.constraint.choices == ("A", "B", "C") and config.constraint.scores
    assert [step.target for step in config.post] == ["Verdict", "ChoiceScore"]
    assert config.post[1].options["choice"] == "A"


def test_hle_is_read_by_its_last_word() -> None:
    config = judged(template="hle")
    text = prompt(config, ROW)
    assert "\n\n[question]: How many?\n\n[response]: It is 7.\n\n" in text
    assert "\n\n[correct_answer]: 7\n\n" in text
    assert text.endswith("Put 100 if there is no confidence score available.")
    assert config.constraint.kind == "none" and config.sampling.max_new_tokens == 4096
    assert [step.target for step in config.post] == ["Verdict"]


def test_a_score_is_between_its_bounds() -> None:
    step = {"from": "solve", "judge": {"scale": "score", "question": "q", "low": 0, "high": 3}}
    config = composed(given(rate=step)).steps["rate"].config
    assert prompt(config, ROW).endswith("from 0 (useless) to 3 (could not be better).")
    assert config.constraint.choices == ("0", "1", "2", "3")  # type: ignore[union-attr]
    assert [one.target for one in config.post] == ["ParseScore", "ChoiceScore"]


def test_pairs_are_shown_in_both_orders() -> None:
    step = {"from": ["solve", "other"], "judge": {"scale": "pair", "question": "q"}}
    pipeline = composed(given(better=step))
    config = pipeline.steps["better"].config
    assert pipeline.steps["better"].reads == ["solve", "other"]
    row = {**ROW, "other_response": "Nine.", "order": "ab"}
    assert "Answer A: It is 7.\n\nAnswer B: Nine.\n" in prompt(config, row)
    assert "Answer A: Nine.\n\nAnswer B: It is 7.\n" in prompt(config, row | {"order": "ba"})
    assert [one.target for one in config.rows] == ["Join", "Cross"]
    assert config.score.cluster == "source"


def test_what_the_step_says_itself_counts() -> None:
    step = {
        "from": "solve",
        "judge": {"template": "match", "question": "q"},
        "prompt.user": "{{ q }}: {{ response }}?",
        "constraint": {"choice": "choice", "choices": ["yes", "no"]},
        "dataset.where": "text != ''",
        "post": [{"Verdict": {"marks": {"yes": 1, "no": 0}}}],
    }
    config = composed(given(rate=step)).steps["rate"].config
    assert config.prompt.user == "{{ q }}: {{ response }}?"  # type: ignore[union-attr]
    assert config.constraint.choices == ("yes", "no")  # type: ignore[union-attr]
    assert not config.constraint.scores  # type: ignore[union-attr]
    assert (config.dataset.where, config.dataset.text_as) == ("text != ''", "response")
    assert len(config.post) == 1


@pytest.mark.parametrize(
    ("judge", "parents", "says"),
    [
        ("simpleqa", "solve", "must be a mapping"),
        ({}, "solve", "give a template .simpleqa, hle"),
        ({"template": "simplqa"}, "solve", "template must be one of"),
        ({"scale": "stars"}, "solve", "scale must be one of choice, score, pair"),
        ({"scale": "score", "template": "hle"}, "solve", "is for scale choice"),
        ({"scale": "score", "low": 5}, "solve", "low below high"),
        ({"template": "match", "high": 5}, "solve", "belong to scale score"),
        ({"scale": "pair", "target": "t"}, ["solve", "other"], "shows no right answer"),
        ({"scale": "pair"}, "solve", "two steps whose answers"),
        ({"template": "match"}, ["solve", "other"], "the step that is judged"),
        ({"tempalte": "match"}, "solve", "did you mean template"),
    ],
)
def test_mistakes_are_refused(judge: Any, parents: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        composed(given(rate={"from": parents, "judge": judge}))


def test_a_step_that_reads_no_other_judges_nothing() -> None:
    with pytest.raises(ConfigError, match="from must name the step that is judged"):
        composed(given(rate={"judge": {"template": "match"}}))


def test_the_text_of_the_pipeline_has_the_keys_that_judge_stands_for() -> None:
    pipeline = composed(
        given(
            better={"from": ["solve", "other"], "judge": {"scale": "pair", "question": "q"}},
            rate={"from": "solve", "judge": {"template": "hle", "question": "q"}},
        )
    )
    text = yaml.safe_load(pipeline.text())
    assert "judge" not in text["steps"]["rate"]
    again: Pipeline = composed(text)
    assert {name: step.config for name, step in again.steps.items()} == {
        name: step.config for name, step in pipeline.steps.items()
    }


def test_the_guide_has_a_judge_of_an_exam(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs/guides/evals.md").read_text()
    text = guide.partition("`simpleqa.yaml`:\n\n```yaml\n")[2].partition("```")[0]
    steps = composed(yaml.safe_load(text)).steps
    assert steps["solve"].config.dataset.path == "basicv8vc/SimpleQA"
    assert steps["rate"].config.post[0].target == "Verdict"


@pytest.mark.thorough
def test_judges_of_all_scales_run(model: Path, rows: Path, tmp_path: Path) -> None:
    found = values(model, rows, tmp_path / "out")
    own = {"prompt": {"choice": "text", "text": "{{ q }} {{ response }}"}}
    found["steps"] = {
        "solve": {"sampling.n": 2, "dataset.limit": 3},
        "other": {"sampling.n": 2, "sampling.seed": 1, "dataset.limit": 3},
        "rate": {"from": "solve", "judge": {"template": "match"}, **own},
        "stars": {"from": "solve", "judge": {"scale": "score", "high": 3}, **own},
        "better": {"from": ["solve", "other"], "judge": {"scale": "pair"}, **own},
    }
    assert run(written(tmp_path / "p.yaml", found)) == 0
    out = tmp_path / "out"
    texts = {
        name: [row for rows in parts.values() for row in rows]
        for name, parts in read_shards(out).items()
    }
    assert {row["text"] for row in texts["rate"]} <= {"A", "B"} and len(texts["rate"]) == 6
    assert {row["text"] for row in texts["stars"]} <= {"1", "2", "3"}
    others = {f"{row['row_id']}#{row['sample_index']}": row["text"] for row in texts["other"]}
    assert len(texts["better"]) == 12
    for row in texts["better"]:
        assert row["other_response"] == others[row["row_id"].rpartition("#")[0]]
    assert all((folder / "grades").is_dir() for name, folder in folders(out).items() if name in
               ("rate", "stars", "better"))  # fmt: skip
