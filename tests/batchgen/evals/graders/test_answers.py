"""The table of answers: what a person says about each, and what the steps make of it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.grade import Grade
from batchgen.evals.graders.grade_rows import Grader
from batchgen.evals.graders.step import PostStep

GROUPS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text())


def written(text: str) -> str:
    """The text with its repetitions, «X*N», written out."""
    return re.sub("«([^»]*)\\*(\\d+)»", lambda match: match[1] * int(match[2]), text)


def verdict(values: dict[str, Any]) -> str:
    if values["grade_error"] is not None:
        assert values["mark"] is None
        return str(values["grade_error"]["type"])
    if values["answer"] is None:
        assert values["mark"] == 0
        return "none"
    return {1.0: "right", 0.0: "wrong"}[values["mark"]]


def test_the_table_is_large() -> None:
    rows = [tuple(map(str, row)) for group in GROUPS for row in group["rows"]]
    assert len(rows) >= 240


@pytest.mark.quick(7)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["group"])
def test_answers_get_the_verdict_that_a_person_gave(group: dict[str, Any]) -> None:
    rows = [
        (written(text), {"target": target, **group.get("fields", {})})
        for target, text, _ in group["rows"]
    ]
    slow = any("timeout" in wanted for _, _, wanted in group["rows"])
    steps: list[PostStep] = [Extract(**group["extract"]), Grade(**group["grade"])]
    with Grader(steps, workers=1, seconds=2.0 if slow else 60.0, memory_bytes=2 << 30) as grader:
        graded = list(grader.grade(rows))
    found = {}
    for (target, text, wanted), (full, _), values in zip(group["rows"], rows, graded, strict=True):
        if verdict(values) not in wanted.split():
            found[target, text] = (wanted, verdict(values), values["answer"])
        start, end = values["answer_start"], values["answer_end"]
        if values["answer"] is not None and "json_path" not in group["extract"]["methods"]:
            assert full[start:end] == values["answer"]
    assert not found
