"""Makes arms of folders: which jobs are one arm, in what they differ, and whether they sat one
exam."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.arms.arm_folders import ArmFolder
from batchgen.evals.arms.arm_samples import arm_values_of, pooled_samples, samples_with
from batchgen.evals.arms.arm_table import Arm
from batchgen.evals.arms.job_facts import (
    SEED,
    differing_settings,
    is_config,
    job_numbers,
    own_times,
)
from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import step_folder
from batchgen.storage.leases.own_files import MANIFEST
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import user_path

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.evals.scores.asked_prompts import AskedExam

_SEED_OF_NAME = re.compile(rf",?\b{re.escape(SEED)}=[^,]*")


def job_arms(
    folders: Sequence[ArmFolder],
    overrides: Sequence[str] = (),
    *,
    by: str | None = None,
    anyway: bool = False,
) -> tuple[list[Arm], str]:
    """The arms of jobs, and the column that their scores are of.

    Jobs that differ in sampling.seed alone are one arm: the answers of all of them to a question
    count together. If all jobs differ in it alone and were named one by one, each is an arm. A job
    that is not complete, is damaged or has no grades is an arm without a score, which says why.

    Args:
        overrides: arguments `score.KEY=…` of all jobs.
        by: the column whose values are the arms, instead of the jobs.
        anyway: compare different exams, too.

    Raises:
        ConfigError: a folder that the user named is none of a job, an argument is wrong, jobs are
            scored by different columns, or `by` is no column of the rows.
    """
    jobs = [_Job.of(folder, overrides) for folder in folders]
    columns = list(dict.fromkeys(job.score.column for job in jobs if job.score is not None))
    if len(columns) > 1:
        raise ConfigError(
            f"the jobs are scored by different columns, {' and '.join(columns)}: name one for all, "
            f"as score.column={columns[0]}"
        )
    own = differing_settings([job.config for job in jobs])
    for job, differs in zip(jobs, own, strict=True):
        job.settings = differs
    _check_alone(jobs)
    groups = _by_seed(jobs)
    first = next((job for job in jobs if job.has_score(by)), None)
    arms: list[Arm] = []
    for group in groups:
        arms += _arms_of(group, first, by=by, several=len(groups) > 1, anyway=anyway)
    return arms, columns[0] if columns else ScoreConfig().column


class _Job:
    """A job on its way into an arm.

    Attributes:
        without: why it has no score; empty as long as nothing is known to be wrong.
        damaged: whether that is a file of the job that cannot be read.
        settings: in what it differs from others.
    """

    def __init__(
        self, folder: ArmFolder, job: GradedJob | None, without: str, *, damaged: bool = False
    ) -> None:
        self.folder, self.job, self.without = folder, job, without
        self.damaged = damaged
        self.score: ScoreConfig | None = None
        self.config: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.settings: dict[str, str] = {}
        self.alone = True

    @staticmethod
    def of(folder: ArmFolder, overrides: Sequence[str]) -> _Job:
        """The job in a folder. ConfigError if the user named what is no folder of a job, or an
        argument is wrong."""
        path = Path(step_folder(str(user_path(folder.folder, "OUT"))))
        try:
            reader = JobFolderReader(path)
            made = _Job(folder, None, "")
            made.metrics, made.config = reader.metrics, reader.config
        except (ConfigError, JobError) as error:
            if not folder.listed and not (path / MANIFEST).exists():
                GradedJob(folder.folder, "compare")  # it says what there is instead
            return _Job(folder, None, str(error), damaged=isinstance(error, JobError))
        if not is_config(made.config):
            return _Job(folder, None, f"{folder.folder}/config.yaml is not that of a job")
        try:
            made.job = GradedJob(folder.folder, "compare")
        except (ConfigError, JobError) as error:
            made.without, made.damaged = str(error), isinstance(error, JobError)
            return made
        made.score = scoring(made.job, overrides).score
        made.job.warn_of_copies()
        return made

    @cached_property
    def _tables(self) -> dict[str | None, pa.Table]:
        return {}

    def samples(self, by: str | None) -> pa.Table | None:
        """The samples of its rows, None without a score."""
        from batchgen.evals.scores.samples import Samples

        if self.job is None or self.score is None or self.without:
            return None
        if by is None and (grid := self.job.grid_column) is not None:
            raise ConfigError(
                f"{self.folder.folder}: its rows run with several adapters, of which one score "
                f"would say nothing: compare them with --by {grid}"
            )
        if by not in self._tables:
            try:
                self._tables[by] = Samples(self.job.path, self.score, by=by).table()
            except (ConfigError, JobError) as error:
                if by is not None and self.has_score(None):
                    raise
                self.without, self.damaged = str(error), isinstance(error, JobError)
                return None
        return self._tables[by]

    def has_score(self, by: str | None) -> bool:
        """Whether its rows have marks."""
        return self.samples(by) is not None

    @cached_property
    def exam(self) -> AskedExam:
        """What its rows were asked."""
        from batchgen.evals.scores.asked_prompts import AskedExam

        assert self.job is not None
        return AskedExam(self.job)


def _check_alone(jobs: Sequence[_Job]) -> None:
    """Find out which jobs ran while another one ran on the same machine."""
    times = [own_times(job.metrics) for job in jobs]
    for place, job in enumerate(jobs):
        others = [time for other, of in enumerate(times) if other != place for time in of]
        job.alone = not any(
            own.host == other.host and own.begin < other.end and other.begin < own.end
            for own in times[place]
            for other in others
        )


def _by_seed(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Groups of jobs that differ in their seeds alone, in the order of their first ones."""
    found: dict[tuple[Any, ...], list[_Job]] = {}
    for place, job in enumerate(jobs):
        rest = {key: value for key, value in job.settings.items() if key != SEED}
        prints = {} if job.job is None else job.job.fingerprints
        same: tuple[Any, ...] = (tuple(rest.items()), tuple(sorted(prints.items())))
        seeds = {other.settings.get(SEED) for other in found.get(same, ())}
        if job.job is None or SEED not in job.settings or job.settings[SEED] in seeds:
            same = (place,)
        found.setdefault(same, []).append(job)
    groups = list(found.values())
    if len(groups) == 1 and not any(job.folder.listed for job in jobs):
        return [[job] for job in jobs]
    return groups


