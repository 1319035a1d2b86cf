"""Computes all scores of a job as plain values, for metrics.json, the summary and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from batchgen.config.groups.output_config import CutTexts
from batchgen.evals.graders.step import MARK
from batchgen.evals.scores.intervals import (
    Interval,
    mean_interval,
    population_interval,
    same_questions_interval,
)
from batchgen.evals.scores.marks import Floats, Marks
from batchgen.evals.scores.score_metrics import avg_at, maj_at, pass_all, pass_at
from batchgen.util.errors import ConfigError

RATES = ("no_answer", "truncated", "error", "grade_error")


def default_ks(marks: Marks) -> tuple[int, ...]:
    """1, 2, 4, … up to the largest number of samples of a question, and that number; up to the
    fewest that a question can have where a rule by width ended them."""
    largest = int(marks.present.sum(1).max())
    if marks.stopped is not None:
        largest = min(largest, marks.stopped.rule.fewest)
    powers = [2**i for i in range(largest.bit_length()) if 2**i <= largest]
    return tuple(sorted({*powers, largest}))


def compute_scores(
    marks: Marks,
    ks: Sequence[int] | None = None,
    cut_texts: CutTexts = "as_marked",
    column: str = MARK,
) -> dict[str, Any]:
    """All metrics of a job and of its subsets, as JSON can hold them (null for NaN).

    - `questions` and `samples`: how many there are; `marked`: samples with a mark.
    - `avg`: the mean mark, with `population` (new questions of the same kind) and `same_questions`
      (the same questions sampled again; its values are null where they are unknown).
    - `pass@k`, `pass^k` and `maj@k` for each k, with the interval `population`; null where no
      question has k marks. `questions` says how many have.
    - `chance`: the mean mark of guesses, where the choices of all questions are known.
    - `rates`: of all samples, how many have no_answer, truncated, error and grade_error. Of a text
      that was truncated the answer may be no more than the last number before the cut:
      `truncated_with_answer` says how many have one, and `cut_texts` what they count as.
    - `bounds`: the mean mark if all samples without a mark were wrong, or right.
    - `subsets`: the same for each subset, by name.

    Numbers of another column than mark have no pass@k, pass^k, maj@k, chance and bounds: nobody
    knows which of them is right. `column` names it, and `range` has the least and the largest.

    Args:
        ks: the sizes k; None takes `default_ks`.
        cut_texts: what texts that were truncated count as.
        column: the column that the marks are of.

    Raises:
        ConfigError: a k is below 1.
    """
    sizes = default_ks(marks) if ks is None else tuple(ks)
    if any(k < 1 for k in sizes):
        raise ConfigError(f"k must be at least 1, got {list(sizes)}")
    marks = marks.counting_cut_texts(cut_texts)
    values = {**_score(marks, sizes, column), "cut_texts": cut_texts}
    parts = marks.by_subset()
    values["subsets"] = {name: _score(part, sizes, column) for name, part in parts.items()}
    return values


def _score(marks: Marks, sizes: tuple[int, ...], column: str) -> dict[str, Any]:
    of_marks = column == MARK
    mean = avg_at(marks)
    values: dict[str, Any] = {} if of_marks else {"column": column}
    values |= {
        "questions": len(marks.row_ids),
        "samples": int(marks.present.sum()),
        "marked": int(marks.num_samples.sum()),
        "avg": {
            **_metric(mean, marks, bounded=of_marks),
            "same_questions": _plain(same_questions_interval(marks, bounded=of_marks)),
        },
    }
    if of_marks:
        for name, function in (("pass@", pass_at), ("pass^", pass_all), ("maj@", maj_at)):
            for k in sizes:
                values[f"{name}{k}"] = _metric(function(marks, k), marks)
        if np.isfinite(marks.chance).all():
            values["chance"] = float(marks.chance.mean())
    total = values["samples"]
    values["rates"] = {kind: int(marks.has(kind).sum()) / total for kind in RATES}
    unanswered = marks.has("no_answer") | marks.has("error") | marks.has("grade_error")
    answered = marks.has("truncated") & ~unanswered
    values["rates"]["truncated_with_answer"] = int(answered.sum()) / total
    if of_marks:
        values["bounds"] = [_filled_mean(marks, 0.0), _filled_mean(marks, 1.0)]
    elif values["marked"]:
        values["range"] = [float(np.nanmin(marks.marks)), float(np.nanmax(marks.marks))]
    return values


def _metric(values: Floats, marks: Marks, *, bounded: bool = True) -> dict[str, Any]:
    interval = (population_interval if bounded else mean_interval)(values, marks.clusters)
    return {
        "value": None if interval is None else interval.estimate,
        "questions": int(np.isfinite(values).sum()),
        "population": _plain(interval),
    }


def _filled_mean(marks: Marks, mark: float) -> float:
    """The mean over questions of their mean marks, with `mark` for those that are not known."""
    filled = np.where(np.isfinite(marks.marks) | ~marks.present, marks.marks, mark)
    return float(avg_at(replace(marks, marks=filled)).mean())


def _plain(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    values = asdict(interval)
    del values["estimate"]
    return {key: None if math.isnan(value) else value for key, value in values.items()}
