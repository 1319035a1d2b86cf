"""Grades and scores a job whose rows are all computed, and updates the files that show the result.
The end of a job and `batchgen grade` call these functions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.config.groups.job_config import JobConfig
from batchgen.evals.grades.changed_marks import ChangedMarks
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.grades.grading_queue import GradingQueue
from batchgen.jobs.generation.turns import Turns
from batchgen.storage.folder.dataset_card import grades_section, with_grade_section
from batchgen.storage.metrics.job_scores import JobScores
from batchgen.storage.shards.checked_file import read_schema
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.signals import JobStopped, StopSignals

if TYPE_CHECKING:
    from batchgen.evals.scores.samples import Samples


def grade_and_score(
    samples: Samples, config: JobConfig, signals: StopSignals, queue: GradingQueue | None = None
) -> Turns[JobScores]:
    """Grade the rows of a job as its configuration says, and score them if a step gives marks.

    Changes of earlier marks are printed to stderr. Shards that the `queue` is already grading are
    waited for.

    Raises:
        JobStopped: a signal came first; the grades so far stay.
    """
    if not config.post:
        return score_job(samples) if config.is_scored else JobScores()
    print("grading …", file=sys.stderr, flush=True)
    text = config.output.text_column

    def stop() -> bool:
        return signals.received is not None

    if queue is not None:
        yield from queue.finish(stop)
    # `make` grades the shards that are left, and reports the error if the queue has failed.
    changes = ChangedMarks()
    try:
        count = samples.grades.make(config.post, text, config.score, stop=stop, changes=changes)
    finally:
        print(*changes.lines(), sep="\n", end="\n" * (changes.compared > 0), file=sys.stderr)
    if count is None:
        raise JobStopped("Stopped while the rows were graded; all of them are done.")
    return score_job(samples)


def score_job(samples: Samples) -> JobScores:
    """The scores of a graded job; without figures if its grades have no marks."""
    # Loads numpy, which a job without marks does not need.
    from batchgen.evals.scores.job_score import job_scores

    return job_scores(samples) if samples.have_marks else JobScores()


def save_scores(folder: Path, scores: JobScores, display_name: str | None = None) -> None:
    """Write scores into metrics.json, and the section on grades into README.md if the file exists.

    `display_name` is what people call the folder.
    """
    from batchgen.evals.scores.job_score import save_score

    save_score(folder, scores)
    path = folder / "README.md"
    if path.is_file():
        write_atomic(path, graded_card(path.read_text(encoding="utf-8"), folder, display_name))


def graded_card(card: str, folder: Path, display_name: str | None = None) -> str:
    """The data set card with a section on the grades, if the job has grades."""
    schema = JobGrades(folder).schema()
    if schema is None:
        return card
    rows = next((read_schema(path) for path in shard_files(folder / "data").values()), schema)
    return with_grade_section(card, grades_section(schema, rows.names, display_name or str(folder)))
