"""Metrics of repeated samples, per question: avg@k, pass@k, pass^k and maj@k.

A sample counts as passed if its mark is 1. Samples without a mark (errors of the row or of the
grader) are left out, because they say nothing about the model. Each function returns one value for
each question [Q], NaN if fewer than k samples have a mark; the metric is the mean of these values.
If rows ended by a rule about the width of an interval (`Marks.stopped`), the values are unbiased
under that rule, and NaN for k above the fewest samples that a row can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import numpy as np

from batchgen.evals.scores.marks import NO_KEY, Floats, Ints, Marks


def avg_at(marks: Marks) -> Floats:
    """The mean mark of each question. [Q]"""
    if marks.stopped is not None:
        return marks.stopped.means(marks.marks)
    n = marks.num_samples
    return np.where(n > 0, np.nansum(marks.marks, 1) / np.maximum(n, 1), np.nan)


def pass_at(marks: Marks, k: int) -> Floats:
    """The chance that at least one of k of the samples, drawn without replacement, passed. [Q]

    That is 1 − C(n−c, k) / C(n, k) of n samples, c of which passed (Chen et al., arXiv 2107.03374).
    """
    if marks.stopped is not None:
        return 1 - marks.stopped.all_of(marks.marks != 1, marks.marks, k)
    passed, n = _passed(marks)
    return np.where(n >= k, 1 - _all_of(n - passed, n, k), np.nan)


def pass_all(marks: Marks, k: int) -> Floats:
    """The chance that all of k of the samples, drawn without replacement, passed ("pass^k"). [Q]

    That is C(c, k) / C(n, k) (Yao et al., arXiv 2406.12045).
    """
    if marks.stopped is not None:
        return marks.stopped.all_of(marks.marks == 1, marks.marks, k)
    passed, n = _passed(marks)
    return np.where(n >= k, _all_of(passed, n, k), np.nan)


def maj_at(marks: Marks, k: int) -> Floats:
    """The mark of the answer that most of k samples give. [Q]

    Samples without an answer do not vote; if no sample votes, the mark is 0. If answers have
    equally many votes, the mean of their marks counts; the mark of one answer is the mean over its
    samples. Of more than k samples, each full run of k (0 to k−1, k to 2k−1, …) is one vote, and
    the mean over the votes counts. If a rule about the width of an interval ended the rows, only
    the samples that every row has are taken.
    """
    assert k >= 1
    if marks.marks.shape[1] == k == 1:  # one vote
        voted = np.where(marks.keys[:, 0] == NO_KEY, 0.0, marks.marks[:, 0])
        return np.where(marks.num_samples == 1, voted, np.nan)
    values = np.full(len(marks.row_ids), np.nan)
    fewest = None if marks.stopped is None else marks.stopped.rule.fewest
    # Plain lists: a question has few samples, for which numpy takes ten times as long.
    rows = zip(marks.marks[:, :fewest].tolist(), marks.keys[:, :fewest].tolist(), strict=True)
    for question, (row, keys) in enumerate(rows):
        pairs = [(mark, key) for mark, key in zip(row, keys, strict=True) if not isnan(mark)]
        votes = [_vote(pairs[i : i + k]) for i in range(0, len(pairs) - k + 1, k)]
        if votes:
            values[question] = sum(votes) / len(votes)
    return values


def _vote(pairs: Sequence[tuple[float, int]]) -> float:
    """The mark of the answer that most samples give, from pairs of mark and answer."""
    by_answer: dict[int, list[float]] = {}
    for mark, key in pairs:
        if key != NO_KEY:
            by_answer.setdefault(key, []).append(mark)
    if not by_answer:
        return 0.0
    highest = max(map(len, by_answer.values()))
    winners = [sum(marks) / highest for marks in by_answer.values() if len(marks) == highest]
    return sum(winners) / len(winners)


def _passed(marks: Marks) -> tuple[Ints, Ints]:
    """The number of samples that passed, and of those that have a mark. [Q], [Q]"""
    return (marks.marks == 1).sum(1), marks.num_samples


def _all_of(chosen: Ints, n: Ints, k: int) -> Floats:
    """C(chosen, k) / C(n, k) as a product, which does not overflow. [Q], 0 where chosen < k."""
    assert k >= 1
    ratio = np.ones(len(n))
    for i in range(min(k, int(n.max(initial=0)) + 1)):  # then the product is 0
        ratio *= np.maximum(chosen - i, 0) / np.maximum(n - i, 1)
    return ratio
