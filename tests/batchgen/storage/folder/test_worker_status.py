"""`batchgen status` says what each worker of a folder does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from batchgen.__main__ import run_command
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.generation.worker import Worker, others_run
from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.lease_files import mark_name
from batchgen.storage.leases.lease_table import Lease
from batchgen.storage.leases.process_identity import process_identity
from batchgen.storage.leases.store_operations import Create
from batchgen.storage.stores.manifest import Manifest
from tests.support.jobs.fake_job import FakeJob


def _worker(folder: Path, name: str | None = None) -> Worker:
    config = WorkersConfig(heartbeat=0.05, stale_after=0.2, name=name)
    worker = Worker(folder, config, 1)
    worker.begin(set(), 9)
    return worker


def test_status_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal").mkdir()
    identity_ = {"output": {"text_column": "text"}}
    (tmp_path / "manifest.json").write_text(Manifest.build(identity_, {}).text())
    one, two = _worker(tmp_path, "a"), _worker(tmp_path)
    assert [one.next_task(True).shard, one.next_task(True).shard] == [0, 1]
    assert two.next_task(True).shard == 2
    one.store.do(Create(mark_name(0, "done"), b"{}"))
    mark = Lease(2, (1, 3, 4)).encoded()
    two.store.do(Create(mark_name(5, "quarantined"), mark))
    attempt: dict[str, Any] = {
        "rows": 1234, "generated_tokens": 500, "generate_s": 2.0, "status": "running",
        "memory": {"weights": 1}, "rows_total": 72,
    }  # fmt: skip
    one.tell({"attempt": attempt})
    one.beat()
    two.end("stopped")
    assert run_command(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{tmp_path}: ")
    assert printed[1].split() == [
        "worker", "name", "state", "shards", "rows", "tokens/s", "heard", "of", "where",
    ]  # fmt: skip
    assert printed[2].split()[:6] == ["1", "a", "running", "1", "1,234", "250"]
    assert printed[3].split()[:4] == ["2", "stopped", "2", "0"]
    assert printed[4].startswith("shards: 2 begun, 1 done by these workers")
    assert printed[5] == "shard 5 is in quarantine: it crashed the workers 1, 3, 4"
    assert run_command(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"][0]["shards"] == [1] and found["quarantined"] == {"5": [1, 3, 4]}
    assert JobFolderReader(tmp_path).may_run
    one.end("complete")
    assert not JobFolderReader(tmp_path).may_run


def test_status_of_a_complete_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeJob(str(tmp_path), rows=5).run()
    capsys.readouterr()
    assert run_command(["status", str(tmp_path)]) == 0
    line, device = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path}: complete, 5 questions, 10 answers, ")
    assert device.startswith("device: ") and device.endswith(" s per kept row")
    assert run_command(["status", str(tmp_path / "x")]) == 2


def test_the_time_left_is_that_of_all_workers_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of those that have ended, nor of the last one alone, which still loads."""
    (tmp_path / "manifest.json").write_text(Manifest.build({}, {}).text())
    running = _worker(tmp_path)
    figures = [
        ("running", 300, 10.0),
        ("killed", 4000, 1.0),
        ("running", 50, 5.0),
        ("running", 0, 0.0),
    ]
    attempts = [
        {"status": status, "rows": rows, "generate_s": seconds, "rows_total": 6000}
        for status, rows, seconds in figures
    ]
    metrics = {"status": "running", "rows": 4400, "error_rows": 0, "tokens_per_s": 9.0}
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({**metrics, "attempts": attempts}))
    assert run_command(["status", str(tmp_path)]) == 0
    assert "4,400 of 6,000 answers (73%), 9 tokens/s, about 40 s left" in capsys.readouterr().out
    path.write_text(json.dumps({**metrics, "attempts": attempts[-1:]}))
    assert run_command(["status", str(tmp_path)]) == 0
    assert " left" not in capsys.readouterr().out
    running.end("complete")


def test_workers_of_another_machine_are_waited_for(tmp_path: Path) -> None:
    """Their locks may not be seen here; their heartbeats are."""
    config = WorkersConfig(heartbeat=0.05, stale_after=0.3)
    assert not others_run(tmp_path, config)
    (tmp_path / "workers").mkdir()
    beat = {**process_identity(), "machine": "another", "ended": None, "beats": 1}
    path = tmp_path / "workers/0001.json"
    path.write_text(json.dumps(beat))
    started = time.monotonic()
    assert not others_run(tmp_path, config)
    assert time.monotonic() - started >= 0.3
    living = _worker(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.storage.leases.failure_detector.machine", lambda: "a third one")
        assert others_run(tmp_path, config)
    living.end("stopped")
    path.write_text(json.dumps({**beat, "ended": "stopped"}))
    started = time.monotonic()
    assert not others_run(tmp_path, config)


def test_a_folder_whose_lock_does_not_reach_is_joined(tmp_path: Path) -> None:
    manifest = Manifest.build({"model": {"path": "m"}}, {})
    with JobFolder(tmp_path, manifest, lambda stop: None, overwrite=False) as folder:
        assert folder.exclusive and folder.is_new
    other = {"overwrite": False, "exclusive": lambda path: False}
    with JobFolder(tmp_path, manifest, lambda stop: None, **other) as folder:  # type: ignore[arg-type]
        assert not folder.exclusive and not folder.is_new
