"""The key `judge.models`: a step for each judge, and what most of them say."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.cli.verb_table import run_verb
from batchgen.util.errors import ConfigError
from tests.support.jobs.pipeline_job import composed, folders, run, shards, values, written

MATCH = {"template": "match", "question": "q", "target": "target"}


def given(judge: dict[str, Any], overrides: tuple[str, ...] = (), **step: Any) -> Any:
    found = values(Path("model"), Path("rows.jsonl"), Path("out"))
    parents = ["solve", "other"] if judge.get("scale") == "pair" else "solve"
    rate = {"from": parents, "judge": judge, **step}
    found["steps"] = copy.deepcopy({"solve": {}, "other": {"sampling.seed": 1}, "rate": rate})
    return composed(found, overrides)


def post(config: Any) -> list[dict[str, Any]]:
    return [{step.target: dict(step.options)} for step in config.post]


def test_each_model_has_a_step_and_the_last_one_the_majority() -> None:
    steps = given({**MATCH, "models": ["org/a", "org/b", {"path": "org/c", "dtype": "float32"}]})
    steps = steps.steps
    assert list(steps) == ["solve", "other", "rate_judge_1", "rate_judge_2", "rate"]
    models = [steps[name].config.model for name in ("rate_judge_1", "rate_judge_2", "rate")]
    assert [model.path for model in models] == ["org/a", "org/b", "org/c"]
    assert models[2].dtype == "float32"
    assert steps["rate"].reads == ["solve", "rate_judge_1", "rate_judge_2"]
    assert post(steps["rate_judge_1"].config) == post(given(MATCH).steps["rate"].config)
    assert post(steps["rate"].config) == [
        {"Verdict": {"marks": {"A": 1, "B": 0}, "prefix": "judge_3_"}},
        {"ChoiceScore": {"choices": ["A", "B"], "choice": "A", "prefix": "judge_3_"}},
        {
            "Majority": {
                "marks": ["judge_1_mark", "judge_2_mark"],
                "own": "judge_3_mark",
                "by": "votes",
            }
        },
    ]


def test_numbers_have_their_median_and_pairs_both_orders() -> None:
    models = {"a": "org/a", "b": "org/b"}
    stars = given({"scale": "score", "question": "q", "models": models}).steps["rate"].config
    assert post(stars)[0]["ParseScore"]["prefix"] == "b_"
    assert post(stars)[1]["ChoiceScore"]["prefix"] == "b_expected_"
    assert post(stars)[2] == {"Majority": {"marks": ["a_mark"], "own": "b_mark", "by": "median"}}
    pair = given({"scale": "pair", "question": "q", "models": models}).steps["rate"].config
    assert [step.target for step in pair.rows] == ["Join", "Cross", "Join"]
    assert post(pair)[0]["Verdict"]["flip"] == {"order": "ba"}


def test_a_key_of_the_step_is_of_all_judges() -> None:
    judge = {**MATCH, "models": {"a": "org/a", "b": "org/b"}}
    steps = given(
        judge,
        ("rate.dataset.limit=3", "rate_a.sampling.seed=7"),
        **{"model.dtype": "bfloat16", "rows": [{"Filter": {"where": "q"}}]},
    ).steps
    for name in ("rate_a", "rate"):
        assert steps[name].config.dataset.limit == 3
        assert steps[name].config.model.dtype == "bfloat16"
        assert steps[name].config.sampling.seed == (7 if name == "rate_a" else 0)
    assert [step.target for step in steps["rate"].config.rows] == ["Filter", "Join"]
    assert [step.target for step in steps["rate_a"].config.rows] == ["Filter"]
    with pytest.raises(ConfigError, match="rate has several judges"):
        given(judge, ("rate.model.path=org/c",))


def test_the_text_of_the_pipeline_has_all_judges() -> None:
    pipeline = given({**MATCH, "models": {"a": "org/a", "b": "org/b"}})
    again = composed(yaml.safe_load(pipeline.text()))
    assert {name: step.config for name, step in again.steps.items()} == {
        name: step.config for name, step in pipeline.steps.items()
    }


@pytest.mark.parametrize(
    ("models", "step", "says"),
    [
        ("org/a", {}, "two models or more"),
        (["org/a"], {}, "two models or more"),
        (["org/a", 7], {}, "must be the path of a model"),
        (["org/a", {"dtype": "float32"}], {}, "must be the path of a model"),
        ({"a": "org/a", "b c": "org/b"}, {}, "'b c' is not the name of a judge"),
        (["org/a", "org/b"], {"model.path": "org/c"}, "leave out model.path"),
        (["org/a", "org/b"], {"model": {"path": "org/c"}}, "leave out model.path"),
        (["org/a", "org/b"], {"post": []}, "leave out post"),
    ],
)
def test_mistakes_are_refused(models: Any, step: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        given({**MATCH, "models": models}, **step)


def test_judges_of_several_marks_are_refused_before_anything_is_loaded() -> None:
    judge = {**MATCH, "template": "hle", "models": {"a": "org/a", "b": "org/b"}}
    for said, where in (
        ("sampling.n=3", ("rate.sampling.n=3", "rate.sampling=sample")),
        ("sampling.n=2", ("rate_a.sampling.n=2", "rate_a.sampling=sample")),
        ("sampling.until", ("rate.sampling.until={where: mark == 1, width: 0.3, most: 9}",
                            "rate.sampling=sample")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"step rate: judge.models .* rate_a has {said}:"):
            given(judge, where)
    given({**MATCH, "models": ["org/a", "org/a"]})  # both draw their own random numbers


def test_a_step_of_a_judge_has_a_name_of_its_own() -> None:
    found = values(Path("model"), Path("rows.jsonl"), Path("out"))
    judge = {**MATCH, "models": {"a": "org/a", "b": "org/b"}}
    found["steps"] = {"solve": {}, "rate_a": {}, "rate": {"from": "solve", "judge": judge}}
    with pytest.raises(ConfigError, match="rate_a is a reserved name"):
        composed(found)


@pytest.mark.thorough
def test_kappa_of_judges_who_must_agree_and_disagree(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Constraints let one judge say what the marks say, another one the opposite."""
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(8):
            right = i in (1, 2, 5, 6)
            row = {"id": f"r{i}", "q": "How many?", "target": "7", "reply": ["7" if right else "8"]}
            said = {"same": ["A" if right else "B"], "turned": ["B" if right else "A"]}
            file.write(json.dumps(row | said) + "\n")
    found = values(model, rows, tmp_path / "out")
    found["prompt.user"] = "{{ q }}"
    own = {"prompt": {"choice": "text", "text": "{{ q }}"}, "sampling.max_new_tokens": 4}
    found["steps"] = {
        "solve": {
            "constraint": {"choice": "choice", "column": "reply"},
            "post": [{"Extract": {"methods": ["whole"]}}, {"Grade": {"method": "exact"}}],
        },
        "rate": {
            "from": "solve",
            "judge": {**MATCH, "models": {name: str(model) for name in "abc"}},
            "dataset.columns": ["target", "mark"],
            "constraint": {"choice": "choice", "column": "same", "scores": True},
            **own,
        },
    }
    path = written(tmp_path / "p.yaml", found)
    assert run(path, "rate_b.constraint.column=turned") == 0
    out = tmp_path / "out"
    marks = [row for part in shards(out)["rate"].values() for row in part]
    assert [row["a_mark"] for row in marks] == [float(i in (1, 2, 5, 6)) for i in range(8)]
    assert [row["b_mark"] for row in marks] == [float(i not in (1, 2, 5, 6)) for i in range(8)]
    capsys.readouterr()
    assert run_verb("score", [str(out / "rate"), "--agreement", "mark"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] + " " + line[line.index("kappa") + 1] for line in lines if "kappa" in line] == [
        "agreement 1.00",
        "a 1.00",
        "b -1.00",
        "c 1.00",
    ]
    turned = "[{Verdict: {marks: {A: 0, B: 1}}}]"
    first = folders(out)["rate"]
    assert run(path, "rate_b.constraint.column=turned", f"rate_a.post={turned}") == 0
    second = folders(out)["rate"]
    assert second != first
    assert json.loads((second / "metrics.json").read_text())["rows_copied"] == 8
    copied = [row for part in shards(out)["rate"].values() for row in part]
    assert [row["a_mark"] for row in copied] == [row["b_mark"] for row in copied]

    before = (folders(out)["rate"] / "data").stat().st_mtime_ns
    assert run_verb("grade", [str(out / "rate"), f"post={turned}"]) == 0
    capsys.readouterr()
    assert run_verb("score", [str(out / "rate"), "--agreement", "mark"]) == 0
    assert "kappa -1.00" in capsys.readouterr().out
    assert (folders(out)["rate"] / "data").stat().st_mtime_ns == before
