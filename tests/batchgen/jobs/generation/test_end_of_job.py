"""The end of a shared job: one worker completes it, and all of them say how it ended."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import batchgen.jobs.run.job_end
import batchgen.jobs.run.run_job
from batchgen.jobs.generation.worker import Worker
from batchgen.jobs.run.job_end import JobResult
from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.heartbeat import Heartbeat
from batchgen.storage.metrics.job_metrics import Metrics, Status
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.errors import JobError
from tests.support.jobs.shared_jobs import SharedJob, in_threads

_WORKERS = {"journal", "leases", "workers"}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _messages(results: list[JobResult | Exception]) -> list[str]:
    assert all(isinstance(result, JobResult) for result in results), results
    return [result.message for result in results if isinstance(result, JobResult)]


def _wait_until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _wait_until_gone(path: Path) -> None:
    _wait_until(lambda: not path.exists())


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[JobResult]:
    """Gets the result of every worker that completes the job."""
    complete = batchgen.jobs.run.job_end.complete
    found: list[JobResult] = []

    def noted(*args: Any) -> JobResult:
        found.append(complete(*args))
        return found[-1]

    monkeypatch.setattr(batchgen.jobs.run.run_job, "complete", noted)
    return found


def test_a_job_is_completed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: list[JobResult]
) -> None:
    """Also if it becomes complete just after a worker has seen that it is not."""
    claim, asked = Worker.claim_finish, itertools.count()

    def late_claim(self: Worker) -> bool:
        if next(asked):
            _wait_until_gone(tmp_path / "leases")
        return claim(self)

    monkeypatch.setattr(Worker, "claim_finish", late_claim)
    job = SharedJob(str(tmp_path), rows=40, rows_per_shard=4, step_s=0.01)
    messages = _messages(in_threads([job] * 3))
    assert len(completed) == 1
    assert sum("this worker has computed" in message for message in messages) == 2
    assert len(json.loads((tmp_path / "metrics.json").read_text())["attempts"]) == 3


def test_who_comes_when_the_job_is_complete_says_how_it_ended(tmp_path: Path) -> None:
    job = SharedJob(str(tmp_path), rows=20)
    job.run()
    before = _names(tmp_path)
    lock = FolderLock(tmp_path / ".lock")
    lock.share()  # as a worker does that has not left yet
    result = job.run()
    assert result.exit_code == 3
    said = "The job is complete; this worker has computed 0 of its answers."
    assert result.message.startswith(said)
    assert _names(tmp_path) == before
    lock.__exit__()
    assert job.run().exit_code == 3 and _names(tmp_path) == before


def test_a_worker_tidies_up_after_one_that_was_killed_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed when metrics.json said that the job is complete, and nothing was deleted."""
    job = SharedJob(str(tmp_path), rows=40, rows_per_shard=4, step_s=0.01)
    remove = JobFolder.remove_journal
    calls = itertools.count()
    monkeypatch.setattr(
        JobFolder, "remove_journal", lambda self: remove(self) if next(calls) else None
    )
    _messages(in_threads([job] * 2))
    assert not _names(tmp_path) & _WORKERS


@pytest.mark.thorough
def test_figures_that_come_late_do_not_undo_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: list[JobResult]
) -> None:
    """The first worker has read what the others told, and writes metrics.json when the job is
    complete already."""
    others = Worker.others

    def late_others(self: Worker) -> list[dict[str, Any]]:
        found = others(self)
        if self.number == 1 and self.is_over():
            _wait_until_gone(tmp_path / "leases")
        return found

    monkeypatch.setattr(Worker, "others", late_others)
    job = SharedJob(str(tmp_path), rows=60, rows_per_shard=4, step_s=0.02)
    _messages(in_threads([job] * 2))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(completed) == 1
    assert metrics["status"] == "complete" and len(metrics["attempts"]) == 2


