"""Makes the arms of a comparison from folders of jobs.

An *arm* is one line of the comparison: a job, or jobs that differ only in their seed and are
averaged. Arms are comparable if they sat one *exam*: the same questions, asked and marked in the
same way.
"""

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
    attempt_times,
    differing_settings,
    is_config,
    job_numbers,
)
from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import step_folder
from batchgen.storage.leases.job_files import MANIFEST
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import user_path

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.evals.scores.asked_prompts import JobExam

# The seed in the name of a sweep's job: `,sampling.seed=1`.
_SEED_OF_NAME = re.compile(rf",?\b{re.escape(SEED)}=[^,]*")


def job_arms(
    folders: Sequence[ArmFolder],
    overrides: Sequence[str] = (),
    *,
    by: str | None = None,
    anyway: bool = False,
) -> tuple[list[Arm], str]:
    """Make the arms of jobs; return them and the scored column.

    Jobs that differ only in sampling.seed are one arm, whose questions have the answers of all of
    them. But if all jobs differ only in it and were named one by one, each is an arm. A job that is
    not complete, is damaged or has no grades is an arm without a score, and says why.

    Args:
        overrides: arguments `score.KEY=…` for all jobs.
        by: the column whose values are the arms, instead of the jobs.
        anyway: whether to compare different exams too.

    Raises:
        ConfigError: a folder that the user named is not a job's, an argument is wrong, jobs are
            scored by different columns, or `by` is not a column of the rows.
    """
    jobs = [_Job.of(folder, overrides) for folder in folders]
    columns = list(dict.fromkeys(job.score.column for job in jobs if job.score is not None))
    if len(columns) > 1:
        raise ConfigError(
            f"the jobs are scored by different columns, {' and '.join(columns)}: name one for all, "
            f"as score.column={columns[0]}"
        )
    settings = differing_settings([job.config for job in jobs])
    for job, differing in zip(jobs, settings, strict=True):
        job.settings = differing
    _check_alone(jobs)
    groups = _by_seed(jobs)
    first = next((job for job in jobs if job.has_score(by)), None)
    arms: list[Arm] = []
    for group in groups:
        arms += _arms_of(group, first, by=by, several=len(groups) > 1, anyway=anyway)
    return arms, columns[0] if columns else ScoreConfig().column


class _Job:
    """A job that will become an arm or a part of one.

    Attributes:
        folder: the job's folder.
        graded: the job with its grades; None if they cannot be read.
        why_no_score: why the job has no score; empty while no reason is known.
        damaged: whether the reason is a file of the job that cannot be read.
        score: how it is scored.
        config, metrics: the content of config.yaml and metrics.json.
        settings: the values of the keys in which the jobs of the comparison differ.
        alone: whether no other of these jobs ran at the same time on the same machine.
    """

    def __init__(
        self,
        folder: ArmFolder,
        graded: GradedJob | None,
        why_no_score: str,
        *,
        damaged: bool = False,
    ) -> None:
        self.folder, self.graded = folder, graded
        self.why_no_score, self.damaged = why_no_score, damaged
        self.score: ScoreConfig | None = None
        self.config: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.settings: dict[str, str] = {}
        self.alone = True

    @staticmethod
    def of(folder: ArmFolder, overrides: Sequence[str]) -> _Job:
        """Read the job in a folder.

        Raises:
            ConfigError: the user named a folder that is not a job's, or an argument is wrong.
        """
        path = Path(step_folder(str(user_path(folder.folder, "OUT"))))
        try:
            reader = JobFolderReader(path)
            entry = _Job(folder, None, "")
            entry.metrics, entry.config = reader.metrics, reader.config
        except (ConfigError, JobError) as error:
            if not folder.listed and not (path / MANIFEST).exists():
                # The user named this folder itself, not a folder of jobs that lists it. So it is
                # wrong that it has no job: this raises an error that says what the folder holds.
                GradedJob(folder.folder, "compare")
            return _Job(folder, None, str(error), damaged=isinstance(error, JobError))
        if not is_config(entry.config):
            return _Job(
                folder, None, f"{folder.folder}/config.yaml is not the configuration of a job"
            )
        try:
            entry.graded = GradedJob(folder.folder, "compare")
        except (ConfigError, JobError) as error:
            entry.why_no_score, entry.damaged = str(error), isinstance(error, JobError)
            return entry
        entry.score = scoring(entry.graded, overrides).score
        entry.graded.warn_of_copies()
        return entry

    @cached_property
    def _tables(self) -> dict[str | None, pa.Table]:
        """The tables that `samples` has read so far, by its argument `by`. Empty at first."""
        return {}

    def samples(self, by: str | None) -> pa.Table | None:
        """Read the samples of the job's rows, once for each `by`. Unless `by` is None, they have
        values of that column. Returns None if the job has no score.

        If the samples cannot be read, `why_no_score` and `damaged` are set.

        Raises:
            ConfigError: the rows run with several adapters, or `by` is not a column of them.
        """
        from batchgen.evals.scores.samples import Samples

        if self.graded is None or self.score is None or self.why_no_score:
            return None
        if by is None and (grid := self.graded.grid_column) is not None:
            raise ConfigError(
                f"{self.folder.folder}: its rows run with several adapters, so one score for all "
                f"of them would mean nothing: compare them with --by {grid}"
            )
        if by not in self._tables:
            try:
                self._tables[by] = Samples(self.graded.path, self.score, by=by).table()
            except (ConfigError, JobError) as error:
                if by is not None and self.has_score(None):
                    raise
                self.why_no_score, self.damaged = str(error), isinstance(error, JobError)
                return None
        return self._tables[by]

    def has_score(self, by: str | None) -> bool:
        """Whether the rows of the job have marks. The first call reads the rows, and sets
        `why_no_score` and `damaged` if it cannot; raises as `samples`."""
        return self.samples(by) is not None

    @cached_property
    def exam(self) -> JobExam:
        """The prompts and the settings that the rows of the job were answered with."""
        from batchgen.evals.scores.asked_prompts import JobExam

        assert self.graded is not None
        return JobExam(self.graded)


