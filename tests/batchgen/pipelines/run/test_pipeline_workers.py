"""A pipeline in an object store, and one that two processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.__main__ import run_command
from batchgen.storage.folder.step_folders import find_record, is_pipeline
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.pipeline_job import folders, run, shards, values, written


@pytest.mark.thorough
def test_a_pipeline_lies_in_a_store(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(monkeypatch, FaultyFiles())
    given = values(model, rows, Path("x")) | {"output": {"dir": "s3://bucket/out"}}
    del given["steps"]["last"]
    path = written(tmp_path / "pipeline.yaml", given)
    assert run(path) == 0
    record = find_record("s3://bucket/out")
    assert record is not None and [*record.current] == ["draft", "judge"]
    assert is_pipeline("s3://bucket/out")
    capsys.readouterr()
    assert run_command(["status", "s3://bucket/out"]) == 0
    assert capsys.readouterr().out.count("complete") == 2
    assert run_command(["export", "s3://bucket/out/judge", "--columns", "row_id"]) == 0
    by_name = capsys.readouterr().out
    assert by_name.count("#") == len(by_name.splitlines()) > 0
    assert run(path) == 0
    assert run(written(tmp_path / "e.yaml", given | {"export": {"from": "judge"}})) == 2
    assert "output.dir is in an object store" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_the_steps(model: Path, rows: Path, tmp_path: Path) -> None:
    given = values(model, rows, tmp_path / "out")
    given["output"]["rows_per_shard"] = 2
    given["export"] = {"from": "last", "out": "last.csv", "columns": ["row_id", "text"]}
    path = written(tmp_path / "pipeline.yaml", given)
    assert run(path, f"output.dir={tmp_path}/alone") == 0
    workers = [
        subprocess.Popen([sys.executable, "-m", "batchgen", path, f"+worker={number}"])
        for number in (1, 2)
    ]
    assert [worker.wait(300) for worker in workers] == [0, 0]
    assert shards(tmp_path / "out") == shards(tmp_path / "alone")
    assert {f.name for f in folders(tmp_path / "out").values()} == {
        f.name for f in folders(tmp_path / "alone").values()
    }
    record = json.loads((tmp_path / "out/pipeline.json").read_text())
    assert [len(step["versions"]) for step in record["steps"].values()] == [1, 1, 1]
    assert (tmp_path / "out/export/last.csv").read_text().count("\n") > 1
