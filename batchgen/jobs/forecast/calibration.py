"""Learns from an earlier run how long answers get, and how fast the device really is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from batchgen.jobs.forecast.step_cost import StepCost

Ints = npt.NDArray[np.int64]

_LEAST_SECONDS = 0.2
"""A run that took less says nothing of the speed."""
_COUNTS = ("prefill_steps", "prefill_tokens", "decode_steps", "decode_rows")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of an earlier run, with the token counts of its prompts and answers.

    `source` names the run, and `start_s` are the seconds until its first step. `counts` are the
    steps, tokens and rows of `EngineStats`, the `rows` and tokens `generated` by the run, and its
    `seconds` without loading; None if it was on another device or of another model.
    """

    source: str
    prompts: Ints
    answers: Ints
    counts: Mapping[str, float] | None = None
    start_s: float | None = None

    @property
    def per_forward(self) -> float | None:
        """Tokens that a row got in a decode forward; None if that is not known."""
        counts = self.counts
        if counts is None or not counts["decode_rows"]:
            return None
        return max((counts["generated"] - counts["rows"]) / counts["decode_rows"], 0.05)

    def factor(self, cost: StepCost, width: int) -> float | None:
        """How many times longer the run took than `cost` estimates; None if that is not known."""
        counts = self.counts
        if counts is None or counts["seconds"] < _LEAST_SECONDS or not counts["decode_steps"]:
            return None
        prompt, answer = float(self.prompts.mean()), counts["generated"] / max(counts["rows"], 1)
        rows, read = counts["decode_rows"] / counts["decode_steps"], counts["prefill_tokens"]
        step = cost.decode(rows, rows * (prompt + answer / 2), width)
        modelled = counts["decode_steps"] * step
        if read:
            steps = max(counts["prefill_steps"], 1)
            modelled += cost.prefill(read, counts["rows"], read * prompt / 2, steps)
        return counts["seconds"] / modelled


def seen_in(folder: Path, same: Mapping[str, Any], on_gpu: bool, name: str) -> Calibration | None:
    """Read the measurements of the job in a folder; None if none of its rows has an answer.

    Its speed counts only if it ran on the same kind of device and `same`, the groups that decide
    the speed, are as in its config.yaml. `name` is what to call the folder.
    """
    from batchgen.storage.folder.read_job import JobFolderReader

    reader = JobFolderReader(folder)
    good = [
        batch.filter(pc.not_equal(batch["finish_reason"], "error"))
        for batch in reader.batches(["finish_reason", "num_prompt_tokens", "num_generated_tokens"])
    ]
    if not any(batch.num_rows for batch in good):
        return None
    prompts, answers = (np.concatenate([batch[i].to_numpy() for batch in good]) for i in (1, 2))
    seen = Calibration(f"the job in {name}", prompts, answers)
    whole = [
        attempt
        for attempt in reader.metrics.get("attempts", [])
        if attempt["rows"]
        and all(count in attempt["engine"] for count in _COUNTS)
        and ((attempt.get("memory") or {}).get("total") is not None) == on_gpu
    ]
    if not whole or any(reader.config.get(group) != values for group, values in same.items()):
        return seen
    best = max(whole, key=lambda attempt: int(attempt["generated_tokens"]))
    counts = {name: best["engine"][name] for name in _COUNTS} | {
        "seconds": best["generate_s"],
        "rows": best["rows"] - best["error_rows"],
        "generated": best["generated_tokens"] - best.get("tokens_begun", 0),
    }
    return replace(seen, counts=counts, start_s=best.get("start_s"))