def _check_alone(jobs: Sequence[_Job]) -> None:
    """Set `alone` of each job."""
    times = [attempt_times(job.metrics) for job in jobs]
    for number, job in enumerate(jobs):
        others = [time for other, spans in enumerate(times) if other != number for time in spans]
        job.alone = not any(
            time.host == other.host and time.begin < other.end and other.begin < time.end
            for time in times[number]
            for other in others
        )


def _by_seed(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Group the jobs that differ only in their seeds. Groups have the order of their first jobs.

    If all jobs differ only in their seeds and the user named them one by one, each is a group.
    """
    groups_by_key: dict[tuple[Any, ...], list[_Job]] = {}
    for number, job in enumerate(jobs):
        rest = {name: value for name, value in job.settings.items() if name != SEED}
        fingerprints = {} if job.graded is None else job.graded.fingerprints
        key: tuple[Any, ...] = (tuple(rest.items()), tuple(sorted(fingerprints.items())))
        seeds = {other.settings.get(SEED) for other in groups_by_key.get(key, ())}
        # A job is a group of its own if its grades cannot be read, if the jobs do not differ in
        # their seeds, or if its group would have two jobs of the same seed.
        if job.graded is None or SEED not in job.settings or job.settings[SEED] in seeds:
            key = (number,)
        groups_by_key.setdefault(key, []).append(job)
    groups = list(groups_by_key.values())
    # `listed`: the user named not the job's folder, but a folder of jobs that contains it.
    if len(groups) == 1 and not any(job.folder.listed for job in jobs):
        return [[job] for job in jobs]
    return groups


def _arms_of(
    group: Sequence[_Job], first: _Job | None, *, by: str | None, several: bool, anyway: bool
) -> list[Arm]:
    """The arms of a group of jobs that are averaged: one arm, or one for each value of the column
    `by`. Each job without a score is an arm too.

    Cut texts, which reached the limit of their length, count as the setting `score.cut_texts` says.

    Args:
        first: the first job with a score in the whole comparison, whose exam the others must equal.
        several: whether there are other groups, so that an arm's name must say which group it
            belongs to.
    """
    from batchgen.evals.scores.job_score import config_marks

    scored = [job for job in group if job.has_score(by)]
    arms = [_arm([job]) for job in group if job not in scored]
    if not scored:
        return arms
    whole, score = _arm(scored), scored[0].score
    assert score is not None and first is not None
    differences = [text for job in scored for text in _differences(first, job)]
    other_exam = "; ".join(dict.fromkeys(differences))
    tables = [job.samples(by) for job in scored]
    pooled = pooled_samples([table for table in tables if table is not None])
    parts = [(whole, pooled)]
    if by is not None:
        parts = [
            (_of_value(whole, by, value, several=several), samples_with(pooled, by, value))
            for value in arm_values_of(pooled, by)
        ]
    scored_arms = [
        replace(
            arm,
            marks=config_marks(table, score).counting_cut_texts(score.cut_texts),
            other_exam=other_exam,
            anyway=anyway,
        )
        for arm, table in parts
    ]
    return [*scored_arms, *arms]


def _arm(jobs: Sequence[_Job]) -> Arm:
    """The arm of one or several jobs, still without marks."""
    seeds = tuple(job.settings[SEED] for job in jobs) if len(jobs) > 1 else ()
    numbers = [job_numbers(job.metrics, job.config) for job in jobs]
    shared = [key for key in numbers[0] if all(key in job_values for job_values in numbers)]
    rest = {key: value for key, value in jobs[0].settings.items() if not seeds or key != SEED}
    return Arm(
        _name(jobs, rest),
        tuple(job.folder.folder for job in jobs),
        without="; ".join(job.why_no_score for job in jobs if job.why_no_score),
        damaged=any(job.damaged for job in jobs),
        settings=rest,
        seeds=seeds,
        metrics={
            key: sum(job_values[key] for job_values in numbers) / len(numbers) for key in shared
        },
        alone=all(job.alone for job in jobs),
    )


def _name(jobs: Sequence[_Job], rest: dict[str, str]) -> str:
    """The name of an arm: that of its folders without their seeds, or else its settings `rest`."""
    names = [job.folder.name for job in jobs]
    if len(names) == 1:
        return names[0]
    bare = {_SEED_OF_NAME.sub("", name).strip(",/") for name in names}
    name = bare.pop() if len(bare) == 1 else ",".join(f"{k}={v}" for k, v in rest.items())
    return name or "all seeds"


def _of_value(whole: Arm, by: str, value: str | None, *, several: bool) -> Arm:
    """The part of an arm whose rows have this value in the column `by`."""
    text = "null" if value is None else value
    name = f"{whole.name} {text}" if several else text
    return replace(whole, name=name, settings={**whole.settings, by: text})


def _differences(first: _Job, job: _Job) -> list[str]:
    """The differences between the exams of two jobs, one sentence each."""
    from batchgen.evals.scores.asked_prompts import exam_differences

    if first is job:
        return []
    assert first.score is not None and job.score is not None
    differences = list(exam_differences(first.exam, job.exam))
    cut_texts = (first.score.cut_texts, job.score.cut_texts)
    if cut_texts[0] != cut_texts[1]:
        differences.append(
            "texts that were cut count differently (score.cut_texts is "
            f"{cut_texts[0]} and {cut_texts[1]})"
        )
    return differences
