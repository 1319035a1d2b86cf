"""How many drafts a step should verify, from what they cost and how often they hold."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.model_runner import ModelRunner

_DECAY = 0.98
"""Of what was learned, per step."""
_PRIOR = 0.6
_PRIOR_ROWS = 8.0
"""Until more rows than that were seen, drafts are thought to hold as often as that."""
_PROBE_EVERY = 64
"""Steps without drafts after which one tries again whether they hold by now."""
_WORTHWHILE = 1.03
"""The gain below which a measurement's error could make drafts a loss."""
_CPU_ROWS = 64
_RUNS = 3


class Acceptance:
    """How often drafts held lately, by their place in the run of a row.

    Attributes:
        skipped: steps since the last one with drafts.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._offered = np.zeros(0)
        self._held = np.zeros(0)

    def observe(self, accepted: npt.NDArray[np.int32], k: int) -> None:
        """Learn from a step of k places for drafts in each row, filled or not.

        Args:
            accepted: [B], how many a row kept; less than 0 where it failed.
        """
        missing = k - len(self._offered)
        if missing > 0:
            self._offered, self._held = (
                np.pad(counts, (0, missing)) for counts in (self._offered, self._held)
            )
        self._offered *= _DECAY
        self._held *= _DECAY
        self._offered[:k] += len(accepted)
        self._held[:k] += (accepted[:, None] > np.arange(k)).sum(0)

    def survival(self, k: int) -> npt.NDArray[np.float64]:
        """[k]: how likely all drafts up to each place hold."""
        before, out = 1.0, np.empty(k)
        for j in range(k):
            offered, held = (
                (self._offered[j], self._held[j]) if j < len(self._offered) else (0.0, 0.0)
            )
            # Where little is known, a draft holds as often as the one before it did.
            expected = before * (out[0] if j else _PRIOR)
            out[j] = min(before, (held + _PRIOR_ROWS * expected) / (offered + _PRIOR_ROWS))
            before = out[j]
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
        rows = [n for n in (1, 8, 32, 64, 128) if n < max_rows]
        shapes = [(n, 1) for n in [*rows, max_rows]] + [(max_rows, w) for w in widths if w > 1]
        if runner.device.type == "cpu":
            few = min(max_rows, _CPU_ROWS)
            shapes = [(n, 1) for n in rows if n < few] + [(few, 1)]
        times: dict[int, float] = {}
        for n, width in shapes:
            inputs = _scratch_rows(n, width, runner.device)
            runner.decode(inputs)
            times[n * width] = min(_seconds(runner, inputs) for _ in range(_RUNS))
        return cls(sorted(times), [times[tokens] for tokens in sorted(times)])

    def __call__(self, tokens: int) -> float:
        known, seconds = self._tokens, self._seconds
        if tokens <= known[-1] or len(known) == 1:
            return float(np.interp(tokens, known, seconds))
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        return float(seconds[-1] + slope * (tokens - known[-1]))


def best_drafts(
    num_rows: int,
    lengths: Sequence[int],
    acceptance: Acceptance,
    costs: StepCosts,
    draft_costs: StepCosts | None,
) -> int:
    """Which of the numbers of drafts yields most tokens per second.

    Args:
        lengths: ascending from 0.
        costs: of the model.
        draft_costs: of the draft model, one forward of all rows for each draft.
    """
    if not num_rows:
        return 0
    drafting = draft_costs(num_rows) if draft_costs is not None else 0.0
    plain = costs(num_rows)

    def gain(k: int, survival: npt.NDArray[np.float64]) -> float:
        seconds = costs(num_rows * (1 + k)) + k * drafting
        return float((1 + survival[:k].sum()) * plain / seconds)

    most = lengths[-1]
    survival = acceptance.survival(most)
    best = max(lengths, key=lambda k: gain(k, survival))
    if best and gain(best, survival) > _WORTHWHILE:
        return best
    fewest = lengths[min(1, len(lengths) - 1)]
    hopeless = gain(fewest, np.ones(most)) <= _WORTHWHILE
    return fewest if not hopeless and acceptance.skipped >= _PROBE_EVERY else 0


def _scratch_rows(rows: int, width: int, device: torch.device) -> ModelInputs:
    zeros = torch.zeros(rows * width, dtype=torch.int64, device=device)
    return ModelInputs(
        zeros, zeros, zeros[:rows, None], np.full(rows, width), np.ones(rows, np.int64)
    )


def _seconds(runner: ModelRunner, inputs: ModelInputs) -> float:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    start = time.perf_counter()
    runner.decode(inputs)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter() - start
