"""The recipes of docs/guides/recipes.md, run as they are printed, with a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from batchgen.__main__ import run_command
from batchgen.cli.options import parse_options
from batchgen.cli.run_options import composed_pipeline
from batchgen.cli.verb_table import VERBS
from tests.support.jobs.real_job import VOCAB, save_tokenizer
from tests.support.jobs.trl_rules import check_preference, is_conversational, type_of

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "recipes.md"
SMALL = (
    "engine.device=cpu", "engine.kv_cache_gib=0.02", "sampling.max_new_tokens=48",
    "output.rows_per_shard=4", "output.report=false",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "questions": {
            "type": "array", "minItems": 2, "maxItems": 2,
            "items": {"enum": ["Who?", "Why?", "Where?"]},
        }
    },
    "required": ["questions"],
    "additionalProperties": False,
}  # fmt: skip
TEXTS = [f"A text of {name}, who lives there." for name in ("Ada", "Ben", "Cleo", "Dan")]


def recipes() -> dict[str, list[list[str]]]:
    """The commands of each recipe, by the number in its title."""
    found: dict[str, list[list[str]]] = {}
    for part in PAGE.read_text().replace("\\\n", " ").split("\n## ")[1:]:
        commands = re.findall(r"^    batchgen (.*)$", part, re.MULTILINE)
        found[part[0]] = [shlex.split(command) for command in commands]
    return found


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    folder = tiny_model("llama", max_position_embeddings=2048, **VOCAB)
    save_tokenizer(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_files(folder: Path) -> None:
    """The files that the recipes read."""
    ids = [{"id": f"d{i}"} for i in range(4)]
    write(folder / "docs.jsonl", [i | {"text": t} for i, t in zip(ids, TEXTS, strict=True)])
    write(folder / "table.jsonl", [i | {"text": t} for i, t in zip(ids, TEXTS, strict=True)])
    write(folder / "prompts.jsonl", [i | {"prompt": t} for i, t in zip(ids, TEXTS, strict=True)])
    write(folder / "problems.jsonl", [i | {"problem": "3+4?", "answer": "7"} for i in ids])
    write(folder / "personas.jsonl", [{"persona": name} for name in ("Ada", "Ben")])
    (folder / "questions.json").write_text(json.dumps(SCHEMA))


@pytest.mark.thorough
@pytest.mark.parametrize("number", ["1", "2", "3", "4", "5"])
def test_a_recipe_makes_its_data_set(
    number: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for command in recipes()[number]:
        if command[0] not in VERBS:
            command = [re.sub(r"^model\.path=.*", f"model.path={model}", a) for a in command]
            command += SMALL
            if number == "2":  # a model that knows nothing guesses
                command += ["constraint=choice", "constraint.choices=[7,8]"]
            elif any(argument.startswith("constraint=") for argument in command):
                command += ["sampling=sample", "sampling.temperature=8", "sampling.top_p=1"]
        assert run_command(command) == 0, command
    CHECKS[number](tmp_path)


def loaded(path: Path) -> list[dict[str, Any]]:
    kind = "parquet" if path.suffix == ".parquet" else "json"
    cache = str(path.parent / "cache")
    return list(load_dataset(kind, data_files=str(path), split="train", cache_dir=cache))


def check_questions(folder: Path) -> None:
    rows = loaded(folder / "qa.jsonl")
    assert rows and all(is_conversational(row) for row in rows)
    asked = [row["messages"][0]["content"] for row in rows]
    assert set(asked) <= {"Who?", "Why?", "Where?"} and len(set(asked)) == len(asked)


def check_pairs(folder: Path) -> None:
    rows = loaded(folder / "pairs.parquet")
    assert rows and {type_of(row) for row in rows} == {"preference"}
    for row in rows:
        check_preference(row)
        assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("7", "8")
    best = load_dataset(str(folder / "shortest"), split="train", cache_dir=str(folder / "cache"))
    assert set(best["response"]) == {"7"}


def check_judged(folder: Path) -> None:
    rows = loaded(folder / "preferences.jsonl")
    assert rows and all(row["score_chosen"] >= row["score_rejected"] + 2 for row in rows)
    assert {row["prompt"][0]["content"] for row in rows} <= set(TEXTS)


def check_talks(folder: Path) -> None:
    rows = loaded(folder / "talks.jsonl")
    assert rows
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "user", "assistant"]


def check_table(folder: Path) -> None:
    lines = (folder / "translated.csv").read_text().splitlines()
    assert lines[0] == "id,text,german" and len(lines) > 1


CHECKS = {
    "1": check_questions, "2": check_pairs, "3": check_judged, "4": check_talks, "5": check_table,
}  # fmt: skip


FILES = sorted((Path(__file__).parents[2] / "examples" / "pipelines").glob("*.yaml"))


def test_each_recipe_is_a_file_too() -> None:
    page = PAGE.read_text()
    assert len(FILES) == len(recipes()) == 5
    assert all(f"`examples/pipelines/{path.name}`" in page for path in FILES)


@pytest.mark.quick(2)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_pipeline_of_a_recipe_is_understood(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    pipeline = composed_pipeline(parse_options([str(path), "output.dir=out"]))
    assert pipeline is not None and pipeline.exports
    assert not list(tmp_path.glob("out"))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_pipeline_of_a_recipe_runs(
    path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    arguments = [str(path), "output.dir=out", f"model.path={model}", "most_errors=1", *SMALL]
    if path.stem == "best_of_n":  # a model that knows nothing guesses
        arguments += ["constraint=choice", "constraint.choices=[7,8]"]
    if path.stem == "two_writers":
        arguments += [
            "rated.sampling=sample",
            "rated.sampling.temperature=8",
            "rated.sampling.top_p=1",
        ]
        arguments += [f"second.model.path={model}"]
    assert run_command(arguments) in (0, 3)
    made = [one.name for one in (tmp_path / "out/export").iterdir()]
    pipeline = composed_pipeline(parse_options([str(path), "output.dir=out"]))
    assert pipeline is not None and {one.out for one in pipeline.exports} <= {*made}
