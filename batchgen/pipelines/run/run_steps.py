"""Runs the steps of a pipeline, for `run_pipeline`. Steps with equal models run at the same time in
one engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.inputs.upstream.followed_job import Promise
from batchgen.jobs.generation.turns import Turns, between
from batchgen.jobs.resolve.open_job import open_job
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.run.checked_rows import job_manifest, output_schema
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_jobs import SharingJob, run_jobs
from batchgen.pipelines.run.bad_steps import ErrorWatch
from batchgen.pipelines.run.open_pipeline import OpenPipeline
from batchgen.pipelines.run.step_groups import StepGroups
from batchgen.storage.stores.manifest import DifferentJob
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError

_WATCH_SECONDS = 0.1  # between two looks for a step's first shard


class _StepChanged(Exception):
    """Raised if the rows that a step reads are no longer those that its folder was made from."""

    def __init__(self, name: str, differences: Sequence[str]) -> None:
        super().__init__(name)
        self.name, self.differences = name, differences


def run_pipeline_steps(opened: OpenPipeline) -> list[JobResult]:
    """Run the steps until all are complete, or until a step is stopped by a signal or has spent its
    budget. Returns how each step ended; a step that was cut short comes last.

    Steps with the same models, strategy and engine form a group, which runs in one engine. Within a
    group, a step can run while the step that it reads still runs (see `StepGroups.follows`). Groups
    run one after the other.

    Raises:
        ConfigError: there is a mistake in a step. Finished rows are safe.
        JobError: a step cannot continue, or has too many errors. Finished rows are safe.
    """
    while True:
        try:
            return _Run(opened).all()
        except _StepChanged as changed:
            opened.new_edition(changed.name)
            print(
                f"batchgen: step {changed.name}: the rows that it reads have changed, so that a "
                f"new version begins in {opened.folder(changed.name)}:\n  "
                + "\n  ".join(changed.differences),
                file=sys.stderr,
            )


def of_step(name: str, error: ConfigError | JobError) -> ConfigError | JobError:
    """Return the error with the step's name at the beginning of its message."""
    if str(error).startswith(f"step {name}: "):
        return error
    kind = ConfigError if isinstance(error, ConfigError) else JobError
    named = kind(f"step {name}: {error}")
    for note in getattr(error, "__notes__", ()):
        named.add_note(note)
    return named


class _Run:
    """One pass through the steps. If the rows that a step reads have changed, the pass ends with
    _StepChanged, and the caller begins a new one."""

    def __init__(self, opened: OpenPipeline) -> None:
        self._opened = opened
        self._groups = StepGroups(opened)
        self._results: dict[str, JobResult] = {}  # of steps that have ended
        self._known: dict[str, OpenedJob] = {}  # the steps opened so far
        self._promised: dict[str, Promise] = {}  # folder → what its readers know before it has rows

    def all(self) -> list[JobResult]:
        """Run all steps, and return how each ended; see `run_pipeline_steps`."""
        while (group := self._groups.next(self._results)) is not None:
            self._run_group(group)
            if any(_is_cut_short(result) for result in self._results.values()):
                break
        return sorted(self._results.values(), key=_is_cut_short)

    def _run_group(self, group: str) -> None:
        """Run the steps of a group that can run now, and those that can begin as others end."""
        names = self._groups.steps[group]
        with ExitStack() as watches:
            jobs = self._begun(group, watches)
            first = next(iter(jobs))

            def build() -> LLMEngine:
                config = self._opened.config(first)
                compiled = (self._known[name].compiler for name in jobs)
                compiler = next((one for one in compiled if one is not None), None)
                configs = [self._opened.config(name) for name in names]
                shared = self._known[first].shared(configs)
                return replace(shared, config=config, compiler=compiler).load()

            def ended(name: str, result: JobResult) -> Mapping[str, SharingJob]:
                self._results[name] = result
                jobs[name].parts.watch()
                more = self._begun(group, watches)
                jobs.update(more)
                return more

            self._results |= run_jobs(jobs, build, ended)

    def _begun(self, group: str, watches: ExitStack) -> dict[str, SharingJob]:
        """Open the steps of a group that can begin now and are not open yet."""
        names = self._groups.ready(group, self._results)
        jobs: dict[str, SharingJob] = {}
        for name in names:
            if name not in self._known:
                jobs[name] = self._open(name, watches)
        return jobs

    def _open(self, name: str, watches: ExitStack) -> SharingJob:
        """Open and check a step."""
        opened = self._opened
        config = self._groups.config(name)
        folder = config.output.dir
        print(f"batchgen: step {name}: {folder}", file=sys.stderr, flush=True)
        storage = watches.enter_context(closing(open_storage(folder, WorkersConfig())))
        watch = ErrorWatch(name, storage, opened.pipeline.most_errors)
        try:
            self._known[name] = job = open_job(config, self._promised)
            parts = replace(
                job.with_fingerprints(),
                watch=watch.look,
                elsewhere=partial(opened.attempts_elsewhere, name),
                grades_at_once=self._groups.is_followed(name),
            )
            schema = output_schema(config, parts)
        except (ConfigError, JobError) as error:
            raise of_step(name, error) from None
        if self._groups.is_followed(name):
            manifest = job_manifest(config, parts, schema)
            self._promised[folder] = Promise.of(config, manifest, schema.arrow)
        return SharingJob(config, parts, partial(_around, name, watch))


def _around(name: str, watch: ErrorWatch, turns: Turns[JobResult]) -> Turns[JobResult]:
    """Run a step, turn by turn, and name the step in its errors. Between turns, its first shard is
    checked as soon as it exists, because other steps may already read it."""
    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:
            watch.look()
            next_look = time.monotonic() + _WATCH_SECONDS

    try:
        return (yield from between(turns, look))
    except DifferentJob as other:
        raise _StepChanged(name, other.differences) from None
    except (ConfigError, JobError) as error:
        raise of_step(name, error) from None


def _is_cut_short(result: JobResult) -> bool:
    """Whether a step ended before it was complete."""
    return result.stopped_by is not None or result.is_spent
