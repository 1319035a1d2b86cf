"""Several jobs in one engine: each writes what it writes alone, however they take turns."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_jobs import SharingJob, run_jobs
from batchgen.storage.costs.cost_files import shard_costs
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.request_id import RequestId
from tests.support.jobs.fake_job import FakeEngine, FakeJob


def data(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(out, "data").iterdir())}


def shared(jobs: list[FakeJob], engine: Any = None) -> dict[str, JobResult]:
    given = {Path(job.out).name: SharingJob(job.config(), job.parts()) for job in jobs}
    return run_jobs(given, lambda: engine or FakeEngine(jobs[0]))


@pytest.fixture
def jobs(tmp_path: Path) -> list[FakeJob]:
    long = FakeJob(str(tmp_path / "long"), rows=70, straggler=5)
    return [long, FakeJob(str(tmp_path / "short"), rows=30, samples=3, rows_per_shard=7)]


def test_jobs_in_one_engine_write_what_they_write_alone(
    tmp_path: Path, jobs: list[FakeJob]
) -> None:
    log = str(tmp_path / "log")
    engine = FakeEngine(replace(jobs[0], log=log))
    results = shared(jobs, engine)
    assert {name: result.exit_code for name, result in results.items()} == {"short": 3, "long": 3}
    assert engine.closed
    for job in jobs:
        alone = replace(job, out=job.out + ".alone")
        assert alone.run().exit_code == 3
        assert data(job.out) == data(alone.out)
        costs = [FolderStorage(Path(out)) for out in (job.out, alone.out)]
        assert shard_costs(costs[0], 1) == shard_costs(costs[1], 1) != {}
    names = [line[0] for line in Path(log).read_text().splitlines()[::2]]
    assert names != sorted(names) and "s" in names[: len(names) // 2]


def test_a_signal_stops_all_jobs_and_they_go_on(tmp_path: Path, jobs: list[FakeJob]) -> None:
    class Stopping(FakeEngine):
        def step(self) -> list[Any]:
            if self.stats.steps == 6:
                signal.raise_signal(signal.SIGTERM)
            return super().step()

    log = str(tmp_path / "log")
    results = shared(jobs, Stopping(replace(jobs[0], log=log)))
    assert {result.exit_code for result in results.values()} == {128 + signal.SIGTERM}
    before = len(Path(log).read_text().splitlines()) // 2
    shared(jobs, FakeEngine(replace(jobs[0], log=log)))
    computed = len(Path(log).read_text().splitlines()) // 2
    assert 0 < before < computed
    good = sum(
        job.samples * sum(bool(i % 13) and bool(i % 17) for i in range(job.rows)) for job in jobs
    )
    assert computed == good  # nothing was computed twice: all that had finished was written


def test_an_error_of_one_job_stops_the_others_cleanly(jobs: list[FakeJob]) -> None:
    broken = jobs[0].parts()

    class Source(type(broken.source)):  # type: ignore[misc]
        def passthrough(self, row: Any) -> dict[str, Any]:
            if row.index == 20:
                raise OSError("the disk is away")
            return dict(row.fields)

    source = Source(70)
    given = {
        "long": SharingJob(jobs[0].config(), replace(broken, source=source)),
        "short": SharingJob(jobs[1].config(), jobs[1].parts()),
    }
    engine = FakeEngine(jobs[0])
    with pytest.raises(OSError, match="the disk is away"):
        run_jobs(given, lambda: engine)
    assert engine.closed
    assert '"stopped"' in Path(jobs[1].out, "metrics.json").read_text()
    assert '"failed"' in Path(jobs[0].out, "metrics.json").read_text()
    results = shared(jobs)
    assert {result.exit_code for result in results.values()} == {3}


def test_a_job_that_others_complete_takes_its_rows_out_of_the_engine(tmp_path: Path) -> None:
    from batchgen.jobs.run.shared_engine import SharedEngine

    job = FakeJob(str(tmp_path), bad=False)
    engine = SharedEngine(lambda: FakeEngine(job))
    one, two = engine.port("one"), engine.port("two")
    params = job.config().params
    for port in (one, two):
        port.add_request(RequestId(port.name, 7, 0), [7, 8, 2], replace(params, seed=4))
    assert engine.in_flight == 2 and one.num_running == 1
    one.close()
    assert engine.in_flight == 1 and one.num_running == 0
    while engine.in_flight:
        engine.step()
    assert one.step() == [] and [output.request_id for output in two.step()] == [
        RequestId("two", 7, 0)
    ]
