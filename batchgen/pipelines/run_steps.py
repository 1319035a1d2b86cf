"""Runs the steps of a pipeline."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial

from batchgen.config.workers_config import WorkersConfig
from batchgen.folder.job_folder import DifferentJob
from batchgen.jobs.job_end import JobResult
from batchgen.jobs.job_parts import job_parts
from batchgen.jobs.run_job import run_job
from batchgen.pipelines.bad_steps import ErrorWatch
from batchgen.pipelines.open_pipeline import OpenPipeline
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError


def run_steps(opened: OpenPipeline) -> list[JobResult]:
    """Run the steps one after the other, until one is stopped by a signal or has spent its budget;
    returns how each ended.

    Raises:
        ConfigError: there is a mistake in a step. Those before it are complete.
        JobError: a step cannot go on, or has too many errors. Finished rows are safe.
    """
    results: list[JobResult] = []
    for name in opened.pipeline.steps:
        result = _run(opened, name)
        results.append(result)
        if result.stopped_by is not None or result.is_spent:
            break
    return results


def _run(opened: OpenPipeline, name: str) -> JobResult:
    """Run a step, in a new folder if its rows are not those of its folder any more."""
    try:
        try:
            return _run_version(opened, name)
        except DifferentJob as other:
            opened.new_edition(name)
            print(
                f"batchgen: step {name}: the rows that it reads have changed, so that a new "
                f"version begins in {opened.folder(name)}:\n  " + "\n  ".join(other.differences),
                file=sys.stderr,
            )
            return _run_version(opened, name)
    except (ConfigError, JobError) as error:
        raise of_step(name, error) from None


def of_step(name: str, error: ConfigError | JobError) -> ConfigError | JobError:
    """The error of a step, which it names."""
    if str(error).startswith(f"step {name}: "):
        return error
    kind = ConfigError if isinstance(error, ConfigError) else JobError
    named = kind(f"step {name}: {error}")
    for note in getattr(error, "__notes__", ()):
        named.add_note(note)
    return named


def _run_version(opened: OpenPipeline, name: str) -> JobResult:
    config = opened.config(name)
    print(f"batchgen: step {name}: {opened.folder(name)}", file=sys.stderr, flush=True)
    with closing(open_storage(config.output.dir, WorkersConfig())) as storage:
        watch = ErrorWatch(name, storage, opened.pipeline.most_errors)
        elsewhere = partial(opened.attempts_elsewhere, name)
        parts = replace(job_parts(config), title=name, watch=watch.look, elsewhere=elsewhere)
        result = run_job(config, parts)
        if result.stopped_by is None and not result.is_spent:
            watch.look()
    return result
