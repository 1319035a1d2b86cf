"""What an export of a pipeline refuses is refused before the first step runs, and by --dry-run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.pipeline_job import EXTRACT, run, values, written

STEPS: dict[str, Any] = {
    "draft": {"post": [EXTRACT]},
    "judge": {"from": "draft", "dataset.text_as": "reply", "prompt.user": "{{ q }} {{ reply }}"},
    "last": {
        "from": "judge",
        "dataset.text_as": "verdict",
        "rows": [{"Join": {"from": "draft", "on": "q", "columns": {"text": "again"}}}],
        "prompt.user": "{{ verdict }} {{ again }}",
    },
}

GOOD: list[dict[str, Any]] = [
    {"from": "draft", "to": "dpo", "by": "answer == 'a'", "where": "text|length > 0"},
    {"from": "judge", "columns": ["row_id", "q", "reply", "text"], "where": "text is not none"},
    {"from": "last", "to": "sft", "messages": "[{user: '{{ again }}'}, {assistant: '{{ text }}'}]"},
    {"from": "last", "to": "openai", "out": "lines.jsonl"},
]  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    ({"from": "judge", "where": "text +"}, "export judge.jsonl: where"),
    ({"from": "judge", "where": "nothing == 1"}, "export judge.jsonl: where.*nothing"),
    ({"from": "last", "columns": ["row_id", "texts"]}, "the rows of step last have no column 'te"),
    ({"from": "draft", "to": "dpo", "by": "marks"}, "export draft.dpo.jsonl: by.*marks"),
    ({"from": "judge", "to": "kto", "label": "grades.mark == 1"}, "label.*grades"),
    ({"from": "judge", "to": "grpo"}, "column mark, which step judge does not have"),
    ({"from": "draft", "to": "sft", "reasoning": "thoughts"}, "reasoning: step draft has no colu"),
    ({"from": "last", "to": "sft", "messages": "[{user: '{{ answr }}'}, {assistant: a}]"}, "answr"),
    ({"from": "draft", "to": "rl"}, "needs the column 'logprobs', which step draft does not have"),
    ({"from": "draft", "out": "x.txt", "columns": ["row_id", "text"]}, "txt writes one column"),
]


def pipeline(model: Path, rows: Path, tmp_path: Path, exports: list[dict[str, Any]]) -> str:
    given = values(model, rows, tmp_path / "out")
    given["steps"] = STEPS
    return written(tmp_path / "pipeline.yaml", given | {"export": exports})


@pytest.mark.quick(1)
@pytest.mark.parametrize(("export", "says"), BAD, ids=lambda one: str(one)[:40])
def test_a_wrong_export_is_refused_at_once(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    export: dict[str, Any], says: str,
) -> None:  # fmt: skip
    path = pipeline(model, rows, tmp_path, [*GOOD, {"out": "other.jsonl", **export}])
    for more in (["--dry-run"], []):
        if "out" not in export:
            says = says.replace("judge.jsonl", "other.jsonl").replace("draft.dpo.js", "other.js")
        assert run(path, *more) == 2
        said = capsys.readouterr().err
        assert re.search(says, said) and str(tmp_path) not in said, said
    assert not (tmp_path / "out").exists()


def test_right_exports_are_written(model: Path, rows: Path, tmp_path: Path) -> None:
    path = pipeline(model, rows, tmp_path, GOOD)
    assert run(path, "--dry-run") == 0
    assert run(path) == 0
