"""Several workers in one folder: the data are those of one, whoever comes, goes and dies."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.inputs.model.job_engine import Engine
from batchgen.jobs.generation.worker import Worker
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult, completed_elsewhere
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.folder.job_summary import JobSummary, tokens_per_s
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.lease_files import lease_name
from batchgen.storage.leases.lease_table import Lease
from batchgen.storage.leases.store_operations import Create
from batchgen.storage.shards.checked_file import damaged
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.errors import ConfigError, JobError
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.forked import fork_server
from tests.support.jobs.shared_jobs import SharedJob, in_threads


def _data(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}


def _metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


@pytest.fixture
def whole(tmp_path: Path) -> SharedJob:
    """A job that one worker has run undisturbed."""
    job = SharedJob(str(tmp_path / "whole"), rows=150, rows_per_shard=8)
    job.run()
    return job


class _Together(SharedJob):
    """A job of four workers of which none computes before all have joined, and their engines."""

    gate = threading.Barrier(4)
    engines: ClassVar[list[FakeEngine]] = []

    def parts(self) -> ResolvedJob:
        def build() -> Engine:
            self.gate.wait(100)
            self.engines.append(FakeEngine(self))
            return self.engines[-1]

        return replace(super().parts(), port=build)


def test_four_workers_make_the_data_of_one(whole: SharedJob, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    job = _Together(str(out), rows=whole.rows, rows_per_shard=8, log=str(log), step_s=0.01)
    results = in_threads([job] * 4)
    assert [r.exit_code if isinstance(r, JobResult) else r for r in results] == [3] * 4
    assert _data(out) == _data(Path(whole.out))
    metrics, alone = _metrics(out), _metrics(Path(whole.out))
    for key in ("status", "rows", "error_rows", "finish_reasons", "generated_tokens"):
        assert metrics[key] == alone[key], key
    assert [attempt["worker"] for attempt in metrics["attempts"]] == sorted(
        attempt["worker"] for attempt in metrics["attempts"]
    )
    assert len(metrics["attempts"]) == 4 and len({a["session"] for a in metrics["attempts"]}) == 1
    assert sum(engine.stats.steps > 0 for engine in job.engines) > 1
    computed = Counter(log.read_text().split())
    # Copies of the last shards compute some rows twice, and no more than they have.
    assert computed.total() - len(computed) <= 4 * 8 * 2 * 2
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock", "README.md", "config.yaml", "cost", "data", "manifest.json", "metrics.json",
    ]  # fmt: skip
    messages = [r.message for r in results if isinstance(r, JobResult)]
    assert sum("this worker has computed" in message for message in messages) == 3
    assert all("answers        " in message for message in messages)
    # The summary tells of all workers, as metrics.json does, and not of the last one alone.
    (told,) = (message for message in messages if "this worker has computed" not in message)
    speed = sum(map(tokens_per_s, metrics["attempts"]))
    assert f"{speed:,.1f} tokens/s" in told and f"{JobSummary.of(metrics).cost}\n" in told


def test_before_any_worker_has_written_metrics_the_job_is_not_complete(tmp_path: Path) -> None:
    assert completed_elsewhere(FolderStorage(tmp_path), SharedJob(str(tmp_path)).parts(), 0) is None


def test_a_worker_whose_engine_fails_leaves_its_rows_to_the_others(
    whole: SharedJob, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = replace(whole, out=str(out), step_s=0.005)
    results = in_threads([job, replace(job, fail_at_step=2), job])
    assert sum(isinstance(result, RuntimeError) for result in results) == 1
    assert _data(out) == _data(Path(whole.out))
    statuses = Counter(attempt["status"] for attempt in _metrics(out)["attempts"])
    assert statuses["failed"] == 1


def test_another_job_may_not_join(whole: SharedJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = replace(whole, out=str(out), step_s=0.01)
    first = threading.Thread(target=job.run)
    first.start()
    while not list(JobFolderReader(out).rows()) if (out / "manifest.json").exists() else True:
        time.sleep(0.01)
    for other, says in (
        (replace(job, samples=3), "sampling.n: 2 → 3"),
        (replace(job, temperature=0.5), "sampling.temperature: 1.0 → 0.5"),
        (replace(job, temperature=0.5, overwrite=True), "sampling.temperature: 1.0 → 0.5"),
        (replace(job, retry_errors=True), "output.retry_errors=true: the workers that run"),
    ):
        with pytest.raises(ConfigError, match=says):
            other.run()
    first.join()
    assert _data(out) == _data(Path(whole.out))


def test_first_rows_that_all_fail_end_every_worker(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def step(self) -> list[RequestOutput]:
            raise RuntimeError("the device fell off the bus")

    job = SharedJob(str(tmp_path), rows=80, rows_per_shard=4, bad=False)
    results: list[Exception] = []

    def run() -> None:
        try:
            execute_job(job.config(), replace(job.parts(), port=lambda: Broken(job)))
        except RuntimeError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3 and not list(JobFolderReader(tmp_path).rows())
    assert job.run().exit_code == 0


class _Poisoned(FakeEngine):
    """An engine that ends with the row of index 40."""

    def step(self) -> list[RequestOutput]:
        if any(r.prompt[0] == 40 for r in list(self._running.values())[: self.job.max_num_seqs]):
            raise RuntimeError("row 40 was too much")
        return super().step()


def test_a_shard_that_ends_workers_is_put_in_quarantine(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = SharedJob(str(out), rows=64, rows_per_shard=8, samples=1, bad=False, step_s=0.02)
    ends: list[str] = []

    def run(build: type[FakeEngine]) -> None:
        try:
            execute_job(job.config(), replace(job.parts(), port=lambda: build(job)))
        except (RuntimeError, JobError) as error:
            ends.append(str(error))

    threads = [threading.Thread(target=run, args=(_Poisoned,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum("row 40 was too much" in end for end in ends) == 3
    (quarantine,) = (end for end in ends if "quarantine" in end)
    assert "shard 5 crashed the workers" in quarantine and "id40" in quarantine
    done = {row["row_index"] for row in JobFolderReader(out).rows(["row_index"])}
    assert done >= {i for i in range(64) if i // 8 != 5} and 40 not in done
    # With what ended the workers mended, the same command computes the rest.
    assert job.run().exit_code == 0
    whole = replace(job, out=str(tmp_path / "whole"))
    whole.run()
    assert _data(out) == _data(Path(whole.out))


def _run(job: FakeJob) -> None:
    os._exit(job.run().exit_code)


@pytest.mark.thorough
def test_killed_and_paused_workers(whole: SharedJob, tmp_path: Path) -> None:
    """One worker is killed and one is paused for longer than it takes to be given up."""
    out = tmp_path / "out"
    job = replace(whole, out=str(out), step_s=0.02, stale_after=1.0)
    context = fork_server()
    processes = [context.Process(target=_run, args=(job,)) for _ in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    while len(list((out / "workers").glob("*.json")) if out.exists() else []) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    processes[0].kill()
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGSTOP)
    processes[2].join(100)
    assert processes[2].exitcode == 3
    assert _data(out) == _data(Path(whole.out))
    os.kill(processes[1].pid, signal.SIGCONT)  # awakes behind the end of the job
    processes[1].join(60)
    assert processes[1].exitcode == 3
    assert _data(out) == _data(Path(whole.out))
    assert _metrics(out)["status"] == "complete"
    assert not (out / "leases").exists() and not (out / "journal").exists()


def test_who_waits_for_another_takes_over_when_that_one_fails(tmp_path: Path) -> None:
    job = SharedJob(str(tmp_path), rows=40, rows_per_shard=4, step_s=0.01)
    results: list[JobResult] = []
    thread = threading.Thread(target=lambda: results.append(job.run()))
    thread.start()
    while not (tmp_path / "leases/00000.e001.json").exists():
        time.sleep(0.01)
    other = Worker(tmp_path, job.workers, 1, joins=True)
    # A shard that has ended a worker is not copied: who has nothing else to do waits.
    assert other.store.do(Create(lease_name(9, 1), Lease(other.number, (99,)).encoded()))
    while len(list((tmp_path / "data").iterdir())) < 9:
        time.sleep(0.01)
    thread.join(0.5)
    assert thread.is_alive()
    other.end("failed")
    thread.join(10)
    assert [result.exit_code for result in results] == [3]


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), "stopped"),
        (JobError("cannot write x: No space left on device"), "stopped"),
        (damaged(Path("data/part-00000.parquet"), "so it is"), "failed"),
        (RuntimeError("the GPU fell off the bus"), "failed"),
    ],
)
def test_a_shard_is_not_blamed_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, how: str
) -> None:
    def fail(self: OutputWriter, rows: object) -> None:
        raise error

    monkeypatch.setattr(OutputWriter, "write", fail)
    with pytest.raises(type(error)):
        SharedJob(str(tmp_path), rows=20).run()
    assert json.loads((tmp_path / "workers/0001.json").read_bytes())["ended"] == how
