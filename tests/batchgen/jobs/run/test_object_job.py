"""Jobs in an object store in memory: the rows of a job in a folder, whatever requests fail."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.lease_files import SESSION, worker_name
from batchgen.storage.leases.process_identity import machine, process_identity
from batchgen.storage.stores.object_lock import ObjectLock
from batchgen.storage.stores.object_storage import ObjectStorage
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError, OpenedAnew
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.object_files import FaultyFiles, at_random, use
from tests.support.jobs.shared_jobs import in_threads

URL = "s3://jobs/a"
GRADE = (
    StepConfig(target="batchgen.grading.extract.Extract", options={}),
    StepConfig(
        target="batchgen.grading.grade.Grade", options={"method": "exact", "target": "number"}
    ),
)
FAST = WorkersConfig(heartbeat=0.05, stale_after=0.5)


@dataclass(frozen=True)
class ObjectJob(FakeJob):
    """A fake job whose workers notice each other within a second."""

    post: tuple[StepConfig, ...] = ()

    def config(self) -> JobConfig:
        return replace(super().config(), workers=FAST, post=self.post)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    found = FaultyFiles()
    use(monkeypatch, found)
    return found


def _data(files: FaultyFiles) -> dict[str, bytes]:
    start = "jobs/a/data/"
    return {
        path[len(start) :]: content
        for path, content in sorted(files.store.items())
        if path.startswith(start)
    }


def _whole(tmp_path: Path, job: FakeJob) -> dict[str, bytes]:
    """The data of the same job in a folder, computed without a disturbance."""
    replace(job, out=str(tmp_path / "whole"), overwrite=False, retry_errors=False).run()
    return {p.name: p.read_bytes() for p in sorted((tmp_path / "whole/data").iterdir())}


def _top(files: FaultyFiles) -> set[str]:
    return {path.removeprefix("jobs/a/").partition("/")[0] for path in files.store}


def _metrics(files: FaultyFiles) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files.store["jobs/a/metrics.json"])
    return found


def test_one_worker(files: FaultyFiles, tmp_path: Path) -> None:
    job = ObjectJob(URL, rows=60, report=True)
    result = job.run()
    assert result.exit_code == 3 and f"{URL}/report.html" in result.message
    assert _data(files) == _whole(tmp_path, job)
    assert _top(files) == {
        *(".locks", "README.md", "config.yaml", "cost", "data", "manifest.json", "metrics.json"),
        "report.html",
    }
    card = files.store["jobs/a/README.md"].decode()
    assert f"'{URL}/data" in card or f'"{URL}' in card
    before = dict(files.store)
    again = job.run()
    assert "complete already" in again.message
    changed = {path for path in files.store if files.store[path] is not before.get(path)}
    assert changed <= {"jobs/a/.locks/0002.json", "jobs/a/config.yaml"}


def test_a_job_that_failed_goes_on(files: FaultyFiles, tmp_path: Path) -> None:
    """It fails in each of some steps, with rows in journals; no row is computed twice."""
    log = tmp_path / "log"
    job = ObjectJob(URL, rows=60, log=str(log))
    for step in (3, 9, 20):
        with pytest.raises(RuntimeError) as error:
            replace(job, fail_at_step=step).run()
        assert any("Finished rows are safe" in note for note in error.value.__notes__)
        assert _metrics(files)["status"] == "failed"
    assert job.run().exit_code == 3
    computed = log.read_text().split()
    assert len(computed) == len(set(computed)) and len(_metrics(files)["attempts"]) == 4
    log.unlink()
    assert _data(files) == _whole(tmp_path, job)


def test_a_machine_that_is_lost(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent stays; what was not is computed again."""

    class Lost(BaseException):
        pass

    class Engine(FakeEngine):
        def step(self) -> Any:
            if self.stats.steps == 25:
                monkeypatch.setattr(ObjectStorage, "flush", lambda *_: None)
                raise Lost
            return super().step()

    job = ObjectJob(URL, rows=60)
    with pytest.raises(Lost):
        execute_job(job.config(), replace(job.parts(), port=lambda: Engine(job)))
    monkeypatch.undo()
    use(monkeypatch, files)
    storage = open_storage(URL, FAST)
    safe = len(list(JobFolderReader(storage.path, storage).rows(["row_index"])))
    assert 0 < safe < 120
    job.run()
    assert _metrics(files)["attempts"][1]["rows_resumed"] == safe
    assert _data(files) == _whole(tmp_path, job)