def _arms_of(
    group: Sequence[_Job], first: _Job | None, *, by: str | None, several: bool, anyway: bool
) -> list[Arm]:
    """The arms of jobs that are averaged: one, or one for each value of the column `by`."""
    from batchgen.evals.scores.job_score import config_marks

    scored = [job for job in group if job.has_score(by)]
    arms = [_arm([job]) for job in group if job not in scored]
    if not scored:
        return arms
    about, score = _arm(scored), scored[0].score
    assert score is not None and first is not None
    differs = [found for job in scored for found in _differences(first, job)]
    other_exam = "; ".join(dict.fromkeys(differs))
    tables = [job.samples(by) for job in scored]
    pooled = pooled_samples([table for table in tables if table is not None])
    parts = [(about, pooled)]
    if by is not None:
        parts = [
            (_of_value(about, by, value, several=several), samples_with(pooled, by, value))
            for value in arm_values_of(pooled, by)
        ]
    made = [
        replace(
            arm,
            marks=config_marks(table, score).counting_cut_texts(score.cut_texts),
            other_exam=other_exam,
            anyway=anyway,
        )
        for arm, table in parts
    ]
    return [*made, *arms]


def _arm(jobs: Sequence[_Job]) -> Arm:
    """An arm without marks yet."""
    seeds = tuple(job.settings[SEED] for job in jobs) if len(jobs) > 1 else ()
    numbers = [job_numbers(job.metrics, job.config) for job in jobs]
    shared = [key for key in numbers[0] if all(key in own for own in numbers)]
    rest = {key: value for key, value in jobs[0].settings.items() if not seeds or key != SEED}
    return Arm(
        _name(jobs, rest),
        tuple(job.folder.folder for job in jobs),
        without="; ".join(job.without for job in jobs if job.without),
        damaged=any(job.damaged for job in jobs),
        settings=rest,
        seeds=seeds,
        metrics={key: sum(own[key] for own in numbers) / len(numbers) for key in shared},
        alone=all(job.alone for job in jobs),
    )


def _name(jobs: Sequence[_Job], rest: dict[str, str]) -> str:
    names = [job.folder.name for job in jobs]
    if len(names) == 1:
        return names[0]
    bare = {_SEED_OF_NAME.sub("", name).strip(",/") for name in names}
    name = bare.pop() if len(bare) == 1 else ",".join(f"{k}={v}" for k, v in rest.items())
    return name or "all seeds"


def _of_value(about: Arm, by: str, value: str | None, *, several: bool) -> Arm:
    text = "null" if value is None else value
    name = f"{about.name} {text}" if several else text
    return replace(about, name=name, settings={**about.settings, by: text})


def _differences(first: _Job, job: _Job) -> list[str]:
    """What makes two jobs different exams, a sentence each."""
    from batchgen.evals.scores.asked_prompts import exam_differences

    if first is job:
        return []
    assert first.score is not None and job.score is not None
    found = list(exam_differences(first.exam, job.exam))
    cut = (first.score.cut_texts, job.score.cut_texts)
    if cut[0] != cut[1]:
        found.append(
            f"texts that were cut count differently (score.cut_texts is {cut[0]} and {cut[1]})"
        )
    return found
