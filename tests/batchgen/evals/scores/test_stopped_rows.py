"""Scores of rows that a rule by width ended: unbiased, by enumeration of all that can happen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.arms.arm_folders import arm_folders
from batchgen.evals.arms.arm_table import arm_table
from batchgen.evals.arms.job_arms import job_arms
from batchgen.evals.scores.intervals import sample_error
from batchgen.evals.scores.marks import Marks
from batchgen.evals.scores.samples import Samples
from batchgen.evals.scores.score_metrics import avg_at, maj_at, pass_all, pass_at
from batchgen.evals.scores.scores import compute_scores, default_ks
from batchgen.evals.scores.stopped_rows import StoppedRows
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.shards.enough import Enough
from tests.support.jobs.until_job import UntilJob

RULE = Enough(None, 5, 0.6)
"""Rows end after three to five samples."""
VALID, RIGHT = 0.3, {True: 0.9, False: 0.2}
"""How often a sample is valid, and how often such a sample, or another one, is right."""


def marks_of(rows: list[tuple[list[bool], list[float]]]) -> Marks:
    """The marks of rows: which samples are valid, and their marks."""
    shape = (len(rows), max(len(valid) for valid, _ in rows))
    marks, there, is_valid = np.full(shape, np.nan), np.zeros(shape, bool), np.zeros(shape, bool)
    for place, (valid, own) in enumerate(rows):
        marks[place, : len(own)], there[place, : len(own)] = own, True
        is_valid[place, : len(own)] = valid
    keys, ids = np.zeros(shape, np.int64), tuple(map(str, range(len(rows))))
    return Marks(
        ids, marks, keys, keys, there, (None,) * len(rows), np.arange(len(rows)),
        np.full(len(rows), np.nan), StoppedRows(RULE, there, is_valid),
    )  # fmt: skip


def every_row() -> Iterator[tuple[list[bool], list[float], float]]:
    """All rows that the rule can end, with their chances."""
    for kinds in itertools.product([False, True], repeat=RULE.most):
        counts = np.cumsum(kinds)
        ends = RULE.is_reached(counts, np.arange(1, RULE.most + 1))
        n = int(np.argmax(ends)) + 1 if ends.any() else RULE.most
        if any(kinds[n:]):
            continue  # one row for all that can follow
        chance = float(np.prod([VALID if kind else 1 - VALID for kind in kinds[:n]]))
        for marks in itertools.product([0.0, 1.0], repeat=n):
            of = [RIGHT[k] if m else 1 - RIGHT[k] for k, m in zip(kinds, marks, strict=False)]
            yield list(kinds[:n]), list(marks), chance * float(np.prod(of))


def test_scores_are_unbiased_whatever_is_marked() -> None:
    rows = list(every_row())
    chances = np.array([chance for *_, chance in rows])
    marks = marks_of([(valid, own) for valid, own, _ in rows])
    assert chances.sum() == pytest.approx(1)
    truth = VALID * RIGHT[True] + (1 - VALID) * RIGHT[False]
    means = avg_at(marks)
    assert chances @ means == pytest.approx(truth, abs=1e-12)
    plain = avg_at(replace(marks, stopped=None))
    assert abs(chances @ plain - truth) > 0.01  # which is why it is not used
    for k in (1, 2, 3):
        assert chances @ pass_at(marks, k) == pytest.approx(1 - (1 - truth) ** k, abs=1e-12)
        assert chances @ pass_all(marks, k) == pytest.approx(truth**k, abs=1e-12)
    assert np.isnan(pass_at(marks, 4)).all() and default_ks(marks) == (1, 2, 3)
    assert pass_at(marks, 1) == pytest.approx(means)
    assert marks.stopped is not None
    variances = marks.stopped.variances(marks.marks)
    assert chances @ variances == pytest.approx(chances @ (means - truth) ** 2, abs=1e-12)


def test_marks_that_are_not_known_are_left_out() -> None:
    nan = float("nan")
    marks = marks_of([([True] * 3, [1.0, nan, 1.0]), ([False] * 3, [nan] * 3),
                      ([True, False, False, True], [1.0, 0.0, nan, 0.0])])  # fmt: skip
    means = avg_at(marks)
    assert means[0] == 1 and np.isnan(means[1]) and 0 < means[2] < 1
    found = compute_scores(marks)
    assert found["bounds"][0] < found["avg"]["value"] < found["bounds"][1]
    assert found["pass@3"]["questions"] == 1  # the first row has two marks
    assert found["pass@1"]["value"] == pytest.approx(found["avg"]["value"])
    error = sample_error(marks)
    assert error is not None and error.variance > 0


def test_votes_are_of_the_samples_that_every_row_has() -> None:
    marks = marks_of([([True, True, False, False], [1.0, 1.0, 0.0, 0.0])])
    assert maj_at(marks, 3).tolist() == [2 / 3] and np.isnan(maj_at(marks, 4)).all()


@pytest.mark.thorough
def test_scores_of_a_job_and_of_jobs_beside_each_other(tmp_path: Path) -> None:
    for seed in (0, 1):
        job = UntilJob(str(tmp_path / f"seed={seed}"), rows=24, width=0.6, most=8, one_of=2)
        config = job.config()
        execute_job(replace(config, sampling=replace(config.sampling, seed=seed)), job.parts())
    table = Samples(tmp_path / "seed=0", ScoreConfig()).table()
    marks = Marks.of_table(table)
    assert marks.stopped is not None and marks.stopped.rule == Enough(None, 8, 0.6)
    sizes = set(marks.present.sum(1).tolist()) - {1}  # rows without a prompt have one error
    assert min(sizes) == 3 and len(sizes) > 1
    assert set(marks.marks[marks.stopped.valid].tolist()) == {1.0}
    found = compute_scores(marks)
    assert found["avg"]["value"] == pytest.approx(found["pass@1"]["value"])
    assert "pass@3" in found and "pass@4" not in found
    arms, column = job_arms(arm_folders([str(tmp_path)]))
    (arm,) = arms
    assert arm.marks is not None and arm.marks.stopped is not None
    assert len(arm.marks.stopped.starts) == 2
    both = np.nanmean([avg_at(Marks.of_table(Samples(tmp_path / f"seed={seed}", ScoreConfig())
                                             .table())) for seed in (0, 1)], axis=0)  # fmt: skip
    np.testing.assert_allclose(avg_at(arm.marks), both)
    (row,) = arm_table(arms, column).rows
    assert row.score is not None and row.score.low < row.score.estimate < row.score.high
