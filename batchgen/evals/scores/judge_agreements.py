"""Measures how far the judges of a job agree with known marks of the judged answers, for `batchgen
score JOB --agreement EXPR`.

A judge is a model whose job marks the answers of another job. The step `Majority` can combine the
marks of several judges in one job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from batchgen.config.groups.class_names import class_short_name
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.graders.step import MARK
from batchgen.evals.scores.agreement import Agreement, agreement
from batchgen.evals.scores.graded_folder import GradedJob
from batchgen.evals.scores.samples import Samples
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_expression import ExpressionFailed, RowExpression

_KEY = "--agreement"
_IDS = ("row_id", "sample_index")
_SOURCE = "source"
"""The column of a judge's rows that names the judged answer."""


class _KnownMark(NamedTuple):
    """The known mark of a judged answer, and the answer's id. Rows with the same id judge one
    answer, in two orders."""

    value: Any
    answer: str


@dataclass(frozen=True)
class JudgeAgreements:
    """The agreement of the job's marks, and of each judge whose marks they combine."""

    marks: Agreement
    judges: Mapping[str, Agreement]

    def lines(self, truth: str) -> list[tuple[str, str]]:
        """The agreements in words, as lines of a table."""
        lines = [("agreement", f"with {truth}: {self.marks.text}")]
        return lines + [(f"  {name}", one.text) for name, one in self.judges.items()]

    def summary(self) -> dict[str, Any]:
        """The agreements as plain values."""
        judges = {name: one.summary() for name, one in self.judges.items()}
        return self.marks.summary() | ({"judges": judges} if judges else {})


def judge_agreements(job: GradedJob, config: ScoreConfig, truth: str) -> JudgeAgreements:
    """The agreement with `truth`, a column of the job's rows or an expression over them.

    A judge who has seen two answers in both orders has one mark for them, the mean of both.

    Raises:
        ConfigError: the expression reads no column, fails, or no answer has a mark in both.
    """
    marks = _known_marks(job, truth)
    steps = [
        {"name": class_short_name(step["_target_"]), **step}
        for step in json.loads(Samples(job.path, config).grades.steps or "[]")
    ]
    # The option `flip` of the step Verdict: the judge has seen two answers in both orders.
    in_both_orders = any(step.get("flip") for step in steps)
    panel = next((step for step in steps if step["name"] == "Majority"), None)
    columns = [] if panel is None else [*panel["marks"], panel["own"]]
    agreements = [
        _agreement(job, replace(config, column=column), marks, in_both_orders=in_both_orders)
        for column in (config.column, *columns)
    ]
    if agreements[0] is None:
        raise ConfigError(
            f"{_KEY} {truth}: no answer has a mark in both (above a half is right, below wrong)"
        )
    judges = zip([name.removesuffix(f"_{MARK}") for name in columns], agreements[1:], strict=True)
    return JudgeAgreements(agreements[0], {name: one for name, one in judges if one is not None})


def _known_marks(job: GradedJob, truth: str) -> dict[tuple[str, int], _KnownMark]:
    """(row id, sample) → the known mark of the answer that this row judges."""
    expression = RowExpression(_KEY, truth, job.columns)
    read = [*_IDS, *expression.names, *([_SOURCE] if _SOURCE in job.columns else [])]
    marks = {}
    for batch in job.batches(list(dict.fromkeys(read))):
        for row in batch.to_pylist():
            try:
                value = expression.value(row, row["row_id"])
            except ExpressionFailed as error:
                raise ConfigError(f"{error} (in the row {row['row_id']})") from None
            answer = str(row.get(_SOURCE, row["row_id"]))
            marks[row["row_id"], row["sample_index"]] = _KnownMark(value, answer)
    return marks


def _agreement(
    job: GradedJob,
    config: ScoreConfig,
    known_marks: Mapping[tuple[str, int], _KnownMark],
    *,
    in_both_orders: bool,
) -> Agreement | None:
    """The agreement of the marks in `config.column`."""
    table = Samples(job.path, config).table()
    ids = zip(*(table[name].to_pylist() for name in _IDS), strict=True)
    judged, true_marks = table[MARK].to_pylist(), [known_marks[key] for key in ids]
    if in_both_orders:
        judged, true_marks = _by_answer(judged, true_marks)
    return agreement(judged, [mark.value for mark in true_marks])


def _by_answer(
    judged: Sequence[float | None], true_marks: Sequence[_KnownMark]
) -> tuple[list[float | None], list[_KnownMark]]:
    """One mark of the judge for each answer: the mean of those in both orders, or None if one of
    them is missing; and the known mark of each answer."""
    orders: dict[str, list[float | None]] = {}
    first: dict[str, _KnownMark] = {}
    for mark, true_mark in zip(judged, true_marks, strict=True):
        orders.setdefault(true_mark.answer, []).append(mark)
        first.setdefault(true_mark.answer, true_mark)
    means: list[float | None] = []
    for marks in orders.values():
        present = [mark for mark in marks if mark is not None]
        means.append(sum(present) / len(present) if len(present) == len(marks) else None)
    return means, list(first.values())
