"""A pipeline with a tiny model: run, killed, gone on with, changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen.__main__ import run_command
from batchgen.storage.folder.step_folders import find_record
from tests.support.jobs.pipeline_job import EXTRACT, folders, run, shards, values, written


@pytest.fixture
def pipeline(model: Path, rows: Path, tmp_path: Path) -> str:
    return written(tmp_path / "pipeline.yaml", values(model, rows, tmp_path / "out"))


def test_the_steps_read_each_other(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(pipeline) == 0
    found = shards(out)
    drafts = [row for rows in found["draft"].values() for row in rows]
    judged = [row for rows in found["judge"].values() for row in rows]
    kept = [
        f"{row['row_id']}#{row['sample_index']}"
        for row in drafts
        if row["text"] and (row["sample_index"] == 1 or row["row_id"] != "r3")
    ]
    assert [row["row_id"] for row in judged] == kept
    last = [row for rows in found["last"].values() for row in rows]
    assert [row["row_id"] for row in last] == [f"{name}#0" for name in kept]
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "step", "read", "made", "dropped", "rows", "answers", "errors", "kept", "state",
    ]  # fmt: skip
    numbers = [
        "22",
        "0",
        str(22 - len(kept)),
        *[str(len(kept))] * 2,
        "0",
        str(len(kept)),
        "complete",
    ]
    assert table[2].split() == ["judge", *numbers]


@pytest.mark.thorough
def test_a_step_is_found_by_its_name(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pipeline) == 0
    folder = folders(tmp_path / "out")["judge"]
    capsys.readouterr()
    assert run_command(["export", f"{tmp_path}/out/judge"]) == 0
    by_name = capsys.readouterr().out
    assert run_command(["export", str(folder)]) == 0
    assert by_name == capsys.readouterr().out != ""
    assert run_command(["export", f"{tmp_path}/out/jugde"]) == 2
    assert "has no step jugde: choose among draft, judge, last" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_run_is_a_pipeline_file_that_runs_it_again(pipeline: str, tmp_path: Path) -> None:
    assert run(pipeline, "judge.sampling.seed=5") == 0
    before = folders(tmp_path / "out"), shards(tmp_path / "out")
    assert run(str(tmp_path / "out" / "pipeline.yaml")) == 0
    assert before == (folders(tmp_path / "out"), shards(tmp_path / "out"))
    assert run(str(tmp_path / "out" / "pipeline.yaml"), f"output.dir={tmp_path}/other") == 0
    assert before[1] == shards(tmp_path / "other")


@pytest.mark.slow
def test_a_killed_pipeline_goes_on(pipeline: str, tmp_path: Path) -> None:
    assert run(pipeline, f"output.dir={tmp_path}/undisturbed") == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "batchgen", pipeline, "engine.max_num_seqs=2"],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("judge.*/journal/*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "out").glob("last.*/data/*"))
    assert run(pipeline, "engine.max_num_seqs=2") == 0
    assert shards(tmp_path / "out") == shards(tmp_path / "undisturbed")


@pytest.mark.slow
def test_changed_rows_begin_a_new_version(
    pipeline: str, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pipeline) == 0
    first = folders(tmp_path / "out")
    rows.write_text(rows.read_text().replace("What is 2", "How much is 2"))
    assert run(pipeline) == 0
    second = folders(tmp_path / "out")
    assert {name for name in first if first[name] != second[name]} == {"draft", "judge", "last"}
    assert "the rows that it reads have changed" in capsys.readouterr().err
    record = find_record(str(tmp_path / "out"))
    assert record is not None
    assert [at in str(first["draft"]) for at in record.steps["draft"].older] == [True]
    assert run(pipeline) == 0
    assert folders(tmp_path / "out") == second


@pytest.mark.thorough
def test_too_many_errors_end_the_pipeline(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = values(model, rows, tmp_path / "out")
    given["steps"]["draft"]["rows"] = [{"Filter": {"where": "row_id != 'r1' or q.nowhere > 1"}}]
    pipeline = written(tmp_path / "pipeline.yaml", given)
    assert run(pipeline) == 1
    said = capsys.readouterr().err
    assert "step draft: 2 of the first 8 answers are errors (25%), more than most_errors" in said
    assert "r1" in said and "judge" in said.rpartition("The pipeline ends here")[2]
    assert not list((tmp_path / "out").glob("judge.*/data/*"))
    assert run(pipeline, "most_errors=0.3") == 3


@pytest.mark.thorough
def test_a_filter_that_leaves_nothing_ends_the_pipeline(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = values(model, rows, tmp_path / "out")
    given["steps"]["judge"]["dataset"]["where"] = "sample_index == 7"
    assert run(written(tmp_path / "pipeline.yaml", given)) == 2
    said = capsys.readouterr().err
    assert "batchgen: step judge: " in said
    assert "0  stopped" in said.splitlines()[-1]


@pytest.mark.thorough
def test_sets_are_written_once(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = values(model, rows, tmp_path / "out")
    given["export"] = [
        {"from": "judge", "to": "sft"},
        {"from": "draft", "out": "drafts.csv", "columns": ["row_id", "text"]},
        {"from": "judge", "to": "sft", "out": "folder"},
    ]
    pipeline = written(tmp_path / "pipeline.yaml", given)
    assert run(pipeline) == 0
    made = tmp_path / "out" / "export"
    assert sorted(path.name for path in made.iterdir() if path.name[0] != ".") == [
        "drafts.csv", "exports.json", "folder", "judge.sft.jsonl",
    ]  # fmt: skip
    line = json.loads((made / "judge.sft.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in line["messages"]] == ["user", "assistant"]
    when = (made / "drafts.csv").stat().st_mtime_ns
    capsys.readouterr()
    assert run(pipeline) == 0
    assert capsys.readouterr().out.count("already has these rows") == 3
    assert (made / "drafts.csv").stat().st_mtime_ns == when
    assert run(pipeline, "judge.sampling.seed=9") == 0
    said = capsys.readouterr().out
    assert said.count("already has these rows") == 1 and f"{made}/folder: " in said


@pytest.mark.thorough
def test_two_steps_of_one_pipeline_are_told_apart(model: Path, rows: Path, tmp_path: Path) -> None:
    """Ids of rows of several steps begin with the steps' names, whatever their versions are."""
    given = values(model, rows, tmp_path / "out")
    given["steps"] = {
        "a": {"post": [EXTRACT]},
        "b": {"post": [EXTRACT]},
        "both": {"from": ["a", "b"], "dataset": {"limit": 2, "text_as": "reply"}},
    }
    assert run(written(tmp_path / "pipeline.yaml", given)) == 0
    found = shards(tmp_path / "out")
    both = [row["row_id"] for part in found["both"].values() for row in part]
    assert both == ["a/r0#0", "a/r1#0"]
    texts = [[row["token_ids"] for part in found[name].values() for row in part] for name in "ab"]
    assert texts[0] != texts[1], "each step has random numbers of its own"


@pytest.mark.thorough
def test_a_moved_pipeline_whose_step_joins_another_goes_on(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = values(model, rows, tmp_path / "out")
    join = {"Join": {"from": "second", "on": "q", "columns": {"text": "opinion"}}}
    given["steps"] = {
        "draft": {},
        "second": {"sampling.temperature": 0.5},
        "last": {"from": "draft", "rows": [join], "prompt.user": "{{ opinion }}"},
    }
    path = written(tmp_path / "pipeline.yaml", given)
    assert run(path) == 0
    before = shards(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    capsys.readouterr()
    assert run(path, f"output.dir={tmp_path}/moved") == 0
    assert "new version" not in capsys.readouterr().err
    assert shards(tmp_path / "moved") == before
    assert len(list((tmp_path / "moved").glob("last.*"))) == 1
