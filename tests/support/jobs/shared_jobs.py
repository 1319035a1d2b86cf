"""Fake jobs that several workers run beside each other, as threads of a test."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.inputs.model.job_engine import Engine
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from tests.support.jobs.fake_job import FakeJob


@dataclass(frozen=True)
class SharedJob(FakeJob):
    """A fake job whose workers notice soon what the others do.

    Attributes:
        stale_after: workers.stale_after; long enough for a machine that is busy with other things,
            unless a test is about workers that stand still.
    """

    stale_after: float = 30.0

    @property
    def workers(self) -> WorkersConfig:
        return WorkersConfig(heartbeat=0.05, stale_after=self.stale_after)

    def config(self) -> JobConfig:
        return replace(super().config(), workers=self.workers)


def in_threads(jobs: Sequence[FakeJob]) -> list[JobResult | Exception]:
    """Run jobs as workers beside each other, and return how each ended.

    None computes a row before all of them have joined.
    """
    found: list[JobResult | Exception] = []
    joined = threading.Barrier(len(jobs))

    def run(job: FakeJob) -> None:
        parts = job.parts()

        def build_engine() -> Engine:
            joined.wait(60)
            return parts.build_engine()

        try:
            found.append(execute_job(job.config(), replace(parts, port=build_engine)))
        except Exception as error:
            found.append(error)
            traceback.print_exc()

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(found) == len(jobs)
    return found
