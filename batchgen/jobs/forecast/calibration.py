"""Learns from an earlier run how long answers get, and how fast the device really is.

`batchgen plan` passes the result to `forecast` (see `plan.like`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.jobs.forecast.step_cost import StepCost

Ints = npt.NDArray[np.int64]

_MOST_READ = 200_000
"""The most rows of an earlier job that are read."""
_LEAST_SECONDS = 0.2
"""A shorter run says nothing about the speed."""
_PLAUSIBLE = 20.0
"""A run that differs from the estimate by more than this factor was on another device."""
_COUNTS = ("prefill_steps", "prefill_tokens", "decode_steps", "decode_rows")


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The counts of an engine in a run, as in `EngineStats`; `seconds` exclude the loading of
    weights."""

    seconds: float
    rows: int
    generated: int
    prefill_steps: int
    prefill_tokens: int
    decode_steps: int
    decode_rows: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of an earlier run, with the token counts of its prompts and answers.

    `source` names the run, `counts` is None if it was on another device or of another model, and
    `start_s` are the seconds until its first step.
    """

    source: str
    prompts: Ints
    answers: Ints
    counts: RunCounts | None = None
    start_s: float | None = None

    @property
    def per_forward(self) -> float | None:
        """Tokens that a row got in a decode forward; None if that is not known."""
        counts = self.counts
        if counts is None or not counts.decode_rows:
            return None
        return max((counts.generated - counts.rows) / counts.decode_rows, 0.05)

    def factor(self, cost: StepCost, width: int) -> float | None:
        """How many times longer the run took than `cost` estimates; None if that is not known."""
        counts = self.counts
        if counts is None or counts.seconds < _LEAST_SECONDS or not counts.decode_steps:
            return None
        prompt, answer = float(self.prompts.mean()), counts.generated / max(counts.rows, 1)
        rows = counts.decode_rows / counts.decode_steps
        modelled = counts.decode_steps * cost.decode(rows, rows * (prompt + answer / 2), width)
        if counts.prefill_tokens:
            pairs = counts.prefill_tokens * prompt / 2
            steps = max(counts.prefill_steps, 1)
            modelled += cost.prefill(counts.prefill_tokens, counts.rows, pairs, steps)
        factor = counts.seconds / modelled
        return factor if 1 / _PLAUSIBLE < factor < _PLAUSIBLE else None


def seen_in(folder: Path, same: Mapping[str, Any], on_gpu: bool, name: str) -> Calibration | None:
    """Read the measurements of the job in a folder; None if none of its rows has an answer.

    Its speed counts only if it ran on the same kind of device and `same`, the groups that decide
    the speed, are as in its config.yaml. `name` is what to call the folder.
    """
    from batchgen.storage.folder.read_job import JobFolderReader

    reader = JobFolderReader(folder)
    prompts: list[int] = []
    answers: list[int] = []
    for batch in reader.batches(["num_prompt_tokens", "num_generated_tokens", "finish_reason"]):
        good = [row for row in batch.to_pylist() if row["finish_reason"] != "error"]
        prompts += [row["num_prompt_tokens"] for row in good]
        answers += [row["num_generated_tokens"] for row in good]
        if len(answers) >= _MOST_READ:
            break
    if not answers:
        return None
    counts, start = None, None
    whole = [
        attempt
        for attempt in reader.metrics.get("attempts", [])
        if attempt["rows"] and all(count in attempt["engine"] for count in _COUNTS)
    ]
    if whole and all(reader.config.get(group) == values for group, values in same.items()):
        best = max(whole, key=lambda attempt: int(attempt["generated_tokens"]))
        if ((best.get("memory") or {}).get("total") is not None) == on_gpu:
            rows = best["rows"] - best["error_rows"]
            figures = (best["engine"][count] for count in _COUNTS)
            tokens = best["generated_tokens"] - best.get("tokens_begun", 0)
            counts = RunCounts(best["generate_s"], rows, tokens, *figures)
            start = best.get("start_s")
    lengths = np.array(prompts, np.int64), np.array(answers, np.int64)
    return Calibration(f"the job in {name}", *lengths, counts, start)
