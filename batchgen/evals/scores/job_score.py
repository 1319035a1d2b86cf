"""Computes the scores of a job from its rows and their grades, and stores them in metrics.json.
Jobs with `post` steps do this at their end, and `batchgen score` and `batchgen grade` later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.graders.step import MARK
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.scores.marks import Marks
from batchgen.evals.scores.samples import Samples, graded_rows
from batchgen.evals.scores.scores import compute_scores
from batchgen.storage.metrics.job_scores import JobScores
from batchgen.storage.metrics.timeline import metrics_text
from batchgen.storage.stores.metrics_file import METRICS, parse_metrics
from batchgen.storage.stores.whole_file import write_atomic

# The column of grades with what an answer was compared with.
_TARGET = "graded_against"


def job_marks(job: Path, config: ScoreConfig) -> Marks:
    """The marks of a job whose rows are all graded, counted as `config` says.

    Raises:
        ConfigError: rows lack grades, no step gave marks, or there is no column of a name in
            `config`.
        JobError: a file is damaged.
    """
    return config_marks(Samples(job, config).table(), config).counting_cut_texts(config.cut_texts)


def config_marks(samples: pa.Table, config: ScoreConfig) -> Marks:
    """The marks in a table of samples, or the numbers of the column that `config` scores
    instead."""
    return Marks.of_table(samples, bounded=config.column == MARK)


def job_targets(job: Path) -> dict[str, str]:
    """The targets with which the answers to each row were compared, where they are known. Empty for
    a job without grades, which may be scored by numbers of its rows.

    Raises:
        ConfigError, JobError: see `job_marks`.
    """
    targets: dict[str, str] = {}
    if JobGrades(job).steps is None:
        return targets
    for grades in graded_rows(job):
        if _TARGET in grades.column_names:
            pairs = zip(grades["row_id"].to_pylist(), grades[_TARGET].to_pylist(), strict=True)
            targets |= {row_id: target for row_id, target in pairs if target is not None}
    return targets


def job_scores(samples: Samples) -> JobScores:
    """The scores of the job that the samples are of: one, or one for each value of the column by
    which they were opened.

    Raises:
        ConfigError, JobError: see `job_marks`.
    """
    table, by = samples.table(), samples.by
    if by is None:
        return JobScores(_score(table, samples.config))
    return JobScores(
        adapters={
            name: _score(table.filter(pc.equal(table[by], name)), samples.config)
            for name in table[by].unique().to_pylist()
        }
    )


def _score(table: pa.Table, config: ScoreConfig) -> dict[str, Any]:
    return compute_scores(config_marks(table, config), config.ks, config.cut_texts, config.column)


def save_score(job: Path, scores: JobScores) -> None:
    """Write the scores into the metrics.json of a complete job, in place of those that it has.

    Raises:
        JobError: it is damaged, or cannot be written.
    """
    path = job / METRICS
    metrics = parse_metrics(path.read_bytes(), str(path))
    # The long lists stay at the end of the file.
    last: dict[str, Any] = {
        key: metrics.pop(key) for key in ("attempts", "timeline") if key in metrics
    }
    for key, value in (("score", scores.score), ("adapter_scores", scores.adapters)):
        metrics.pop(key, None)
        if value:
            metrics[key] = value
    metrics |= last
    write_atomic(path, metrics_text(metrics))
