"""Reads from an earlier run of a job how long its answers were and how fast its device was.

`batchgen plan` uses these measurements, through `seen_in`, to correct its forecast of a similar
job.
"""

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
"""A run shorter than this does not show the speed of the device."""
_COUNTS = ("prefill_steps", "prefill_tokens", "decode_steps", "decode_rows")
"""The counts of `EngineStats` that are used; `decode_rows` is the sum of the rows of all steps."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of an earlier run.

    Attributes:
        source: what to call the run in a text.
        prompts: [R] the tokens of each prompt.
        answers: [R] the tokens of each answer.
        counts: the steps, tokens and rows of `EngineStats`, the `rows` and tokens `generated` by
            the run, and its `seconds` without loading; None if the run was on another kind of
            device or had another model.
        start_s: seconds until the first step; None if that was not measured.
    """

    source: str
    prompts: Ints
    answers: Ints
    counts: Mapping[str, float] | None = None
    start_s: float | None = None

    @property
    def per_forward(self) -> float | None:
        """The mean number of tokens that a row got in a decode forward; None if the counts do not
        say."""
        counts = self.counts
        if counts is None or not counts["decode_rows"]:
            return None
        # The prefill gives each row its first token. 0.05 keeps times finite.
        return max((counts["generated"] - counts["rows"]) / counts["decode_rows"], 0.05)

    def factor(self, cost: StepCost, width: int) -> float | None:
        """Divide the measured time of the run by the time that `cost` estimates for its counts.

        Returns:
            The factor; None if the run was not measured or was too short. `width` is the number of
            tokens of a row in a decode step.
        """
        counts = self.counts
        if counts is None or counts["seconds"] < _LEAST_SECONDS or not counts["decode_steps"]:
            return None
        prompt_length = float(self.prompts.mean())
        answer_length = counts["generated"] / max(counts["rows"], 1)
        rows = counts["decode_rows"] / counts["decode_steps"]
        # On average a running row has half of its answer.
        step = cost.decode(rows, rows * (prompt_length + answer_length / 2), width)
        estimated = counts["decode_steps"] * step
        if tokens := counts["prefill_tokens"]:
            steps = max(counts["prefill_steps"], 1)
            # On average a token attends to half of its prompt.
            pairs = tokens * prompt_length / 2
            estimated += cost.prefill(tokens, counts["rows"], pairs, steps)
        return counts["seconds"] / estimated


def seen_in(folder: Path, same: Mapping[str, Any], on_gpu: bool, name: str) -> Calibration | None:
    """Read the measurements of the job in a folder; None if none of its rows has an answer.

    `Calibration.counts`, from which the speed follows, is read only if the job ran on the same kind
    of device and its config.yaml has the groups of keys in `same`. `name` is what texts call the
    folder.
    """
    from batchgen.storage.folder.read_job import JobFolderReader

    reader = JobFolderReader(folder)
    answered = [
        batch.filter(pc.not_equal(batch["finish_reason"], "error"))
        for batch in reader.batches(["finish_reason", "num_prompt_tokens", "num_generated_tokens"])
    ]
    if not any(batch.num_rows for batch in answered):
        return None
    prompts, answers = (
        np.concatenate([batch[name].to_numpy() for batch in answered])
        for name in ("num_prompt_tokens", "num_generated_tokens")
    )
    calibration = Calibration(f"the job in {name}", prompts, answers)
    measured = [
        attempt
        for attempt in reader.metrics.get("attempts", [])
        if attempt["rows"]
        and all(count in attempt["engine"] for count in _COUNTS)
        and ((attempt.get("memory") or {}).get("total") is not None) == on_gpu
    ]
    if not measured or any(reader.config.get(group) != values for group, values in same.items()):
        return calibration
    longest = max(measured, key=lambda attempt: int(attempt["generated_tokens"]))
    counts = {name: longest["engine"][name] for name in _COUNTS} | {
        "seconds": longest["generate_s"],
        "rows": longest["rows"] - longest["error_rows"],
        "generated": longest["generated_tokens"] - longest.get("tokens_begun", 0),
    }
    return replace(calibration, counts=counts, start_s=longest.get("start_s"))
