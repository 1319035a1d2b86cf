"""Job files, mappings and arguments say the same, each in its own way of writing."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.cli.verbs.init import new_job_file
from batchgen.config.compose.compose_config import compose, compose_groups
from batchgen.config.compose.group_choices import inferred_choice
from batchgen.config.compose.job_file import read_job_file
from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    PARTS,
    choices,
    edit_distance,
    nearest_key,
)
from batchgen.config.groups.job_config import JobConfig
from batchgen.util.errors import ConfigError
from tests.support.cases import some_slow
from tests.support.jobs.fake_job import FakeJob


@pytest.mark.parametrize(
    "values",
    [
        {"model": "hf", "model.path": "m", "sampling.stop": "END", "sampling": {"n": 2}},
        {"model": {"path": "m"}, "sampling": {"stop": ["END"], "n": 2}},
        {"model": {"choice": "hf", "path": Path("m")}, "sampling": {"stop": ("END",), "n": 2}},
    ],
)
def test_mappings_and_arguments_say_the_same(values: dict[str, Any]) -> None:
    arguments = ["model=hf", "model.path=m", "sampling.stop=END", "sampling.n=2"]
    assert compose(values) == compose({}, arguments) == compose({}, arguments[1:])


def test_old_quoting_goes_on_working() -> None:
    old = [
        "'prompt.user=\"{{ question }}\"'".strip("'"),
        'sampling.stop=["a","b c"]',
        "output.columns=[logprobs,top_logprobs]",
        "prompt.template_kwargs={enable_thinking: false}",
        'output.dir="out/lr=0.1"',
    ]
    config = compose({}, old)
    assert config.sampling.stop == ("a", "b c") and config.output.dir == "out/lr=0.1"
    assert config.output.columns == ("logprobs", "top_logprobs")
    assert resolved(config)["prompt"]["user"] == "{{ question }}"
    assert resolved(config)["prompt"]["template_kwargs"] == {"enable_thinking": False}


def test_what_is_said_later_goes_before() -> None:
    values = {"sampling": {"choice": "sample", "temperature": 0.5, "n": 2}}
    assert compose(values, ["sampling.n=3"]).sampling.n == 3
    assert compose(values).sampling.temperature == 0.5
    # A choice on the command line replaces all that the file says of its group.
    greedy = compose(values, ["sampling=greedy"]).sampling
    assert (greedy.temperature, greedy.n) == (0.0, 1)
    assert compose({"experiment": "nano_sdar", "sampling.n": 2}).sampling.n == 2


def test_signs() -> None:
    assert compose({}, ["+strategy.width=3"]).strategy.options == {"width": 3}
    assert compose({}, ["++sampling.n=3"]).sampling.n == 3
    assert compose({}, ["++strategy.width=3"]).strategy.options == {"width": 3}
    assert "limit" not in compose_groups({}, ["~dataset.limit"]).groups["dataset"]
    with pytest.raises(ConfigError, match=r"^engine is missing"):
        compose({}, ["~engine"])


def test_keys_below_a_key() -> None:
    config = compose({}, ["prompt.template_kwargs.enable_thinking=false"])
    assert resolved(config)["prompt"]["template_kwargs"] == {"enable_thinking": False}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("arguments", "group", "kind"),
    [
        (["dataset.path=x"], "dataset", "files"),
        (["prompt.text=x"], "prompt", "text"),
        (["prompt.messages_column=m"], "prompt", "chat"),
        (["constraint.pattern=[A-D]"], "constraint", "regex"),
        (["constraint.choices=a,b"], "constraint", "choice"),
    ],
)
def test_keys_choose_their_group(arguments: list[str], group: str, kind: str) -> None:
    assert resolved(compose({}, arguments))[group]["kind"] == kind


def test_a_key_that_the_default_has_changes_no_choice() -> None:
    assert compose({}, ["dataset.limit=3"]).dataset.kind == "demo"
    assert inferred_choice("sampling", {"temperature": "1"}) is None
    name = compose({}, ["model.path=m"]).model.name
    assert name is None  # and not that of the default model


def test_a_strategy_of_ones_own_is_taken_whole() -> None:
    config = compose({"strategy": {"_target_": "my.Own", "width": 3}})
    assert (config.strategy.target, config.strategy.options) == ("my.Own", {"width": 3})


CHOICES = [[f"{group}={choice}" for choice in choices(group)] for group in GROUPS]
EXPERIMENTS = [[f"+experiment={choice}"] for choice in choices(EXPERIMENT)]
ALONE = [[argument] for group in CHOICES for argument in group]
TOGETHER = [[argument for argument in row if argument] for row in zip_longest(*CHOICES)]
"""Every choice once, with choices of the other groups."""


@pytest.mark.quick(2, thorough=12)
@pytest.mark.parametrize(
    "chosen",
    some_slow([*TOGETHER, *EXPERIMENTS, *ALONE], quick=[*TOGETHER, *EXPERIMENTS]),
    ids=",".join,
)
def test_a_new_job_file_is_the_job(chosen: list[str], tmp_path: Path) -> None:
    arguments = [*chosen, r'prompt.system=a: "b" # c\n {{ d }}', "dataset.limit=3"]
    if {"prompt=text", "prompt=tokens", "prompt=openai"} & {*chosen}:
        del arguments[-2]
    composed = compose_groups({}, arguments)
    file = tmp_path / "job.yaml"
    file.write_text(new_job_file(composed, "job.yaml"))
    values, _ = read_job_file(file)
    assert compose_groups(values) == composed


def test_a_day_in_a_job_file_is_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("prompt: {date: 2026-11-25}\nprompt.user: 2026-11-25\n")
    values, _ = read_job_file(file)
    assert values == {"prompt": {"date": "2026-11-25"}, "prompt.user": "2026-11-25"}


@pytest.mark.parametrize("argument", ["strategy=dllm", "prompt=messages", "constraint=choice"])
def test_a_resolved_job_is_a_job(argument: str) -> None:
    more = ["constraint.choices=yes,no"] if argument == "constraint=choice" else []
    config = compose({}, [argument, *more])
    assert compose(resolved(config)) == config


def test_the_config_of_an_output_is_the_job(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path / "out"), rows=1, bad=False)
    job.run()
    values, _ = read_job_file(tmp_path / "out/config.yaml")
    assert compose(values) == job.config()
    assert list(values) == list(PARTS)


def test_choices_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling/mine.yaml").write_text("temperature: 0.25\nn: 7\n")
    arguments = ["--config-dir", str(tmp_path), "sampling=mine", "--cfg", "job"]
    assert run_command([*arguments, "sampling.n=8"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["sampling"] == {"temperature": 0.25, "n": 8}
    assert run_command(arguments[2:]) == 2
    assert run_command([*arguments, "sampling=mien"]) == 2
    assert "did you mean mine?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# @package _global_\ndataset.path: q", "such as `dataset: {path: …}`"),
        ("# @package _global_\nseed: 4", "such as `sampling: {seed: …}`"),
        ("# @package _global_\npost:", "post must be a list of steps, got None"),
        ("sampling: {n: 2}", "must have the line `# @package _global_` at the top"),
        ("defaults: [override /sampling: sample]", "must have the line `# @package _global_`"),
        (
            "# @package _global_\ndefaults: [override /sampling: hot]",
            "the choices +experiment=mine do not fit together: In 'config': Could not find",
        ),
    ],
)
def test_wrong_experiments_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(text + "\n")
    assert run_command(["--config-dir", str(tmp_path), "+experiment=mine", "--cfg", "job"]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "search path" not in shown and "hydra" not in shown


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("ab", "", 2), ("abc", "abd", 1), ("abc", "acb", 1), ("kitten", "sitting", 3)],
)
def test_edit_distance(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == edit_distance(second, first) == distance


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sampling.temprature", "sampling.temperature"),
        ("temperature", "sampling.temperature"),
        ("samplign.top_k", "sampling.top_k"),
        ("dataset.id", "dataset.id_column"),
        ("strategy.propsoer", "strategy.proposer"),
        ("engine.temperature", "sampling.temperature"),
        ("sampling.xyzzy", None),
    ],
)
def test_nearest_key(typed: str, meant: str | None) -> None:
    assert nearest_key(typed) == meant


def test_types_of_the_class_and_yaml_agree() -> None:
    """All keys of the dataclasses are in conf/, so that each can be set and explained."""
    groups = compose_groups({}).groups
    assert list(groups) == [*PARTS] == list(JobConfig.__dataclass_fields__)


@pytest.mark.parametrize("by", ["arguments", "mapping"])
def test_a_ready_job_with_another_strategy(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"experiment": "nano_hybrid", "strategy": "ar"} if by == "mapping" else {}
    arguments = [] if by == "mapping" else ["+experiment=nano_hybrid", "strategy=ar"]
    config = compose(values, arguments)
    assert config.strategy.options == {}
    assert config.output.columns == ("logprobs", "routed_experts")
    said = capsys.readouterr().err
    assert said.startswith("batchgen: strategy=ar does not use these settings of experiment=nano_")
    assert "strategy.proposer, strategy.num_spec_tokens, strategy.adaptive, the " in said
    assert said.endswith("the output.columns draft_accepted, step_map\n")


def test_a_choice_in_an_argument_replaces_the_columns_of_a_job_file_too() -> None:
    values = {"experiment": "nano_hybrid", "strategy": "ar", "output.columns": ["step_map"]}
    config = compose(values, ["output=parquet"])
    assert config.output.columns == ("logprobs", "routed_experts")
    config = compose(values, ["output.columns=[step_map]", "output=parquet"])
    assert config.output.columns == ("step_map",)


def test_what_the_user_gives_for_another_strategy_is_refused() -> None:
    arguments = ["+experiment=nano_hybrid", "strategy=ar"]
    with pytest.raises(ConfigError, match="strategy=ar has no key proposer"):
        compose({}, [*arguments, "strategy.proposer=mtp"])
    config = compose({}, [*arguments, "output.columns=[step_map]"])
    assert config.output.columns == ("step_map",)  # the job refuses it


def test_nothing_is_left_out_of_a_ready_job_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose({}, ["+experiment=nano_hybrid", "strategy=ar_spec"])
    assert config.strategy.options["proposer"] == "mtp"
    assert "step_map" in config.output.columns
    assert not capsys.readouterr().err
    config = compose({}, ["+experiment=synth", "strategy=ar", "dataset.path=x"])
    assert config.output.columns == ("logprobs",)
    assert not capsys.readouterr().err
