"""`--help rows` and `--help post` tell all steps that there are, and all of their keys."""

from __future__ import annotations

import dataclasses
import pkgutil
from importlib import import_module
from pkgutil import resolve_name

import pytest

import batchgen.evals.graders
import batchgen.inputs.steps
from batchgen.__main__ import run_command
from batchgen.config.groups.class_names import CLASSES, class_path
from batchgen.config.groups.config_keys import STEP_LISTS
from batchgen.inputs.steps.table_step import TableStep


def _steps() -> set[str]:
    """The import paths of all classes that have what a step has."""
    found = set()
    for room in (batchgen.evals.graders, batchgen.inputs.steps):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            for name, cls in vars(import_module(module.name)).items():
                own = isinstance(cls, type) and cls.__module__ == module.name
                is_step = hasattr(cls, "apply") or (isinstance(cls, type) and _is_stable(cls))
                if own and dataclasses.is_dataclass(cls) and is_step:
                    found.add(f"{module.name}.{name}")
    return found


def _is_stable(cls: type) -> bool:
    return issubclass(cls, TableStep) and cls.stable


def test_all_steps_are_listed() -> None:
    assert _steps() == {class_path(name) for key in STEP_LISTS for name in CLASSES[key]}


@pytest.mark.parametrize("key", STEP_LISTS)
def test_a_list_of_steps(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help", key]) == 0
    text = capsys.readouterr().out
    for name in CLASSES[key]:
        step = text.partition(f"\n{name}\n")[2]
        for title in CLASSES[key]:
            step = step.partition(f"\n{title}\n")[0]
        cls = resolve_name(class_path(name))
        assert cls.__doc__.split("\n")[0] in step
        keys = [line.partition(":")[0].strip() for line in step.split("\n") if line[2:3] != " "]
        fields = [field.name.rstrip("_") for field in dataclasses.fields(cls)]
        assert [key for key in keys if key] == fields
        assert "Attributes" not in step


def test_a_key_has_its_default_and_what_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help", "post", "rows"]) == 0
    text = capsys.readouterr().out
    assert (
        '  answer: "answer"\n    the column with the answer, which an earlier step wrote.\n' in text
    )
    assert "\n  method: (has no default)\n" in text
    assert "\n  choices_column: null\n    the column that holds a list of all choices.\n" in text


def test_the_overview_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    assert (
        "\n  post  Extract, Grade, Instructions, RunTests, Verdict, Majority, ParseScore, "
        "ChoiceScore\n" in capsys.readouterr().out
    )
