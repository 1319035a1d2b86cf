"""Decides which drawn tokens of a denoise step stay on a canvas, and when a canvas is finished.

The rule is that of `EntropyBoundSampler` and `StableAndConfidentStoppingCriteria` in
models/diffusion_gemma/generation_diffusion_gemma.py of transformers 5.23, and of
srt/dllm/algorithm/gemma4_renoise.py in sgl-project/sglang at 34fe1421.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.device.batched import Batched, row
from batchgen.engine.device.transfer import upload
from batchgen.strategies.blocks import with_whole_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Renoising:
    """The denoising options of a row.

    A step draws a token at each position of the canvas. The tokens with the lowest entropies stay:
    as many as keep the sum of their entropies, without the largest, within a bound (Ben-Hamu et al.
    2025, arXiv 2505.24857). All other positions get random tokens, even if an earlier token had
    stayed there. The answer of a step is its likeliest tokens. A canvas is finished when the answer
    is stable and the mean entropy is small, or after a number of steps.

    Args:
        max_denoising_steps: the most steps of a canvas, N.
        entropy_bound: the bound in nats.
        start_temperature, end_temperature: the factor of the row's temperature; it falls linearly
            from the first value in the first step, and would reach the second in step N + 1.
        stable_steps: how many further steps must give the same answer.
        stop_entropy: the mean entropy in nats below which a canvas may be finished.

    Raises:
        ValueError: a value is out of range; the message names the option.
    """

    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    start_temperature: float = 0.8
    end_temperature: float = 0.4
    stable_steps: int = 1
    stop_entropy: float = 0.005

    def __post_init__(self) -> None:
        counts = {"max_denoising_steps": 1, "stable_steps": 0}
        for name, fewest in counts.items():
            count = getattr(self, name)
            if type(count) is not int or not fewest <= count < 2**31:
                raise ValueError(
                    f"{name} must be a whole number from {fewest} on, got {count!r:.100}"
                )
        for name in ("entropy_bound", "start_temperature", "end_temperature", "stop_entropy"):
            value, lowest = getattr(self, name), 1e-6 if "temperature" in name else 0.0
            if type(value) not in (int, float) or not lowest <= value <= 1e30:
                raise ValueError(f"{name} must be a number from {lowest} on, got {value!r:.100}")

    @classmethod
    def of_row(cls, values: Mapping[str, Any]) -> Renoising:
        """Make the options that a row of the input brings. Raises ValueError for unknown names."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(
                    f"{name!r:.100} is no option of strategy canvas: these are {', '.join(known)}"
                )
        return cls(
            **{
                name: value
                for name, value in with_whole_numbers(values).items()
                if value is not None
            }
        )


@dataclass(frozen=True)
class RenoisingRows(Batched):
    """The denoising options of B rows on the device."""

    max_steps: Tensor = row()  # [B] int64
    stable_steps: Tensor = row()  # [B] int64
    entropy_bound: Tensor = row()  # [B] float32
    start_temperature: Tensor = row()  # [B] float32
    end_temperature: Tensor = row()  # [B] float32
    stop_entropy: Tensor = row()  # [B] float32

    @classmethod
    def build(cls, rules: Sequence[Renoising], device: torch.device) -> RenoisingRows:
        """Upload the options of B rows."""
        ints = np.array([[r.max_denoising_steps, r.stable_steps] for r in rules])
        floats = np.array([
            [r.entropy_bound, r.start_temperature, r.end_temperature, r.stop_entropy]
            for r in rules
        ])  # fmt: skip
        return cls(
            *upload(ints.T.copy(), torch.int64, device),
            *upload(floats.T.copy(), torch.float32, device),
        )

    def temperatures(self, denoised: Tensor) -> Tensor:
        """Return the factors of the rows' temperatures in the step after `denoised` [B] int64
        steps, [B] float32."""
        left = (self.max_steps - denoised).float() / self.max_steps
        return self.end_temperature + (self.start_temperature - self.end_temperature) * left

    def accepted(self, entropies: Tensor) -> Tensor:
        """Return the positions whose drawn tokens stay, [B, L] bool. Of equal entropies, the first
        position comes first.

        Args:
            entropies: [B, L] float32, the entropies of the distributions that the tokens were drawn
                from.
        """
        ascending, order = entropies.double().sort(dim=1, stable=True)
        # Each position's sum of the smaller entropies: a position's own is the largest up to it.
        within = ascending.cumsum(1) - ascending <= self.entropy_bound.unsqueeze(1)
        return torch.zeros_like(within).scatter(1, order, within)

    def are_finished(self, entropies: Tensor, unchanged: Tensor, denoised: Tensor) -> Tensor:
        """Return the rows whose canvas is finished by a step, [B] bool.

        Args:
            entropies: as for `accepted`.
            unchanged: [B] int64, for how many steps the answer has not changed.
            denoised: [B] int64, how many steps the canvas has had, including this one.
        """
        settled = (unchanged >= self.stable_steps) & (entropies.mean(1) < self.stop_entropy)
        return settled | (denoised >= self.max_steps)
