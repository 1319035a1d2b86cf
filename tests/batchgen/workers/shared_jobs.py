"""Fake jobs that several workers run beside each other, as threads of a test."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fake_job import FakeJob

from batchgen.config import JobConfig, WorkersConfig
from batchgen.job import JobResult

FAST = WorkersConfig(heartbeat=0.05, stale_after=0.5)


@dataclass(frozen=True)
class SharedJob(FakeJob):
    """A fake job whose workers notice each other within a second."""

    def config(self) -> JobConfig:
        return replace(super().config(), workers=FAST)


def in_threads(jobs: Sequence[FakeJob]) -> list[JobResult | Exception]:
    """Run jobs as workers beside each other, and return how each ended."""
    found: list[JobResult | Exception] = []

    def run(job: FakeJob) -> None:
        try:
            found.append(job.run())
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
