"""Scores a job that is still running or was stopped, from the answers that it has so far, for
`batchgen score --so-far`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.config.groups.job_config import StepConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.engine.device.host_limits import usable_cores
from batchgen.evals.graders.build_steps import check_fields, post_steps
from batchgen.evals.graders.grade_rows import Grader
from batchgen.evals.graders.step import MARK, PostStep, arrow_schema
from batchgen.evals.grades.grade_files import ROW_KEYS
from batchgen.evals.scores.graded_folder import GradedJob
from batchgen.evals.scores.job_score import config_marks
from batchgen.evals.scores.samples import Samples
from batchgen.evals.scores.scores import compute_scores
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import json_readers
from batchgen.util.text.text_table import Line, counted, percent_text, score_value

_TOKENS, _REASON = "num_generated_tokens", "finish_reason"


def score_so_far(job: GradedJob, post: Sequence[StepConfig], config: ScoreConfig) -> dict[str, Any]:
    """Grade the finished rows in memory and score them.

    The result has a further entry `so_far`, which says how far these scores may be from the final
    ones:

    - `answers`: the number of finished answers; `of`: the final number, None if unknown.
    - `shorter`, `longer`: the mean marks of the shorter and of the longer half of the answers, by
      their tokens; absent for fewer than two answers. Short answers finish first, so a difference
      between the two means that the score is biased. `tokens`: the length of the longest answer in
      the shorter half.
    - `bounds`: the mean mark if all missing answers were wrong, and if all were right.

    Raises:
        ConfigError: no row is finished, or a column named in `config` does not exist.
        JobError: a file is damaged.
    """
    if (grid := job.grid_column) is not None:
        raise ConfigError(
            f"{job.user_path}: its rows run with several adapters ({grid}), which end at different "
            "times: it is scored when it is complete"
        )
    steps = post_steps(post)
    if steps:
        check_fields(steps, job.columns)
    samples = Samples(job.path, config)
    tables = [
        (samples.joined(rows, grades), rows[_TOKENS])
        for rows, grades in _graded(job, steps, samples, config)
    ]
    if not tables:
        raise ConfigError(f"no row of {job.user_path} is finished yet: there is nothing to score")
    table = pa.concat_tables(table for table, _ in tables)
    tokens = np.concatenate([lengths.fill_null(0).to_numpy() for _, lengths in tables])
    marks = config_marks(table, config)
    values = compute_scores(marks, config.ks, config.cut_texts, config.column)
    return {**values, "so_far": _so_far(job, table, tokens, bounded=config.column == MARK)}


def _graded(
    job: GradedJob, steps: Sequence[PostStep], samples: Samples, config: ScoreConfig
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield the finished rows in batches, each with its grades."""
    fields = [step.field_names for step in steps]
    read = job.columns[: job.columns.index(job.text_column)] if None in fields else []
    read += [name for names in fields for name in names or ()]
    wanted = [*ROW_KEYS, *read, job.text_column, _TOKENS, *samples.columns]
    wanted += [name for name in (config.column, config.choices or "choices") if name in job.columns]
    with Grader(steps, workers=config.workers or usable_cores(), seconds=config.seconds) as grader:
        for batch in job.batches(list(dict.fromkeys(wanted))):
            rows = pa.Table.from_batches([batch])
            graded = grader.grade(_texts(batch, job.text_column)) if steps else iter(())
            kinds = arrow_schema(grader.chain.columns) if steps else pa.schema([])
            yield rows, pa.Table.from_pylist(list(graded), schema=kinds)


def _texts(batch: pa.RecordBatch, column: str) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield the text and the fields of each row, as `Grader.grade` takes them."""
    readers = json_readers(batch.schema)
    for row in batch.to_pylist():
        for name, read in readers.items():
            row[name] = read(row[name])
        # Only a row with an error has no text; one without an answer is as good as a wrong one.
        yield None if row[_REASON] == "error" else row[column] or "", row


def _so_far(job: GradedJob, table: pa.Table, tokens: Any, *, bounded: bool) -> dict[str, Any]:
    """The entry `so_far` of `score_so_far`, from the samples and the lengths of their texts [N]."""
    marks = table["mark"].to_numpy(zero_copy_only=False).astype(np.float64)
    known = np.isfinite(marks)
    total = JobSummary.of(job.metrics).rows_total
    values: dict[str, Any] = {"answers": len(table), "of": total}
    order = np.argsort(tokens[known], kind="stable")
    half = len(order) // 2
    if half:
        values["shorter"] = float(marks[known][order[:half]].mean())
        values["longer"] = float(marks[known][order[half:]].mean())
        values["tokens"] = int(tokens[known][order[half - 1]])
    if bounded and total is not None and total >= len(table):
        sure, missing = float(marks[known].sum()), total - int(known.sum())
        values["bounds"] = [sure / total, (sure + missing) / total]
    return values


def so_far_lines(scores: Mapping[str, Any]) -> list[Line]:
    """Return lines that say how many answers a score covers and how biased it may be."""
    values, as_text = scores["so_far"], score_value(scores)
    answers, total = values["answers"], values["of"]
    text = counted(answers, "answer")
    if total is not None:
        text = f"{answers:,} of {counted(total, 'answer')} ({percent_text(answers / total)})"
    lines = [("so far", text)]
    if total == answers:
        return lines
    if "shorter" in values:
        lines.append(
            (
                "biased",
                f"short answers end first: those of up to {values['tokens']:,} tokens have "
                f"{as_text(values['shorter'])}, the longer half {as_text(values['longer'])}",
            )
        )
    if "bounds" in values:
        low, high = (as_text(bound) for bound in values["bounds"])
        lines.append(
            ("of all", f"{low} to {high}, if all missing answers were wrong, or all right")
        )
    return lines
