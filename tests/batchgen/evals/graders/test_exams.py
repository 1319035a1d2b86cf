"""The exams' experiments: prompts and targets of their definitions, from the hub and from files."""

import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from batchgen.__main__ import run_command
from batchgen.config.compose.load_config import load_config
from batchgen.config.compose.trust import TYPED
from batchgen.config.groups.class_names import class_path
from batchgen.config.groups.job_config import JobConfig
from batchgen.evals.graders.choices import OrderChoices
from batchgen.evals.graders.grade_rows import Grader
from batchgen.evals.graders.step import PostStep
from batchgen.inputs.steps.split import Explode
from batchgen.util.templates.row_templates import RowTemplate
from batchgen.util.text.plain_yaml import load_yaml
from tests.support.sandboxes import need_sandbox

ROOT = Path(__file__).parents[4]
NO_EXAMS = {"llada2", "nano_hybrid", "nano_sdar", "nano_vl", "synth", "trado"}
GENERATED = {"ruler"}  # tests/batchgen/inputs/steps/test_ruler.py
EXAMS = sorted(
    {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")} - NO_EXAMS - GENERATED
)
BY_PROGRAMS = {"ifbench", "ifeval"}  # whose rows have no target
BY_TESTS = {"humaneval_plus", "livecodebench", "mbpp_plus"}
BY_JUDGES = {"hle", "simpleqa"}  # whose jobs have no steps
BY_CHOICES = {"truthfulqa"}
OTHERS = BY_PROGRAMS | BY_TESTS | BY_JUDGES | BY_CHOICES
FILES = {"livecodebench": "livecodebench/test6.jsonl", "mmlu_redux": "mmlu_redux/*/*.arrow"}
HUB = {
    "aime26": ("MathArena/aime_2026", None, "train"),
    "hle": ("cais/hle", None, "test"),
    "hmmt": ("MathArena/hmmt_feb_2026", None, "train"),
    "humaneval_plus": ("evalplus/humanevalplus", None, "test"),
    "mbpp_plus": ("evalplus/mbppplus", None, "test"),
    "olympiadbench": ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
    "simpleqa": ("basicv8vc/SimpleQA", None, "test"),
    "supergpqa": ("m-a-p/SuperGPQA", None, "train"),
    "truthfulqa": ("truthfulqa/truthful_qa", "multiple_choice", "validation"),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train"),
    "aime25": ("yentinglin/aime_2025", None, "train"),
    "aime25_opencompass": ("yentinglin/aime_2025", None, "train"),
    "gpqa": ("Idavidrein/gpqa", "gpqa_diamond", "train"),
    "gpqa_opencompass": ("Idavidrein/gpqa", "gpqa_diamond", "train"),
    "ifbench": ("allenai/IFBench_test", None, "train"),
    "ifeval": ("google/IFEval", None, "train"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", None, "test"),
}


@cache
def composed(name: str, *overrides: str) -> tuple[JobConfig, dict[str, Any]]:
    """The job of an exam, and the parts of it that are about rows, post steps and scores."""
    with initialize_config_module("batchgen.conf", version_base="1.3"):
        cfg = compose("config", overrides=[f"+experiment={name}", *overrides])
    values: Any = OmegaConf.to_container(cfg)
    assert isinstance(values, dict)
    own: dict[str, Any] = {key: values.pop(key, None) for key in ("rows", "post", "score")}
    return load_config(values, TYPED), own


def made(specs: list[dict[str, Any]] | None) -> list[Any]:
    """The steps that a list of the configuration names."""
    steps = []
    for spec in specs or []:
        ((name, options),) = spec.items()
        given = {"as_" if key == "as" else key: value for key, value in options.items()}
        steps.append(resolve_name(class_path(name))(**given))
    return steps


@cache
def golden(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name("exams") / f"{name}.yaml"
    rows: list[dict[str, Any]] = load_yaml(path.read_text(), name)
    return rows


def row_fields(own: dict[str, Any], index: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row and what the exam's row steps add to them."""
    for step in made(own["rows"]):
        if isinstance(step, OrderChoices):
            fields = fields | step.apply(index, fields)
        if isinstance(step, Explode):
            fields = fields | {str(step.as_): fields[step.column][0]}
    return fields


def test_every_exam_has_golden_prompts() -> None:
    assert set(EXAMS) == set(HUB) | set(FILES)
    assert all(len(golden(name)) == 10 for name in EXAMS)


def test_the_table_names_every_exam() -> None:
    table = (ROOT / "docs/reference/exams.md").read_text()
    for name in (*EXAMS, *sorted(GENERATED)):
        about = (ROOT / f"conf/experiment/{name}.yaml").read_text()
        assert "Text" in about or "Checks" in about or "Questions" in about
        assert f"| `{name}` |" in table and "\n# Licence: " in about
        assert name in GENERATED or f"\n    # {name}\n    " in table  # the command for a local copy


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", EXAMS)
def test_prompts_are_those_of_the_definition(name: str) -> None:
    config, own = composed(name)
    assert config.prompt.kind == "chat" and config.prompt.user is not None
    for index, row in enumerate(golden(name)):
        fields = row_fields(own, index, row["fields"])
        assert (
            RowTemplate("prompt.user", config.prompt.user, list(fields)).render(fields)
            == (row["prompt"])
        )


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", sorted(set(EXAMS) - OTHERS))
def test_targets_are_those_of_the_definition(name: str) -> None:
    """The grader finds the target of each row, says so, and takes the target itself for right."""
    _, own = composed(name)
    steps: list[PostStep] = made(own["post"])
    rows = golden(name)
    form = (
        "ANSWER: {}"
        if name.startswith(("gpqa", "mmlu", "supergpqa"))
        else "So it is \\boxed{{{}}}."
    )
    texts = [form.format(row["target"]) for row in rows]
    fields = [row_fields(own, index, row["fields"]) for index, row in enumerate(rows)]
    with Grader(steps, workers=1, seconds=60) as grader:
        right = list(grader.grade(zip(texts, fields, strict=True)))
        wrong = list(grader.grade(zip(texts[1:], fields, strict=False)))
    assert [values["graded_against"] for values in right] == [row["target"] for row in rows]
    assert [(values["mark"], values["grade_error"]) for values in right] == [(1.0, None)] * 10
    for values, row, other in zip(wrong, rows, rows[1:], strict=False):
        assert values["mark"] == float(row["target"] == other["target"])


@pytest.mark.parametrize("name", sorted(BY_PROGRAMS))
def test_programs_tell_what_follows_the_instructions(name: str) -> None:
    _, own = composed(name)
    rows = golden(name)
    fields = [row["fields"] for row in rows]
    with Grader(made(own["post"]), workers=1, seconds=60) as grader:
        right = list(grader.grade(zip([row["follows"] for row in rows], fields, strict=True)))
        wrong = list(grader.grade(zip([row["misses"] for row in rows], fields, strict=True)))
    assert [(values["mark"], values["grade_error"]) for values in right] == [(1.0, None)] * 10
    for values, row in zip(wrong, rows, strict=True):
        missed = row.get("missed", row["fields"]["instruction_id_list"])
        assert (values["mark"], values["not_followed"]) == (0.0, missed)
        assert values["num_instructions"] - values["num_followed"] == len(missed)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", sorted(BY_TESTS))
def test_tests_tell_which_programs_are_right(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_sandbox()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, own = composed(name)
    rows = golden(name)[:4]
    texts = [f"So:\n```python\n{row[key]}\n```\n" for row in rows for key in ("solution", "wrong")]
    fields = [row["fields"] for row in rows for _ in range(2)]
    with Grader(made(own["post"]), workers=1, seconds=60) as grader:
        found = list(grader.grade(zip(texts, fields, strict=True)))
    assert [(row["mark"], row["test_result"]) for row in found] == [
        (1.0, "passed"),
        (0.0, "wrong"),
    ] * 4


def test_choices_tell_what_is_true() -> None:
    _, own = composed("truthfulqa")
    rows = [row["fields"] for row in golden("truthfulqa")]
    right = [row | {"choice_scores": [0.6, 0.3, 0.1][: 2 + i % 2]} for i, row in enumerate(rows)]
    wrong = [row | {"choice_scores": [0.3, 0.7, 0.0][: 2 + i % 2]} for i, row in enumerate(rows)]
    bad = rows[0] | {"choice_scores": [0.2, 0.3, 0.5]}
    with Grader(made(own["post"])) as grader:
        found = list(grader.grade(("", fields) for fields in (*right, *wrong, bad)))
    assert [(row["mark"], row["score"]) for row in found[:20]] == [(1.0, 0.6)] * 10 + [
        (0.0, 0.3)
    ] * 10
    assert found[20]["grade_error"]["type"] == "bad_target"


@pytest.mark.quick(2, thorough=6)
@pytest.mark.parametrize("name", EXAMS)
def test_an_exam_takes_its_data_from_the_hub_or_from_a_file(name: str) -> None:
    hub, _ = composed(name)
    data = hub.dataset
    if name in FILES:
        assert (data.kind, data.path) == ("files", FILES[name])
    else:
        assert data.kind == "hub" and (data.path, data.name, data.split) == HUB[name]
    local, _ = composed(name, "dataset=files", "dataset.path=copy.jsonl")
    assert local.dataset.kind == "files" and local.dataset.path == "copy.jsonl"
    assert (local.dataset.name, local.dataset.split) == (None, None)
    assert local.prompt == hub.prompt and local.dataset.id_column == hub.dataset.id_column


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", EXAMS)
def test_columns_that_grading_and_scoring_read_are_copied(name: str) -> None:
    """So that grades can be made again from the output alone."""
    config, own = composed(name)
    written = set(config.dataset.columns or golden(name)[0]["fields"])
    if own["rows"]:
        written |= {"choices", "target"}
    for step in made(own["post"]):
        assert set(step.field_names) - {"choice_scores"} <= written
    if own["score"]["subset"] is not None:
        assert own["score"]["subset"] in written
    assert written - {"choices", "target"} <= set(golden(name)[0]["fields"])


def test_a_filter_changes_no_question_that_is_shuffled() -> None:
    """Where the definition allows it, the order does not depend on where a row stands."""
    _, own = composed("gpqa")
    rows = [row["fields"] for row in golden("gpqa")]
    alone = [row_fields(own, 0, row) for row in reversed(rows)]
    assert alone == [row_fields(own, index, row) for index, row in enumerate(rows)][::-1]


def _local_copy(name: str, keys: Mapping[str, str], folder: Path) -> None:
    """Write the made rows of an exam where its local copy is read, in the form of that."""
    path = folder / (keys.get("dataset.path") or FILES[name]).replace("*", "x")
    path = path / "rows.jsonl" if not path.suffix else path
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row["fields"]) for row in golden(name)]
    rows = [json.loads(line.replace('"picture"', '"image"')) for line in lines]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".csv":
        pa.csv.write_csv(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.quick(1, thorough=6)
@pytest.mark.parametrize("name", EXAMS)
def test_an_exam_has_a_dry_run_over_a_local_copy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the keys that its file and docs/reference/exams.md print."""
    if name in BY_TESTS:
        need_sandbox()
    monkeypatch.chdir(tmp_path)
    about = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    printed = re.search(r"^#   (dataset=.+)$", about, re.M)
    assert (printed is None) == (name in FILES)
    typed = shlex.split(printed[1]) if printed else []
    _local_copy(name, dict(key.split("=", 1) for key in typed), tmp_path)
    typed += ["model=nano_hybrid", "sampling.max_new_tokens=4", "prompt.too_long=truncate_left"]
    code = run_command([f"+experiment={name}", *typed, "--dry-run"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "Nothing was run: this was --dry-run." in said.out
    assert re.search(r"^questions +10 of ", said.out, re.M), said.out
