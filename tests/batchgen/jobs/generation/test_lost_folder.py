"""A job whose folder is deleted or replaced under it stops soon, and claims nothing of its rows."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.util.errors import FolderLost, JobError
from tests.batchgen.jobs.run.test_object_job import ObjectJob
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.shared_jobs import SharedJob


def _while_it_runs(job: FakeJob, done: Callable[[], bool], act: Callable[[], None]) -> Exception:
    """Do something to a job's folder once a condition holds, and return how the job ended."""
    found: list[Exception] = []

    def run() -> None:
        try:
            job.run()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 60
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
    act()
    thread.join(30)
    assert not thread.is_alive(), "it goes on"
    assert found, "it ended as if nothing had happened"
    return found[0]


def _job(folder: Path) -> SharedJob:
    """Takes minutes, unless it is stopped."""
    return SharedJob(str(folder), rows=20_000, step_s=0.02, rows_per_shard=8)


def _has_shards(folder: Path) -> Callable[[], bool]:
    return lambda: (folder / "data").is_dir() and any((folder / "data").iterdir())


def test_a_folder_that_is_deleted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    error = _while_it_runs(
        _job(out), _has_shards(out), lambda: shutil.rmtree(out, ignore_errors=True)
    )
    assert isinstance(error, FolderLost) and not getattr(error, "__notes__", [])
    assert str(error).startswith(f"output.dir={out} was deleted or replaced while the job ran")
    assert not out.exists()


def test_a_folder_that_another_job_has_taken(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    SharedJob(str(other), rows=4).run()
    for name in ("leases", "workers", "journal"):
        (other / name).mkdir()

    def replace() -> None:
        out.rename(tmp_path / "gone")
        other.rename(out)

    before = {path.name for path in other.iterdir()}
    error = _while_it_runs(_job(out), _has_shards(out), replace)
    assert isinstance(error, FolderLost) and f"output.dir={out} was deleted or replaced" in str(
        error
    )
    assert {path.name for path in out.iterdir()} == before
    assert list((out / "journal").iterdir()) == []


def test_the_objects_of_a_job_that_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles()
    use(monkeypatch, files)
    job = ObjectJob("s3://jobs/a", rows=20_000, step_s=0.02, rows_per_shard=8)
    error = _while_it_runs(
        job, lambda: any("/data/" in path for path in files.store), files.store.clear
    )
    assert isinstance(error, FolderLost) and "s3://jobs/a was deleted" in str(error)


def test_a_lock_is_of_the_folder_that_was_locked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with FolderLock(tmp_path / "a/.lock") as lock:
        lock.confirm()
        (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(FolderLost, match="was deleted or replaced"):
            lock.confirm()
        (tmp_path / "a").mkdir()
        (tmp_path / "a/manifest.json").touch()
        (tmp_path / "a/.lock").touch()
        with pytest.raises(JobError, match="was deleted or replaced"):
            lock.confirm()