def test_a_copy_of_an_unfinished_job_goes_on_in_a_folder(
    files: FaultyFiles, tmp_path: Path
) -> None:
    job = ObjectJob(URL, rows=60)
    with pytest.raises(RuntimeError):
        replace(job, fail_at_step=20).run()
    copy = tmp_path / "copy"
    for path, file in files.store.items():
        to = copy / path.removeprefix("jobs/a/")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(file)
    safe = len(list(JobFolderReader(copy).rows(["row_index"])))
    assert safe > 0 and any(".2.journal" in p.name for p in (copy / "journal").iterdir())
    replace(job, out=str(copy)).run()
    resumed = json.loads((copy / "metrics.json").read_text())["attempts"][1]["rows_resumed"]
    assert resumed == safe
    data = {p.name: p.read_bytes() for p in sorted((copy / "data").iterdir())}
    assert data == _whole(tmp_path, job)


def test_a_job_grows_and_computes_errors_again(files: FaultyFiles, tmp_path: Path) -> None:
    ObjectJob(URL, rows=60, limit=20, samples=1, bad=True).run()
    ObjectJob(URL, rows=60, limit=45, samples=2, bad=True).run()
    ObjectJob(URL, rows=60, samples=2, bad=False, retry_errors=True).run()
    metrics = _metrics(files)
    assert metrics["status"] == "complete" and metrics["error_rows"] == 0
    assert _data(files) == _whole(tmp_path, ObjectJob(URL, rows=60, bad=False))


def test_another_job_is_refused_and_overwrites_only_if_it_is_told_to(files: FaultyFiles) -> None:
    ObjectJob(URL, rows=20).run()
    before = _data(files)
    other = ObjectJob(URL, rows=20, temperature=0.5)
    with pytest.raises(ConfigError, match="holds the output of a different job"):
        other.run()
    assert _data(files) == before
    assert replace(other, overwrite=True).run().exit_code == 3
    assert len(_metrics(files)["attempts"]) == 1
    files.put("jobs/b/thesis.tex", b"x")
    with pytest.raises(ConfigError, match=r"not belong to a batchgen job \(thesis\.tex\)"):
        ObjectJob("s3://jobs/b", rows=20).run()


