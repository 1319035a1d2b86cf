"""Estimates how many tokens a running job still has to generate, and how long that takes.

The lengths of future answers are estimated from the answers that have finished and from those that
run. `Progress` shows the time left that `TimeLeft` computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


_NEWEST = 0.2
"""The last part of the lengths so far. From it comes the rate at which answers beyond the longest
row end."""
_GRID = 65
"""Grid points of the survival curve from which the expected longest answer is computed."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """The tokens that are still to be generated.

    Attributes:
        tokens: the sum over all running and waiting rows.
        drain: how many tokens the longest of the last rows is expected to have more than their
            mean.
    """

    tokens: float
    drain: float


class AnswerLengths:
    """The lengths of the answers of a job, of which the short ones finish first.

    The mean of the finished rows is too small while long ones still run. So running rows count as
    rows of at least their present length: the product-limit estimator of Kaplan and Meier (1958).
    At each length at which rows have finished, it multiplies the share of longer answers by the
    share of rows of that length or more that went on. It assumes that rows start in an order
    unrelated to their lengths, such as the data set's. Beyond the longest row, answers end with the
    mean probability per token of the last fifth of the lengths so far, up to `longest` tokens.
    """

    def __init__(self, longest: int) -> None:
        self._finished = np.zeros(longest + 1, np.int64)  # how many answers had each length
        self._longest = longest

    def add(self, length: int) -> None:
        """Note a finished answer."""
        self._finished[min(length, self._longest)] += 1

    def remaining(self, running: Ints, waiting: float) -> Remaining | None:
        """Return what is still to be generated, given [B] tokens of the running rows and the number
        of rows that wait; None before the first row has finished."""
        if not self._finished.any():
            return None
        running = np.minimum(running, self._longest - 1)
        longer = self._longer(running)
        # to_come[x] is the sum of longer[x:]. Divided by longer[x] it is the expected rest of a row
        # that has x tokens.
        to_come = np.cumsum(longer[::-1])[::-1]
        rests = to_come[running] / longer[running]
        tokens = float(rests.sum()) + waiting * float(to_come[0])
        return Remaining(tokens, self._drain(longer, to_come, running, waiting > 0))

    def _drain(
        self,
        longer: npt.NDArray[np.float64],
        to_come: npt.NDArray[np.float64],
        running: Ints,
        waits: bool,
    ) -> float:
        """Return `Remaining.drain`: the expected largest of the remaining lengths of B rows, less
        their mean.

        If rows wait, the last rows are not those that run now, and the lengths left at any time are
        those of a row at a random point of its answer; otherwise they are the rests of the running
        rows. The expected value of a length is the sum of the probabilities that it is over x, for
        all x; here over a grid of x.
        """
        if not len(running):
            return 0.0
        # shares[b, g] is the probability that row b has more than after[g] tokens left.
        after = np.linspace(0, self._longest, _GRID).astype(np.int64)
        if waits:
            share = np.append(to_come, 0.0)[after] / to_come[0]  # [G]
            shares = np.repeat(share[None, :], len(running), axis=0)
        else:
            padded = np.append(longer, np.zeros(self._longest + 1))
            shares = padded[running[:, None] + after] / longer[running, None]  # [B, G]
        # The largest is over x unless all of them are not.
        largest = 1 - np.prod(1 - np.minimum(shares, 1), axis=0)
        return float(np.trapezoid(largest - shares.mean(axis=0), after))

    def _longer(self, running: Ints) -> npt.NDArray[np.float64]:
        """Return [longest], the share of answers that have more tokens than the index."""
        ended, limit = self._finished[:-1], self._longest  # ended[x]: answers of x tokens
        counts = self._finished + np.bincount(running, minlength=limit + 1)
        at_risk = np.cumsum(counts[::-1])[::-1][:-1]  # rows with x tokens or more so far
        hazard = ended / np.maximum(at_risk, 1)  # the probability to end at x tokens
        longest_finished = int(np.flatnonzero(self._finished)[-1])
        longest_running = int(running.max(initial=-1))
        if longest_finished < limit and longest_running >= longest_finished:
            # No row has gone further: take the rate of the last lengths. 0.5 and 1 keep it above 0.
            newest = slice(int(longest_running * (1 - _NEWEST)), longest_running + 1)
            rate = (ended[newest].sum() + 0.5) / (at_risk[newest].sum() + 1)
            hazard[longest_running + 1 :] = rate
        return np.cumprod(1.0 - hazard).astype(np.float64)


class TimeLeft:
    """Estimates when a running job will be over.

    The tokens that are to come (`AnswerLengths`) are taken to need as much time each as those of
    the last half of the job, which read prompts in the same proportion.

    At the end no rows wait, and the batch shrinks until the longest row ends. A GPU takes as long
    for a step of few rows as for one of many; a CPU does not. `batch_share`, the time of a step of
    one row as a share of a full batch's, says how much of that end is added.
    """

    def __init__(self, rows: int, longest: int, batch_share: float, now: float) -> None:
        self._left = rows
        self._lengths = AnswerLengths(longest)
        self._batch_share = batch_share
        self._samples = deque([(now, 0)])
        self._started = now

    def add(self, length: int | None) -> None:
        """Note a row that has finished, with the tokens of its answer; None if it has no answer."""
        self._left -= 1
        if length:
            self._lengths.add(length)

    def seconds(self, now: float, generated: int, running: Ints) -> float | None:
        """Estimated seconds left at `now`; None until a rate is known.

        Args:
            generated: tokens so far, of finished and running rows.
            running: [B] tokens of each running row.
        """
        samples = self._samples
        samples.append((now, generated))
        while len(samples) > 2 and samples[1][0] <= (now + self._started) / 2:
            samples.popleft()
        then, before = samples[0]
        to_come = self._lengths.remaining(running, max(self._left - len(running), 0))
        if to_come is None or now <= then or generated <= before:
            return None
        rate = (generated - before) / (now - then)
        drain = to_come.drain * len(running) / rate
        return to_come.tokens / rate + self._batch_share * drain
