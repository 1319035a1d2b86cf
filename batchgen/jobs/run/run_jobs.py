"""Runs several jobs at the same time in one engine. Pipelines call `run_jobs` for steps that use
the same model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial

from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.generation.turns import Turns
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import job_turns
from batchgen.jobs.run.shared_engine import DivisibleEngine, SharedEngine
from batchgen.util.signals import JobStopped, StopSignals


@dataclass(frozen=True)
class SharingJob:
    """A job that shares an engine with others.

    Attributes:
        config, parts: the job.
        around: wraps the job's turns, and may do more before and after them.
    """

    config: JobConfig
    parts: ResolvedJob
    around: Callable[[Turns[JobResult]], Turns[JobResult]] = lambda turns: turns


def run_jobs(
    jobs: Mapping[str, SharingJob],
    build_engine: Callable[[], DivisibleEngine],
    ended: Callable[[str, JobResult], Mapping[str, SharingJob]] = lambda *_: {},
) -> dict[str, JobResult]:
    """Run jobs, by their names, to their ends or until a signal; returns how each ended.

    All folders are opened before the weights load. The rows of all jobs are requests of one engine,
    whose steps batch them together.

    Args:
        build_engine: builds the engine when the first job needs it.
        ended: is called with each job that was completed, and returns further jobs to run in the
            same engine.

    Returns:
        The result of each job. If a budget is spent, the jobs that it stops have no result.

    Raises:
        ConfigError, JobError, Exception: the first error of a job, see `execute_job`. The other
            jobs are stopped cleanly.
    """
    with StopSignals() as signals, ExitStack() as stack:
        shared = stack.enter_context(closing(SharedEngine(build_engine)))
        running: dict[str, Turns[JobResult]] = {}

        def begin(jobs: Mapping[str, SharingJob]) -> None:
            for name, job in jobs.items():
                stack.callback(job.parts.close)
                parts = replace(job.parts, name=name, port=partial(shared.port, name))
                running[name] = job.around(job_turns(job.config, parts, signals))

        results: dict[str, JobResult] = {}
        try:
            begin(jobs)
            while running:
                for name, result in _round(running, shared):
                    results[name] = result
                    if result.is_spent:
                        _stop_all(running)
                    elif result.stopped_by is None:
                        begin(ended(name, result))
            return results
        except BaseException:
            _stop_all(running)
            raise


def _round(
    running: dict[str, Turns[JobResult]], shared: SharedEngine
) -> list[tuple[str, JobResult]]:
    """Give each job a turn, and then the engine a step. Jobs that have ended are removed from
    `running` and returned."""
    waits: list[float] = []
    results = []
    for name, turns in list(running.items()):
        try:
            waits.append(next(turns))
        except StopIteration as end:
            del running[name]
            results.append((name, end.value))
        except BaseException:
            del running[name]
            raise
    if shared.in_flight:
        shared.step()
    elif not results and (wait := min(waits, default=0.0)):
        time.sleep(wait)
    return results


def _stop_all(running: dict[str, Turns[JobResult]]) -> None:
    """End jobs as a signal would, and keep their rows. Errors that they raise are ignored, because
    another error or the budget is the reason to stop."""
    for turns in running.values():
        with suppress(StopIteration, Exception, JobStopped):
            turns.throw(JobStopped())
    running.clear()
