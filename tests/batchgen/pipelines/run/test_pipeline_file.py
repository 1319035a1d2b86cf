"""What a pipeline file and arguments say of the steps, and what is refused before anything runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.cli.options import parse_options
from batchgen.cli.run_options import composed_pipeline
from batchgen.pipelines.run.pipeline import in_order
from batchgen.util.errors import ConfigError
from tests.support.jobs.pipeline_job import composed, values, written

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def given() -> dict[str, Any]:
    return values(Path("model"), Path("rows.jsonl"), Path("out"))


def test_a_step_has_the_defaults_that_it_does_not_replace(given: dict[str, Any]) -> None:
    own = given["steps"]["judge"]
    del own["prompt.user"]
    own |= {"sampling.temperature": 0.5, "prompt": {"choice": "text", "text": "x"}}
    steps = composed(given).steps
    assert [*steps] == ["draft", "judge", "last"]
    draft, judge = steps["draft"].config, steps["judge"].config
    assert draft.dataset.path == "rows.jsonl" and draft.sampling.n == 2
    assert (judge.sampling.temperature, judge.sampling.max_new_tokens) == (0.5, 8)
    assert (judge.dataset.kind, judge.dataset.path) == ("job", "out/draft")
    assert judge.prompt.kind == "text", "a choice replaces the keys of its group"
    assert (draft.sampling.stream, judge.sampling.stream) == ("draft", "judge")
    assert steps["last"].reads == ["judge"]


def test_arguments_are_for_one_step_or_for_all(given: dict[str, Any]) -> None:
    steps = composed(
        given,
        ["sampling.seed=1", "judge.sampling.seed=2", "dataset.limit=3", "most_errors=0.5",
         "last.sampling=greedy", "judge.prompt.template_kwargs={a: 1}", "worker=3"],
    ).steps  # fmt: skip
    configs = {name: step.config for name, step in steps.items()}
    assert [one.sampling.seed for one in configs.values()] == [1, 2, 1]
    assert [one.dataset.limit for one in configs.values()] == [3, None, None]
    assert [one.sampling.temperature for one in configs.values()] == [0.7, 0.7, 0.0]
    assert configs["judge"].prompt.template_kwargs == {"a": 1}  # type: ignore[union-attr]


def test_the_text_of_a_pipeline_says_the_same(given: dict[str, Any]) -> None:
    given["steps"]["last"]["rows"] = [
        {"Join": {"from": "draft", "on": "row_id", "columns": {"q": "again"}}}
    ]
    given |= {"most_errors": 0.2, "export": {"from": "judge", "to": "dpo", "by": "mark"}}
    given["steps"]["draft"]["prompt.system"] = "costs $5 and \\${more}"
    pipeline = composed(given)
    again = composed(yaml.safe_load(pipeline.text()))
    assert again == pipeline
    assert pipeline.steps["last"].reads == ["judge", "draft"]
    assert pipeline.exports[0].out == "judge.dpo.jsonl"


def test_keys_that_yaml_takes_for_booleans_are_keys(tmp_path: Path, given: dict[str, Any]) -> None:
    path = written(tmp_path / "p.yaml", given)
    text = Path(path).read_text()
    text += "    rows: [{Join: {from: draft, on: row_id, columns: {q: again}}}]\n"
    Path(path).write_text(text.replace("    rows: []\n", ""))
    pipeline = composed_pipeline(parse_options([path]))
    assert pipeline is not None
    assert pipeline.steps["last"].config.rows[0].options["on"] == "row_id"


def step(name: str, **keys: Any) -> Change:
    return lambda given: given["steps"].setdefault(name, {}).update(keys)


def top(**keys: Any) -> Change:
    return lambda given: given.update(keys)


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (step("draft", **{"from": "last"}), "in a circle: draft → judge → last → draft|circle: "),
        (step("draft", **{"from": "draft"}), "in a circle: draft → draft"),
        (step("judge", **{"from": "drft"}), "there is no step 'drft': choose among draft"),
        (step("judge", **{"from": ["draft", "draft"]}), "names a step twice"),
        (step("judge", **{"from": 3}), "must be the name of a step"),
        (step("judge", **{"dataset.path": "x"}), "leave out from or dataset.path"),
        (step("judge", dataset="files"), "leave out from or dataset"),
        (step("judge", **{"output.dir": "x"}), "a step writes into a folder inside the pipeline's"),
        (step("judge", **{"sampling.temprature": 1}), "did you mean sampling.temperature"),
        (step("judge", smapling=1), "there is no group smapling"),
        (step("sampling"), "sampling is a reserved name"),
        (step("show"), "show is a reserved name"),
        (step("export"), "export is a reserved name"),
        (step("a/b"), "'a/b' is not the name of a step"),
        (step("../b"), "is not the name of a step"),
        (step("judge", rows=[{"Join": {"from": "x", "on": "a"}}]), "there is no step 'x'"),
        (step("judge", rows=[{"Join": {"from": "draft", "path": "y"}}]), "give one of them"),
        (step("judge", **{"output.overwrite": True}), "gets a new folder"),
        (step("judge", **{"launcher.workers": 2}), "a pipeline starts no workers"),
        (step("judge", **{"prompt": {"user": "a"}, "prompt.user": "b"}), "appears twice"),
        (top(steps={}), "give each step by its name"),
        (top(steps={"a": 3}), "must be a mapping of keys"),
        (top(output={}), "give output.dir=FOLDER"),
        (top(most_errors=2), "a share from 0 to 1"),
        (top(export={"from": "nobody", "to": "sft"}), "there is no step 'nobody'"),
        (top(export={"from": "judge", "to": "stf"}), "to must be one of sft"),
        (top(export={"from": "judge", "to": "dpo"}), "needs by"),
        (top(export={"from": "judge", "to": "sft", "were": "x"}), "did you mean where"),
        (top(export={"from": "judge", "out": "../x.jsonl"}), "without a path"),
        (top(export={"from": "judge", "out": "x.pdf"}), "does not say the format"),
        (top(export=[{"from": "judge", "out": "x.csv"}] * 2), "two exports write x.csv"),
        (top(push={"from": "nobody", "to": "me/set"}), "there is no step 'nobody'"),
        (top(push={"from": "judge", "to": "me/set", "privat": True}), "no option 'privat'"),
        (top(push=3), "give USER/SET"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_refused(
    change: Change, message: str, given: dict[str, Any]
) -> None:
    change(given)
    with pytest.raises(ConfigError, match=message):
        composed(given)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("jugde.sampling.seed=1", "no step, group or key jugde: did you mean judge"),
        ("judge=1", "judge is a step: give one of its keys"),
        ("judge.from=draft", "set in the pipeline file"),
        ("steps.judge.sampling.seed=1", "set in the pipeline file"),
        ("judge.dataset=files", "the step has rows from draft"),
        ("judge.output.dir=x", "a step writes into a folder inside"),
        ("judge.sampling.sed=1", "did you mean sampling.seed"),
    ],
)
def test_a_mistake_in_an_argument_is_refused(
    argument: str, message: str, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(given, [argument])


def test_a_refused_pipeline_writes_nothing(
    given: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = copy.deepcopy(given)
    wrong["steps"]["last"]["sampling.max_new_tokens"] = -1
    path = written(tmp_path / "p.yaml", wrong)
    assert run_command([path]) == 2
    assert "step last: sampling.max_new_tokens" in capsys.readouterr().err
    path = written(tmp_path / "p.yaml", given)  # there is no such model
    assert run_command([path]) == 2
    assert "step draft: model" in capsys.readouterr().err
    assert run_command([path, "--multirun"]) == 2
    assert run_command([path, "pipeline=demo"]) == 2
    assert run_command(["pipeline=dmo", "output.dir=out"]) == 2
    assert "did you mean demo" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["p.yaml"]


def test_a_place_in_the_file_is_named(tmp_path: Path, given: dict[str, Any]) -> None:
    given["steps"]["judge"]["sampling.temprature"] = 1
    path = written(tmp_path / "p.yaml", given)
    line = next(i for i, t in enumerate(Path(path).read_text().splitlines(), 1) if "temprat" in t)
    with pytest.raises(ConfigError, match=re.escape(f"p.yaml, line {line}: steps.judge.sampling")):
        composed_pipeline(parse_options([path]))


def test_a_strangers_file_runs_no_code_and_pushes_nothing(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    foreign = copy.deepcopy(given)
    foreign["steps"]["judge"]["post"] = [{"_target_": "os.system"}]
    path = written(tmp_path / "p.yaml", foreign)
    with pytest.raises(ConfigError, match="not batchgen's own code"):
        composed_pipeline(parse_options([path]))
    path = written(tmp_path / "p.yaml", given | {"push": "thief/set"})
    with pytest.raises(ConfigError, match="would push rows to the hub with your login"):
        composed_pipeline(parse_options([path]))
    for more in (["--trust", path], ["push=me/set"]):
        pipeline = composed_pipeline(parse_options([path, *more]))
        assert pipeline is not None and len(pipeline.pushes) == 1


def test_an_order_is_that_of_the_file_where_it_can_be() -> None:
    assert in_order({"a": ["c"], "b": [], "c": ["b"]}) == ["b", "c", "a"]
    assert in_order({"z": [], "a": [], "m": ["z"]}) == ["z", "a", "m"]
