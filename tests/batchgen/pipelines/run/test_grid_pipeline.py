"""A pipeline on a step that runs each row with each of several adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.__main__ import run_command
from batchgen.pipelines.trace.job_traces import JobTraces
from batchgen.pipelines.trace.traced import Trace, TracedAnswers
from tests.support.engine.lora_files import write_adapter
from tests.support.jobs.pipeline_job import folders, run, shards, values, written

GRADE = [
    {"Extract": {"methods": ["regex"], "pattern": "([a-z])"}},
    {"Grade": {"method": "regex", "target": "letters"}},
]
ARMS = ("one", "base", "two")
VALID = "mark == 1"


@pytest.fixture
def pipeline(model: Path, tmp_path: Path) -> str:
    rows = tmp_path / "rows.jsonl"
    lines = [{"id": f"r{i}", "q": f"What is {i}?", "letters": "[a-m]"} for i in range(5)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, model, seed=seed, strength=0.2)
    given = values(model, rows, tmp_path / "out")
    given["steps"] = {
        "draft": {
            "model.lora": [str(tmp_path / "one"), "base", str(tmp_path / "two")],
            "model.lora_grid": True,
            "engine.lora_slots": 1,
            "sampling.until": {"valid": 2, "where": VALID, "most": 6},
            "post": GRADE,
        },
        "judge": {
            "from": "draft",
            "dataset": {"where": "sample_index == 0", "text_as": "reply"},
            "prompt.user": "{{ q }} {{ reply }}",
        },
        "last": {"from": "judge", "dataset.text_as": "verdict", "prompt.user": "{{ verdict }}"},
    }
    given["export"] = [
        {"from": "draft", "to": "sft", "out": "two.jsonl", "where": 'adapter == "two"'},
        {"from": "draft", "to": "dpo", "by": "mark", "out": "pairs.jsonl"},
        {
            "from": "draft",
            "out": "answers.jsonl",
            "columns": ["row_id", "adapter", "sample_index", "valid"],
        },
        {"from": "judge", "out": "judged.csv", "columns": ["row_id", "adapter", "text"]},
    ]
    return written(tmp_path / "pipeline.yaml", given)


@pytest.mark.thorough
def test_steps_read_the_rows_of_each_adapter(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(pipeline) == 0
    found = {name: [row for rows in files.values() for row in rows]
             for name, files in shards(out).items()}  # fmt: skip
    drafts = found["draft"]
    keys = [(row["adapter"], row["row_id"], row["sample_index"]) for row in drafts]
    assert len(set(keys)) == len(keys)
    answers = [json.loads(line) for line in (out / "export/answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(drafts)
    for name in ARMS:
        own = [row for row in answers if row["adapter"] == name]
        assert {row["row_id"] for row in own} == {f"r{i}" for i in range(5)}
        for number in range(5):  # a row ends by the answers of its adapter alone
            samples = [row for row in own if row["row_id"] == f"r{number}"]
            valid = sum(row["valid"] for row in samples)
            assert valid == 2 or len(samples) == 6
    firsts = {(row["adapter"], row["row_id"]) for row in drafts if row["sample_index"] == 0}
    assert {row["row_id"] for row in found["judge"]} == {f"{a}/{r}#0" for a, r in firsts}
    assert len(found["last"]) == len(found["judge"]) == 15
    assert {row["row_id"] for row in found["last"]} == {f"{a}/{r}#0#0" for a, r in firsts}
    trace = Trace([])
    JobTraces(str(folders(out)["last"])).add(trace, "two/r1#0#0")
    read = [each for each in trace.origins if isinstance(each, TracedAnswers)]
    assert read, "the answers that the row was made of"
    check_exports(out / "export", drafts)
    assert run(pipeline) == 0  # nothing is computed again
    capsys.readouterr()
    assert run_command(["score", str(folders(out)["draft"])]) == 0
    said = capsys.readouterr().out
    assert all(f"score {name}" in said for name in ARMS)


def check_exports(folder: Path, drafts: list[dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in (folder / "two.jsonl").read_text().splitlines()]
    texts = {row["text"] for row in drafts if row["adapter"] == "two"}
    assert lines and {line["messages"][-1]["content"] for line in lines} <= texts
    by_pair: dict[str, set[tuple[str, str]]] = {}
    for row in drafts:
        by_pair.setdefault(row["text"], set()).add((row["adapter"], row["row_id"]))
    for line in (folder / "pairs.jsonl").read_text().splitlines():
        pair = json.loads(line)
        chosen, rejected = (by_pair[pair[key][-1]["content"]] for key in ("chosen", "rejected"))
        assert chosen & rejected, "a pair is of one row and one adapter"
    judged = (folder / "judged.csv").read_text().splitlines()
    assert len(judged) >= 16 and judged[0].startswith("row_id,adapter,text")
