"""The marks and scores of a job, from its rows and their grades."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config import ScoreConfig
from batchgen.errors import ConfigError
from batchgen.grading.job_grades import JobGrades, Part
from batchgen.output.manifest import write_atomic
from batchgen.output.shards import damaged, read_columns
from batchgen.output.timeline import metrics_text
from batchgen.scoring.marks import Marks, Sample
from batchgen.scoring.score import score

_MARK, _ANSWER_KEY, _TARGET = "mark", "answer_key", "graded_against"


def has_marks(job: Path) -> bool:
    """Whether the grades of a job have marks, from which scores can be made."""
    schema = JobGrades(job).schema()
    return schema is not None and _MARK in schema.names


def job_marks(job: Path, config: ScoreConfig) -> Marks:
    """The marks of a job whose rows are all graded.

    Raises:
        ConfigError: rows lack grades, no step gave marks, or there is no column of a name in
            `config`.
        JobError: a file is damaged.
    """
    return Marks.of(_samples(job, config))


def job_targets(job: Path) -> dict[str, str]:
    """What the answers to each row were compared with, where that is known.

    Raises:
        ConfigError, JobError: as of `job_marks`.
    """
    targets: dict[str, str] = {}
    for _, grades in _tables(job, ()):
        if _TARGET in grades.column_names:
            pairs = zip(grades["row_id"].to_pylist(), grades[_TARGET].to_pylist(), strict=True)
            targets |= {row_id: target for row_id, target in pairs if target is not None}
    return targets


def job_score(job: Path, config: ScoreConfig) -> dict[str, Any]:
    """The scores of a job, as of `batchgen.scoring.score.score`.

    Raises:
        ConfigError, JobError: as of `job_marks`.
    """
    return score(job_marks(job, config), config.ks)


def save_score(job: Path, scores: Mapping[str, Any] | None) -> None:
    """Write the scores into the metrics.json of a complete job, or take them out.

    Raises:
        JobError: it cannot be written.
    """
    path = job / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8"))
    metrics.pop("score", None)
    if scores is not None:
        last = {key: metrics.pop(key) for key in ("attempts", "timeline") if key in metrics}
        metrics |= {"score": scores, **last}
    write_atomic(path, metrics_text(metrics))


def _samples(job: Path, config: ScoreConfig) -> Iterator[Sample]:
    named = {"score.subset": config.subset, "score.cluster": config.cluster}
    for rows, grades in _tables(job, tuple(named.items())):
        if _MARK not in grades.column_names:
            raise ConfigError(
                f"the grades of {job} have no column {_MARK!r}: add a step that gives marks, such "
                "as batchgen.grading.grade.Grade"
            )
        marks = grades[_MARK].to_pylist()
        # A judge's score has no answer to vote with, but a row that has one is not without answer.
        keys = (
            grades[_ANSWER_KEY].to_pylist()
            if _ANSWER_KEY in grades.column_names
            else [None if mark is None else f"{mark:g}" for mark in marks]
        )
        subsets, clusters = (
            [None] * len(marks) if name is None else rows[name].to_pylist()
            for name in named.values()
        )
        columns = zip(
            rows["row_id"].to_pylist(),
            rows["sample_index"].to_pylist(),
            marks,
            keys,
            rows["finish_reason"].to_pylist(),
            rows["error"].to_pylist(),
            grades["grade_error"].to_pylist(),
            subsets,
            clusters,
            strict=True,
        )
        for row_id, sample, mark, key, reason, error, failure, subset, cluster in columns:
            yield Sample(
                row_id,
                sample,
                mark,
                key,
                truncated=reason == "length",
                error=None if error is None else error["type"],
                grade_error=None if failure is None else failure["type"],
                subset=None if subset is None else str(subset),
                cluster=None if cluster is None else str(cluster),
            )


def _tables(
    job: Path, named: tuple[tuple[str, str | None], ...]
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """For each shard some columns of its rows, and their grades in the same order.

    Args:
        named: keys of the configuration, and the further columns that they name.
    """
    for part in JobGrades(job).finished():
        names = pq.read_schema(part.shard).names
        for key, name in named:
            if name is not None and name not in names:
                raise ConfigError(
                    f"{key}: the rows of {job} have no column {name!r}: choose among "
                    f"{', '.join(names)}"
                )
        more = [name for _, name in named if name is not None]
        columns = ["row_id", "sample_index", "finish_reason", "error", *more]
        rows = read_columns(part.shard, list(dict.fromkeys(columns)))
        yield rows, _same_rows(part, rows)


def _same_rows(part: Part, rows: pa.Table) -> pa.Table:
    grades = read_columns(part.path, pq.read_schema(part.path).names)
    if not grades["row_id"].equals(rows["row_id"]):
        raise damaged(part.path, "it has other rows than its shard")
    return grades