def test_grades_and_scores(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = ObjectJob(URL, rows=20, post=GRADE).run()
    assert "score" in result.message
    assert {path for path in files.store if "/grades/" in path} == {
        "jobs/a/grades/part-00000.parquet", "jobs/a/grades/part-00001.parquet",
    }  # fmt: skip
    assert _metrics(files)["score"] and not list(tmp_path.iterdir())


def test_names_among_the_temporary_files_are_anybodys(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of processes that are gone are deleted; other users may make names like theirs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = f"batchgen-{hashlib.sha256(machine().encode()).hexdigest()[:8]}-"
    gone = tmp_path / f"{here}{2**22 + 1}-1-x"
    odd = [tmp_path / f"{here}{pid}-1-x" for pid in ("²", "x", "", "٣" * 9, "-1")]
    for path in (gone, *odd, tmp_path / f"{here}{'9' * 200}-1-x"):
        path.mkdir()
    assert ObjectJob(URL, rows=3).run().exit_code == 3
    assert not gone.exists() and all(path.exists() for path in odd)


def test_a_graded_job_grows(files: FaultyFiles) -> None:
    """Shards that were published anew are graded anew; nothing grades beside the job."""
    for limit in (5, 15):
        ObjectJob(URL, rows=20, limit=limit, samples=1, post=GRADE).run()
        grades = files.store["jobs/a/grades/part-00000.parquet"]
        assert pq.read_metadata(pa.BufferReader(grades)).num_rows == limit
    assert _metrics(files)["score"]


def test_who_joins_when_the_job_is_complete_says_how_it_ended(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was granted the lock as the workers lived, who have completed the job since."""
    job = ObjectJob(URL, rows=20)
    job.run()
    before = dict(files.store)

    def join(self: ObjectLock, until: float) -> None:
        self._number = self._newest()

    monkeypatch.setattr(ObjectLock, "_take", join)
    result = job.run()
    assert result.exit_code == 3
    said = "The job is complete; this worker has computed 0 of its answers."
    assert result.message.startswith(said)
    assert f"output            {URL}" in result.message
    assert files.store == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_several_workers(files: FaultyFiles, tmp_path: Path, rate: float) -> None:
    job = ObjectJob(URL, rows=100, step_s=0.005)
    files.fault = at_random(0, rate)
    results = in_threads([job] * 3)
    files.fault = lambda: None
    assert [r.exit_code if isinstance(r, JobResult) else r for r in results] == [3] * 3
    assert _data(files) == _whole(tmp_path, job)
    metrics = _metrics(files)
    assert metrics["status"] == "complete" and metrics["rows"] == 200
    assert not _top(files) & {"journal", "leases", "differing"}


def test_a_worker_that_died_is_followed_at_once_on_its_machine_and_later_on_others(
    files: FaultyFiles, tmp_path: Path
) -> None:
    job = ObjectJob(URL, rows=60)
    with pytest.raises(RuntimeError):
        replace(job, fail_at_step=9).run()
    name = f"jobs/a/{worker_name(1)}"
    beat = json.loads(files.store[name])
    files.put(name, json.dumps({**beat, "ended": None, "process_started": "1"}).encode())
    assert job.run().exit_code == 3
    with pytest.raises(RuntimeError):
        replace(job, rows=80, fail_at_step=5).run()
    name = max(path for path in files.store if path.startswith("jobs/a/workers/"))
    beat = json.loads(files.store[name])
    files.put(name, json.dumps({**beat, "ended": None, "machine": "another"}).encode())
    assert replace(job, rows=80).run().exit_code == 3
    assert _data(files) == _whole(tmp_path, replace(job, rows=80))


def test_a_worker_whose_job_is_opened_anew_joins_again(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a few times: that it happens again and again has another cause, which is said."""
    calls, confirm = list[int](), ObjectLock.confirm
    times = 3

    def opened_anew(lock: ObjectLock) -> None:
        calls.append(1)
        if len(calls) <= times:
            raise OpenedAnew("another process has just opened the job")
        confirm(lock)

    monkeypatch.setattr(ObjectLock, "confirm", opened_anew)
    job = ObjectJob(URL, rows=40)
    assert job.run().exit_code == 3 and len(calls) > times
    assert _data(files) == _whole(tmp_path, job)
    times += len(calls) + 10
    with pytest.raises(OpenedAnew, match="has just opened"):
        replace(job, rows=60).run()
    workers = [json.loads(b) for n, b in files.store.items() if n.startswith("jobs/a/workers/")]
    assert all(beat["ended"] for beat in workers)


def test_two_who_open_the_folder_at_once(files: FaultyFiles) -> None:
    """One holds the lock alone; who was killed in that moment is waited for and followed."""
    config = WorkersConfig(heartbeat=0.02, stale_after=0.2)
    one, two = (open_storage(URL, config) for _ in range(2))
    first = one.lock(0.0)
    assert first.exclusive
    with pytest.raises(ConfigError, match=r"is in use by another job \(pid"):
        two.lock(0.0)
    first.__exit__()
    second = two.lock(0.0)
    assert second.exclusive and [p for p in files.store if ".locks" in p] == [
        "jobs/a/.locks/0002.json"
    ]
    with pytest.raises(JobError, match="has just opened the job"):
        first.confirm()
    second.confirm()
    second.share()
    beat = {**process_identity(), "worker": 1, "beats": 1, "ended": None}
    files.put("jobs/a/workers/0001.json", json.dumps(beat).encode())
    assert not one.lock(0.0).exclusive  # it joins the worker that lives
    files.put("jobs/a/workers/0001.json", json.dumps({**beat, "ended": "stopped"}).encode())
    third = one.lock(0.0)
    assert third.exclusive
    # A process of another machine that holds it alone and beats no more.
    third.__exit__()
    name = "jobs/a/.locks/0003.json"
    held = json.loads(files.store[name])
    files.put(name, json.dumps({**held, "ended": None, "machine": "another"}).encode())
    assert two.lock(0.0).exclusive


def test_what_is_wrong_with_a_store_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"output.dir=gs://b/x: give a folder, or s3://BUCKET"):
        ObjectJob("gs://b/x").run()
    with pytest.raises(ConfigError, match=r"output.dir=s3://: give a folder"):
        ObjectJob("s3://").run()

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"the package obstore.*: pip install 'batchgen\[s3"):
        ObjectJob("s3://b/x").run()


def test_what_is_sent_while_others_complete_the_job_is_deleted_again(files: FaultyFiles) -> None:
    storage = open_storage(URL, FAST)
    assert isinstance(storage, ObjectStorage)
    store = storage.store("", joins=False)
    store.create(SESSION, b"one")
    store.fence(b"one")
    path = storage.path / "journal/part-00000.0001.journal"
    storage.make_folder(path.parent)
    path.write_bytes(b"rows")
    storage.flush([path], force=True)
    assert "jobs/a/journal/part-00000.0001.journal" in files.store

    def completed_after_the_put() -> None:
        if files.requests.get("overwrite", 0) > sent:
            files.fault = lambda: None
            store.delete([SESSION])

    sent = files.requests["overwrite"]
    files.fault = completed_after_the_put
    storage.flush([path], force=True)
    assert "jobs/a/journal/part-00000.0001.journal" not in files.store
    storage.close()
