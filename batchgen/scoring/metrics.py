"""Metrics of an exam that was sat several times: avg@k, pass@k, pass^k and maj@k, per question.

A sample counts as passed if its mark is 1. Samples without a mark (errors of the row or of the
grader) are left out: they say nothing about the model. Each function returns one value for each
question [Q], NaN where there are fewer than k samples with a mark; the metric is their mean.
"""

from __future__ import annotations

import numpy as np

from batchgen.scoring.marks import NO_KEY, Floats, Ints, Marks


def avg_at(marks: Marks) -> Floats:
    """The mean mark of each question. [Q]"""
    n = marks.num_samples
    return np.where(n > 0, np.nansum(marks.marks, 1) / np.maximum(n, 1), np.nan)


def pass_at(marks: Marks, k: int) -> Floats:
    """The chance that at least one of k of the samples, drawn without replacement, passed. [Q]

    That is 1 − C(n−c, k) / C(n, k) of n samples, c of which passed (Chen et al., arXiv 2107.03374).
    """
    passed, n = _passed(marks)
    return np.where(n >= k, 1 - _all_of(n - passed, n, k), np.nan)


def pass_all(marks: Marks, k: int) -> Floats:
    """The chance that all of k of the samples, drawn without replacement, passed ("pass^k"). [Q]

    That is C(c, k) / C(n, k) (Yao et al., arXiv 2406.12045).
    """
    passed, n = _passed(marks)
    return np.where(n >= k, _all_of(passed, n, k), np.nan)


def maj_at(marks: Marks, k: int) -> Floats:
    """The mark of the answer that most of k samples give. [Q]

    Samples without an answer do not vote; where none votes, the mark is 0. Of answers with equally
    many votes the mean counts, and of one answer the mean of its marks. Of more than k samples each
    full run of k (0 to k−1, k to 2k−1, …) is one vote, and the votes' mean counts.
    """
    assert k >= 1
    values = np.full(len(marks.row_ids), np.nan)
    for question, (row, n) in enumerate(_rows(marks)):
        marked = np.isfinite(row)
        mine, keys = row[marked], marks.keys[question][marked]
        votes = [_vote(mine[i : i + k], keys[i : i + k]) for i in range(0, n - k + 1, k)]
        if votes:
            values[question] = np.mean(votes)
    return values


def _vote(marks: Floats, keys: Ints) -> float:
    voting = keys != NO_KEY
    if not voting.any():
        return 0.0
    answers, counts = np.unique(keys[voting], return_counts=True)
    winners = answers[counts == counts.max()]
    return float(np.mean([marks[keys == winner].mean() for winner in winners]))


def _passed(marks: Marks) -> tuple[Ints, Ints]:
    """How many samples passed and how many have a mark. [Q], [Q]"""
    return (marks.marks == 1).sum(1), marks.num_samples


def _all_of(chosen: Ints, n: Ints, k: int) -> Floats:
    """C(chosen, k) / C(n, k) as a product, which does not overflow. [Q], 0 where chosen < k."""
    assert k >= 1
    ratio = np.ones(len(n))
    for i in range(k):
        ratio *= np.maximum(chosen - i, 0) / np.maximum(n - i, 1)
    return ratio


def _rows(marks: Marks) -> list[tuple[Floats, int]]:
    """Each question's marks and how many there are."""
    return list(zip(marks.marks, map(int, marks.num_samples), strict=True))