@pytest.mark.thorough
def test_figures_that_come_while_folders_are_deleted_do_not_undo_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: list[JobResult]
) -> None:
    """The first worker writes metrics.json after the leases are gone, when it still can."""
    others, delete = Worker.others, FolderStorage.delete
    written = threading.Event()

    def late_others(self: Worker) -> list[dict[str, Any]]:
        found = others(self)
        if self.number == 1 and self.is_over():
            _wait_until_gone(tmp_path / "leases")
        return found

    def late_delete(self: FolderStorage, path: Path) -> None:
        if path.name == "workers" and not written.is_set():
            while json.loads((tmp_path / "metrics.json").read_text())["status"] != "running":
                time.sleep(0.01)
            written.set()
            time.sleep(0.5)  # the other worker looks whether the job is complete
        delete(self, path)

    monkeypatch.setattr(Worker, "others", late_others)
    monkeypatch.setattr(FolderStorage, "delete", late_delete)
    job = SharedJob(str(tmp_path), rows=60, rows_per_shard=4, step_s=0.02)
    messages = _messages(in_threads([job] * 2))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert written.is_set() and len(completed) == 1
    assert sum("this worker has computed" in message for message in messages) == 1
    assert metrics["status"] == "complete" and len(metrics["attempts"]) == 2


@pytest.mark.thorough
def test_who_deleted_the_leases_and_died_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: list[JobResult]
) -> None:
    """It was killed before it had kept its figures, over which another worker had written."""
    save, saved = Metrics.save, itertools.count()

    def killed(self: Metrics, status: Status) -> None:
        if status == "complete" and not next(saved):
            for name in _WORKERS:
                FolderStorage(tmp_path).delete(tmp_path / name)
            raise JobError("killed")
        save(self, status)

    monkeypatch.setattr(Metrics, "save", killed)
    job = SharedJob(str(tmp_path), rows=60, rows_per_shard=4, step_s=0.02, stale_after=1.0)
    results = in_threads([job] * 2)
    assert sorted(type(result).__name__ for result in results) == ["JobError", "JobResult"]
    assert len(completed) == 1
    assert json.loads((tmp_path / "metrics.json").read_text())["status"] == "complete"


class _Paused:
    """The first worker that comes to a function stands still there, without a heartbeat, until
    `is_over`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self._beat = monkeypatch, Heartbeat.beat
        self._heartbeats: dict[int, Heartbeat] = {}
        self._paused: list[Heartbeat] = []
        monkeypatch.setattr(Heartbeat, "beat", lambda heartbeat: self._beat_unless(heartbeat))

    def _beat_unless(self, heartbeat: Heartbeat) -> None:
        self._heartbeats[threading.get_ident()] = heartbeat
        if heartbeat not in self._paused:
            self._beat(heartbeat)

    def at(self, module: ModuleType, name: str, is_over: Callable[[], bool]) -> None:
        function = getattr(module, name)

        def late(*args: Any) -> Any:
            if not self._paused:
                self._paused.append(self._heartbeats[threading.get_ident()])
                _wait_until(is_over)
            return function(*args)

        self._patch.setattr(module, name, late)


def test_who_was_paused_while_it_completed_the_job_leaves_it_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: list[JobResult]
) -> None:
    leases = tmp_path / "leases"
    paused = _Paused(monkeypatch)
    paused.at(batchgen.jobs.run.run_job, "grade_and_score", lambda: not leases.exists())
    job = SharedJob(str(tmp_path), rows=60, rows_per_shard=4, step_s=0.02, stale_after=1.0)
    messages = _messages(in_threads([job] * 2))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(completed) == 2 and len(metrics["attempts"]) == 2
    assert sum("this worker has computed" in message for message in messages) == 1


def test_who_was_paused_and_completes_the_job_again_keeps_the_others_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: list[JobResult]
) -> None:
    """It had seen that the job was not complete. When it goes on, another has completed it and
    deleted what the workers told each other."""
    paused = _Paused(monkeypatch)
    paused.at(batchgen.jobs.run.job_end, "_count_shards", lambda: len(completed) == 1)
    job = SharedJob(str(tmp_path), rows=60, rows_per_shard=4, step_s=0.02, stale_after=1.0)
    _messages(in_threads([job] * 2))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(completed) == 2 and metrics["status"] == "complete"
    assert len(metrics["attempts"]) == 2
    assert sum(attempt["rows"] for attempt in metrics["attempts"]) >= metrics["rows"]
