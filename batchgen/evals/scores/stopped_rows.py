"""Unbiased scores of rows that were sampled until the interval of their valid share was narrow.

A row gets more samples if its samples disagree, so the number of samples depends on which are
valid. The plain share of valid samples is therefore biased (by up to three points at a width of
0.3, docs/design/stopped_rows.md).

The unbiased estimates follow from one fact. Take a row that ended with n samples, K of them valid.
All orders of these samples that do not end earlier are equally likely (each has probability p^K
(1−p)^(n−K)). The share of these orders whose first sample is valid is therefore an unbiased
estimate of p (Girshick, Mosteller and Savage 1946, Ann. Math. Stat. 17, 13). In the same way, the
orders give an unbiased estimate for anything about the first k samples, for any k up to the fewest
samples that a row can have. Marks may differ from validity: given the order, the marks of valid
samples are exchangeable, and so are those of the other samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.storage.shards.enough import Bools, Enough, Floats


@lru_cache(maxsize=4096)
def first_valid(rule: Enough, n: int, valid: int) -> tuple[Floats, ...]:
    """The distribution of the number of valid samples among the first k, for a row that ended with
    `n` samples of which `valid` are valid.

    Returns:
        For each k up to n and up to the fewest samples that a row can have: the probabilities of 0,
        1, …, k [k+1]. NaN if no order of the samples ends at n.
    """
    # ways[j]: in how many ways an order whose first k samples have j valid ones can go on to the
    # end, without ending earlier. At k = n there is one way.
    ways: Floats = np.zeros(n + 1)
    ways[valid] = 1.0
    results = list[Floats]()
    for k in range(n, -1, -1):
        if k < n:
            # Halved at each step, so that the numbers of orders stay within floats.
            ways = (ways[: k + 1] + ways[1 : k + 2]) / 2
            if k >= rule.fewest:
                counts = np.arange(k + 1)
                ways[rule.is_reached(counts, np.full(k + 1, k))] = 0.0  # the row would have ended
        if k <= rule.fewest:
            orders = ways * [float(comb(k, j)) for j in range(k + 1)]
            total = orders.sum()
            results.append(orders / total if total else np.full(k + 1, np.nan))
    return tuple(reversed(results))


@dataclass(frozen=True)
class _Run:
    """The samples of one row of one job.

    Attributes:
        rule: the rule that ended the row.
        marks: [n], NaN if unknown.
        valid: [n] whether each sample is valid.
    """

    rule: Enough
    marks: Floats
    valid: Bools

    def drawn(self, k: int) -> Floats:
        """The probabilities that 0, 1, …, k of the first k samples are valid. [k+1]"""
        return first_valid(self.rule, len(self.marks), int(self.valid.sum()))[k]

    def mean(self) -> float:
        """An unbiased estimate of the mean mark; unknown marks are left out."""
        valid_share = float(self.drawn(1)[1])
        num_valid = int(self.valid.sum())
        others = len(self.valid) - num_valid
        weights = np.where(
            self.valid, valid_share / max(num_valid, 1), (1 - valid_share) / max(others, 1)
        )
        known = np.isfinite(self.marks)
        total = float(weights[known].sum())
        return float((weights * self.marks)[known].sum()) / total if total else np.nan

    def variance(self) -> float:
        """An unbiased estimate of the variance of `mean`. It can be negative; NaN if it is unknown.

        It is the square of `mean` minus an unbiased estimate of the squared mean mark: the mean
        product of the marks of two samples.
        """
        if len(self.marks) < 2:
            return np.nan
        others, valid = _sums(self.marks[~self.valid]), _sums(self.marks[self.valid])
        # Pairs of samples by the number of valid ones in them, 0, 1 and 2: the sum of the products
        # of their marks, the number of pairs whose marks are known, and that of all pairs.
        products = (
            others.total**2 - others.squares,
            others.total * valid.total,
            valid.total**2 - valid.squares,
        )
        pairs = _num_pairs(others.number, valid.number)
        all_pairs = _num_pairs(int((~self.valid).sum()), int(self.valid.sum()))
        # The probability that the first two samples are one certain pair.
        chances = [c / max(n, 1) for c, n in zip(self.drawn(2).tolist(), all_pairs, strict=True)]
        known = sum(chance * n for chance, n in zip(chances, pairs, strict=True))
        product_mean = sum(
            chance * product for chance, product in zip(chances, products, strict=True)
        )
        return float(self.mean() ** 2 - product_mean / known) if known else np.nan

    def all_of(self, hits: Bools, k: int) -> float:
        """The probability that all of the first k samples are `hits`, given that the marks of all k
        are known. NaN if k is above the fewest samples that a row can have, or too few marks are
        known."""
        if k > min(self.rule.fewest, len(self.marks)):
            return np.nan
        known = np.isfinite(self.marks)
        weighted = total = 0.0
        for j, chance in enumerate(self.drawn(k).tolist()):
            if chance:
                weighted += chance * self._chance(hits & known, j, k)
                total += chance * self._chance(known, j, k)
        return weighted / total if total else np.nan

    def _chance(self, chosen: Bools, j: int, k: int) -> float:
        """The probability that k samples are all `chosen`, if j of them are valid."""
        groups = (self.valid, j), (~self.valid, k - j)
        return float(
            np.prod([comb(int((chosen & g).sum()), m) / comb(int(g.sum()), m) for g, m in groups])
        )


@dataclass(frozen=True, eq=False)
class StoppedRows:
    """The samples of Q rows that a rule about the width of an interval ended.

    Attributes:
        rule: the rule.
        present: [Q, K] whether the row has the sample.
        valid: [Q, K] whether it is valid.
        starts: the index along K where the samples of each job begin; several jobs can count
            together.
    """

    rule: Enough
    present: Bools
    valid: Bools
    starts: tuple[int, ...] = (0,)

    def select(self, questions: npt.NDArray[np.int64]) -> StoppedRows:
        """Only the rows of these questions."""
        return replace(self, present=self.present[questions], valid=self.valid[questions])

    def means(self, marks: Floats) -> Floats:
        """Unbiased estimates of mean marks, from marks [Q, K]; NaN if no mark of a row is known.
        [Q]"""
        return np.array([_mean([run.mean() for run in runs]) for runs in self._rows(marks)])

    def variances(self, marks: Floats) -> Floats:
        """Unbiased estimates of the variances of `means`. [Q]"""
        variances = []
        for runs in self._rows(marks):
            values = [run.variance() for run in runs]
            variances.append(_mean(values) / max(len(values), 1))
        return np.array(variances)

    def all_of(self, hits: Bools, marks: Floats, k: int) -> Floats:
        """The probability that all of k samples of a row with marks are `hits` [Q, K]. [Q]"""
        chances = []
        for index, runs in enumerate(self._rows(marks)):
            row_hits = hits[index, self.present[index]]
            chances.append(runs[0].all_of(row_hits, k) if len(runs) == 1 else np.nan)
        return np.array(chances)

    def _rows(self, marks: Floats) -> Iterator[list[_Run]]:
        """Yield for each row the samples of each job, if some have a mark."""
        parts = [slice(a, b) for a, b in pairwise((*self.starts, marks.shape[1]))]
        for row, present, valid in zip(marks, self.present, self.valid, strict=True):
            yield [
                _Run(self.rule, row[part][there], valid[part][there])
                for part in parts
                if (there := present[part]).any() and np.isfinite(row[part][there]).any()
            ]


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.mean(values)) if len(values) else np.nan


class _Sums(NamedTuple):
    """The number of known marks, their sum, and the sum of their squares."""

    number: int
    total: float
    squares: float


def _sums(marks: Floats) -> _Sums:
    known = marks[np.isfinite(marks)]
    return _Sums(len(known), float(known.sum()), float(np.square(known).sum()))


def _num_pairs(others: int, valid: int) -> tuple[int, int, int]:
    """The numbers of pairs with 0, 1 and 2 valid samples; pairs of one kind are counted in both
    orders."""
    return others * (others - 1), others * valid, valid * (valid - 1)
