"""How many drafts a step should verify, from what they cost and how often they hold."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner

_DECAY = 0.98
"""Of what was learned, per step."""
_PRIOR = 0.6
_PRIOR_ROWS = 8.0
"""Until more rows than that were seen, drafts are thought to hold as often as that."""
_PROBE_EVERY = 64
"""Steps without drafts after which one tries again whether they hold by now."""
_WORTHWHILE = 1.03
"""The gain below which a measurement's error could make drafts a loss."""
_CPU_ROWS = (16, 64)
"""Fewer cost as much as 16, to which products are filled up."""
_RUNS = 3


class Acceptance:
    """How often drafts held lately, by their place in the run of a row.

    Attributes:
        skipped: steps since the last one with drafts.
    """

    def __init__(self) -> None:
        self.skipped = 0
        # By place: rows that had room for a draft there, and those whose drafts held up to it.
        self._offered: list[float] = []
        self._held: list[float] = []

    def observe(self, accepted: npt.NDArray[np.int32], k: int) -> None:
        """Learn from a step of k places for drafts in each row, filled or not.

        Args:
            accepted: [B], how many a row kept; less than 0 where it failed.
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
        """[k]: how likely all drafts up to each place hold."""
        before, ratio = 1.0, _PRIOR
        out: list[float] = []
        for j in range(k):
            known = j < len(self._offered)
            offered, held = (self._offered[j], self._held[j]) if known else (0.0, 0.0)
            # Where little is known, a draft holds as often as the first does.
            share = (held + _PRIOR_ROWS * before * ratio) / (offered + _PRIOR_ROWS)
            before = min(before, share)
            out.append(before)
            ratio = out[0]
        return out


class StepCosts:
    """Seconds of a forward, by its tokens: measured, between that linear."""

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        self._tokens = np.array(tokens, np.float64)
        # More tokens never cost less; what looks so is noise.
        self._seconds = np.maximum.accumulate(np.array(seconds))

    @classmethod
    def measure(cls, runner: ModelRunner, max_rows: int, widths: Sequence[int]) -> StepCosts:
        """Time decode forwards on the scratch block, with the head; contexts are empty."""
        # A CPU's time grows with the tokens from few rows on, and is not to be wasted here.
        cpu = runner.device.type == "cpu"
        rows = [n for n in (1, 8, 32, 64, 128) if n < max_rows]
        shapes = [(n, 1) for n in [*rows, max_rows]] + [(max_rows, w) for w in widths if w > 1]
        if cpu:
            shapes = [(n, 1) for n in _CPU_ROWS]
        times: dict[int, float] = {}
        for n, width in shapes:
            inputs = ModelInputs.on_scratch(np.full(n, width), 1, runner.device)
            runner.decode(inputs)
            times[n * width] = min(_seconds(runner, inputs) for _ in range(1 if cpu else _RUNS))
        return cls(sorted(times), [times[tokens] for tokens in sorted(times)])

    def __call__(self, tokens: int) -> float:
        known, seconds = self._tokens, self._seconds
        if tokens <= known[-1] or len(known) == 1:
            return float(np.interp(tokens, known, seconds))
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        return float(seconds[-1] + slope * (tokens - known[-1]))


class DraftBudget:
    """Which number of drafts yields most tokens per second.

    Args:
        lengths: to choose from, ascending from 0.
        costs: of the model.
        draft_costs: of the draft model, one forward of all rows for each draft.
    """

    def __init__(
        self, lengths: Sequence[int], costs: StepCosts, draft_costs: StepCosts | None
    ) -> None:
        self._lengths = lengths
        self._costs = costs
        self._draft_costs = draft_costs
        self._speeds: dict[int, list[float]] = {}

    def choose(self, num_rows: int, acceptance: Acceptance) -> int:
        """Drafts of each of so many rows in the next step."""
        if not num_rows:
            return 0
        if num_rows not in self._speeds:
            self._speeds[num_rows] = self._speeds_of(num_rows)
        speeds, most = self._speeds[num_rows], self._lengths[-1]
        gains = _gains(self._lengths, speeds, acceptance.survival(most))
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] > _WORTHWHILE:
            return self._lengths[best]
        hopeful = _gains(self._lengths, speeds, [1.0] * most)[1] > _WORTHWHILE
        probe = hopeful and acceptance.skipped >= _PROBE_EVERY
        return self._lengths[1] if probe else 0

    def _speeds_of(self, num_rows: int) -> list[float]:
        """Steps with each number of drafts in the time of one without, as a share."""
        plain = self._costs(num_rows)
        drafting = self._draft_costs(num_rows) if self._draft_costs is not None else 0.0
        return [plain / (self._costs(num_rows * (1 + k)) + k * drafting) for k in self._lengths]


def _gains(
    lengths: Sequence[int], speeds: Sequence[float], survival: Sequence[float]
) -> list[float]:
    """Tokens per second with so many drafts, relative to none."""
    expected = list(itertools.accumulate(survival, initial=1.0))
    return [expected[k] * speed for k, speed in zip(lengths, speeds, strict=True)]


def _seconds(runner: ModelRunner, inputs: ModelInputs) -> float:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    start = time.perf_counter()
    runner.decode(inputs)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter() - start
