"""Chooses how many drafts a step verifies, from how often drafts hold and how long forwards take.

A draft *holds* if the verifier accepts it and all drafts before it in the same row and step.
`ARSpecStrategy` calls `DraftBudget.choose` in every step if its option `adaptive` is on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner

_DECAY = 0.98
"""In each step with drafts, earlier observations are multiplied by this, so that they fade."""
_PRIOR = 0.6
"""The assumed probability that the first draft of a row holds, before any observation."""
_PRIOR_ROWS = 8.0
"""That assumption counts as much as observations of this many rows."""
_PROBE_EVERY = 64
"""After this many steps without drafts, one step drafts again, to see whether drafts hold now."""
_WORTHWHILE = 1.03
"""The smallest relative gain in tokens per second that justifies drafts. A smaller gain could be a
measurement error."""
_CPU_ROWS = (16, 64)
"""The numbers of rows that are timed on a CPU. Fewer than 16 rows cost the same, because matrix
products are padded to multiples of 16."""
_RUNS = 3
"""How often each forward is timed on a GPU; the fastest time is used."""


class Acceptance:
    """How often drafts held recently: the first draft of a row, the second, and so on.

    Attributes:
        skipped: the number of steps without drafts since the last step with drafts.
    """

    def __init__(self) -> None:
        self.skipped = 0
        # For draft j of a row: the number of rows that could have had it in a step, and the number
        # in which it held. Both fade by _DECAY.
        self._offered: list[float] = []
        self._held: list[float] = []

    def observe(self, accepted: npt.NDArray[np.int32], k: int) -> None:
        """Learn from a step of B rows that could have k drafts each, whether or not all were made.

        Args:
            accepted: [B], how many drafts of each row held. Negative numbers count as 0.
        """
        missing = [0.0] * (k - len(self._offered))
        self._offered += missing
        self._held += missing
        held = float(len(accepted))
        counts = np.bincount(np.maximum(accepted, 0), minlength=k + 1).tolist()
        for j in range(len(self._offered)):
            self._offered[j] *= _DECAY
            self._held[j] *= _DECAY
            if j < k:
                held -= counts[j]
                self._offered[j] += len(accepted)
                self._held[j] += held

    def survival(self, k: int) -> list[float]:
        """Estimate, for j = 1 to k, the probability that the first j drafts of a row all hold.
        Returns these k numbers, which do not increase."""
        before, ratio = 1.0, _PRIOR
        out: list[float] = []
        for j in range(k):
            observed = j < len(self._offered)
            offered, held = (self._offered[j], self._held[j]) if observed else (0.0, 0.0)
            # Without observations, a later draft is assumed to hold, given that those before it
            # did, as often as the first draft does.
            share = (held + _PRIOR_ROWS * before * ratio) / (offered + _PRIOR_ROWS)
            before = min(before, share)
            out.append(before)
            ratio = out[0]
        return out


class ForwardSeconds:
    """The seconds of a decode forward as a function of its number of tokens: measured for some
    numbers, and interpolated linearly between them.

    Args:
        tokens: the measured numbers of tokens, ascending.
        seconds: the seconds of a forward of each number.
    """

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        self._tokens = np.array(tokens, np.float64)
        # More tokens never take less time; if they seem to, it is noise.
        self._seconds = np.maximum.accumulate(np.array(seconds))

    @classmethod
    def measure(
        cls,
        runner: ModelRunner,
        max_rows: int,
        widths: Sequence[int],
        run: Callable[[ModelRunner, ModelInputs], object] = ModelRunner.decode,
    ) -> ForwardSeconds:
        """Time decode forwards of a model. Their rows own only the scratch block, so their contexts
        are empty."""
        # On a CPU the time grows linearly with the rows, and forwards are slow, so only two sizes
        # are timed.
        cpu = runner.device.type == "cpu"
        rows = [n for n in (1, 8, 32, 64, 128) if n < max_rows]
        shapes = [(n, 1) for n in [*rows, max_rows]] + [(max_rows, w) for w in widths if w > 1]
        if cpu:
            shapes = [(n, 1) for n in _CPU_ROWS]
        times: dict[int, float] = {}
        for n, width in shapes:
            inputs = runner.scratch_inputs(np.full(n, width))
            work = partial(run, runner, inputs)
            work()
            runs = 1 if cpu else _RUNS
            times[n * width] = min(_seconds(work, runner.device) for _ in range(runs))
        seconds = runner.model.parallel.agree([times[tokens] for tokens in sorted(times)])
        return cls(sorted(times), seconds)

    def __call__(self, tokens: int) -> float:
        """Return the seconds of a forward of this many tokens. Beyond the largest measured number,
        the last slope is extended."""
        measured, seconds = self._tokens, self._seconds
        if tokens <= measured[-1] or len(measured) == 1:
            return float(np.interp(tokens, measured, seconds))
        slope = (seconds[-1] - seconds[-2]) / (measured[-1] - measured[-2])
        return float(seconds[-1] + slope * (tokens - measured[-1]))


DraftCosts = Callable[[int, int], float]
"""Estimates the seconds that a proposer takes in a step, given the number of rows and of drafts per
row; 0 for a proposer without a model."""


class DraftBudget:
    """Chooses the number of drafts that yields the most tokens per second.

    Args:
        lengths: the numbers of drafts to choose from, ascending from 0.
        costs: the seconds of the target's forward.
        draft_costs: the seconds of the proposer.
    """

    def __init__(
        self, lengths: Sequence[int], costs: ForwardSeconds, draft_costs: DraftCosts
    ) -> None:
        self._lengths = lengths
        self._costs = costs
        self._draft_costs = draft_costs
        self._speeds: dict[int, list[float]] = {}

    def choose(self, num_rows: int, acceptance: Acceptance) -> int:
        """Return how many drafts each of `num_rows` rows has in the next step."""
        if not num_rows:
            return 0
        if num_rows not in self._speeds:
            self._speeds[num_rows] = self._speeds_of(num_rows)
        speeds, longest = self._speeds[num_rows], self._lengths[-1]
        gains = _gains(self._lengths, speeds, acceptance.survival(longest))
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] > _WORTHWHILE:
            return self._lengths[best]
        hopeful = _gains(self._lengths, speeds, [1.0] * longest)[1] > _WORTHWHILE
        probe = hopeful and acceptance.skipped >= _PROBE_EVERY
        return self._lengths[1] if probe else 0

    def _speeds_of(self, num_rows: int) -> list[float]:
        """Return, for each number of drafts, the time of a step without drafts divided by the time
        of a step with that many."""
        seconds = [
            self._costs(num_rows * (1 + k)) + self._draft_costs(num_rows, k) for k in self._lengths
        ]
        return [seconds[0] / step_seconds for step_seconds in seconds]


def _gains(
    lengths: Sequence[int], speeds: Sequence[float], survival: Sequence[float]
) -> list[float]:
    """Return the expected tokens per second for each number of drafts, relative to none."""
    expected = list(itertools.accumulate(survival, initial=1.0))
    return [expected[k] * speed for k, speed in zip(lengths, speeds, strict=True)]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Run `work`, and return the seconds until the device was done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
