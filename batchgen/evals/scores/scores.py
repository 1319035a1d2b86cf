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

# The kinds of samples whose shares are reported, see `Marks.has`.
RATES = ("no_answer", "truncated", "error", "grade_error")


def default_ks(marks: Marks) -> tuple[int, ...]:
    """1, 2, 4, … up to the largest number of samples of a question, and that number. If a rule
    about the width of an interval ended the rows, up to the fewest samples that a row can have."""
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
    """All metrics of a job and of its subsets, as values for JSON (null for NaN).

    - `questions`, `samples`: their numbers; `marked`: the number of samples with a mark.
    - `avg`: the mean mark, with `population` (new questions of the same kind) and `same_questions`
      (the same questions sampled again; its values are null if they are unknown).
    - `pass@k`, `pass^k` and `maj@k` for each k, with the interval `population`; null if no question
      has k marks. `questions` is the number of questions that have.
    - `chance`: the mean mark of guesses, if the choices of all questions are known.
    - `rates`: the shares of all samples that are no_answer, truncated, error and grade_error. In a
      truncated text the answer may be just the last number before the cut: `truncated_with_answer`
      is the share of samples that are truncated and have an answer. `cut_texts` says how truncated
      texts count.
    - `bounds`: the mean mark if all samples without a mark were wrong, or right.
    - `subsets`: the same entries for each subset, by name.

    Numbers of another column than mark have no pass@k, pass^k, maj@k, chance and bounds, because no
    number is known to be right. `column` is then the name of the column, and `range` has the least
    and the largest number.

    Args:
        ks: the sizes k; None takes `default_ks`.
        cut_texts: how truncated texts count.
        column: the column from which `marks` come.

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
    """The entries of `compute_scores` for a job or a subset, without `subsets`."""
    has_marks = column == MARK
    mean = avg_at(marks)
    values: dict[str, Any] = {} if has_marks else {"column": column}
    values |= {
        "questions": len(marks.row_ids),
        "samples": int(marks.present.sum()),
        "marked": int(marks.num_samples.sum()),
        "avg": {
            **_metric(mean, marks, bounded=has_marks),
            "same_questions": _plain(same_questions_interval(marks, bounded=has_marks)),
        },
    }
    if has_marks:
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
    if has_marks:
        values["bounds"] = [_filled_mean(marks, 0.0), _filled_mean(marks, 1.0)]
    elif values["marked"]:
        values["range"] = [float(np.nanmin(marks.marks)), float(np.nanmax(marks.marks))]
    return values


def _metric(values: Floats, marks: Marks, *, bounded: bool = True) -> dict[str, Any]:
    """The entry of one metric, from its values for each question [Q]."""
    interval = (population_interval if bounded else mean_interval)(values, marks.clusters)
    return {
        "value": None if interval is None else interval.estimate,
        "questions": int(np.isfinite(values).sum()),
        "population": _plain(interval),
    }


def _filled_mean(marks: Marks, mark: float) -> float:
    """The mean over questions of their mean marks, if every unknown mark were `mark`."""
    filled = np.where(np.isfinite(marks.marks) | ~marks.present, marks.marks, mark)
    return float(avg_at(replace(marks, marks=filled)).mean())


def _plain(interval: Interval | None) -> dict[str, float | None] | None:
    """The error and the bounds of an interval, with null for NaN."""
    if interval is None:
        return None
    values = asdict(interval)
    del values["estimate"]
    return {key: None if math.isnan(value) else value for key, value in values.items()}
