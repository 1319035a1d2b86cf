"""Runs several jobs beside each other in one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace

from batchgen.config.job_config import JobConfig
from batchgen.jobs.job_end import JobResult
from batchgen.jobs.job_parts import JobParts
from batchgen.jobs.run_job import job_turns
from batchgen.jobs.turns import Turns
from batchgen.sharing.shared_engine import DivisibleEngine, SharedEngine
from batchgen.util.signals import JobStopped, StopSignals


@dataclass(frozen=True)
class SharingJob:
    """A job that runs in the engine of others; its own `parts.build_engine` is not called."""

    config: JobConfig
    parts: JobParts


def run_jobs(
    jobs: Mapping[str, SharingJob],
    build_engine: Callable[[], DivisibleEngine],
    ended: Callable[[str, JobResult], None] = lambda *_: None,
) -> dict[str, JobResult]:
    """Run jobs, by their names, to their ends or until a signal; returns how each ended.

    All folders are opened before the weights load. A row's next job is a request like any other:
    the engine's steps run whatever rows the jobs have at that time. `ended` is told of each job
    when it ends. An error of one job stops the others cleanly and is raised; a budget that is spent
    stops them, too, and they are not among the results.

    Raises:
        ConfigError, JobError, Exception: as of `run_job`, by the first job that raises one.
    """
    shared = SharedEngine(build_engine)
    with StopSignals() as signals, closing(shared), ExitStack() as stack:
        for job in jobs.values():
            stack.callback(job.parts.close)
        running = {
            name: job_turns(
                job.config,
                replace(job.parts, build_engine=lambda name=name: shared.port(name)),  # type: ignore[misc]
                signals,
            )
            for name, job in jobs.items()
        }
        try:
            return _run(running, shared, ended)
        except BaseException:
            _stop_all(running)
            raise


def _run(
    running: dict[str, Turns[JobResult]],
    shared: SharedEngine,
    ended: Callable[[str, JobResult], None],
) -> dict[str, JobResult]:
    """Give each job its turn, and then the engine, until no job is left. `running` loses the jobs
    that have ended."""
    results: dict[str, JobResult] = {}
    while running:
        waits: list[float] = []
        for name, turns in list(running.items()):
            try:
                waits.append(next(turns))
            except StopIteration as end:
                del running[name]
                results[name] = end.value
                ended(name, end.value)
                if end.value.is_spent:
                    _stop_all(running)
                    return results
            except BaseException:
                del running[name]
                raise
        if shared.in_flight:
            shared.step()
        elif wait := min(waits, default=0.0):
            time.sleep(wait)
    return results


def _stop_all(running: dict[str, Turns[JobResult]]) -> None:
    """End jobs as a signal would, and keep their rows. What they raise is of no interest beside the
    reason for which they end."""
    for turns in running.values():
        with suppress(StopIteration, Exception, JobStopped):
            turns.throw(JobStopped())
    running.clear()
