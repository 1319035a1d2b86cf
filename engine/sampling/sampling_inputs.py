"""The sampler's inputs: the sampling options of a batch's rows, as tensors on the device.

`StepInputs` keep the `SamplingInputs` of the decoding rows; `StateReader` makes others for answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.batched import Batched, row
from batchgen.engine.device.transfer import upload
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling.history import append_tokens

_FLOAT32 = torch.finfo(torch.float32)
# The indices of two of the six floats per row that `build` uploads together.
_TEMPERATURE, _REPETITION = 0, 3


@dataclass(frozen=True)
class SamplingInputs(Batched):
    """The sampling options of B rows. Properties say what any of the rows needs, without waiting
    for the device.

    A strategy's `StepInputs` owns these inputs, because `append` writes to `history` in place.
    `index_select`, and `concat` of several parts, return copies. After `repeat` each row is sampled
    at `width` positions: row r of the R = B · width rows of logits belongs to row r // width of the
    batch.
    """

    params: tuple[RequestParams, ...] = row()  # of the B rows, on the host
    seeds: Tensor = row()  # [R] int64, the 64 bits of `RequestParams.seed`
    greedy: Tensor = row()  # [R] bool; such rows have temperature 1 and no filter
    temperature: Tensor = row()  # [R] float32
    top_k: Tensor = row()  # [R] int64, 0 where it is off
    top_p: Tensor = row()  # [R] float32
    min_p: Tensor = row()  # [R] float32
    repetition: Tensor = row()  # [R] float32
    presence: Tensor = row()  # [R] float32
    frequency: Tensor = row()  # [R] float32
    min_positions: Tensor = row()  # [R] int64: no token of `stop_ids` is sampled before this one
    stop_ids: Tensor = row(pad=-1)  # [R, S] int64, padded with -1; empty without min_new_tokens
    history: Tensor = row(pad=-1)  # [B, H] token ids by position; -1 without penalties
    prompt_lens: Tensor = row()  # [R] int64
    processed_logprobs: Tensor = row()  # [R] bool
    # [R, S] int64, padded with -1: tokens that are never sampled; [R, 0] in most models
    banned_ids: Tensor = row(pad=-1)

    @classmethod
    def build(
        cls,
        params: Sequence[RequestParams],
        prompt_lens: Sequence[int],
        histories: Sequence[Sequence[int]],  # the prompt and output tokens so far
        stop_ids: Sequence[Sequence[int]],  # EOS unless ignored, and stop_token_ids
        capacities: Sequence[int],  # the most prompt and output tokens together
        device: torch.device,
        never_sampled: Sequence[Sequence[int]] | None = None,  # None: every token may be sampled
    ) -> SamplingInputs:
        """Make the inputs of B rows. All arguments except the device have B entries."""
        banned = [ids if p.min_new_tokens else () for p, ids in zip(params, stop_ids, strict=True)]
        kept = [ids if p.has_penalties else () for p, ids in zip(params, histories, strict=True)]
        widths = [n for p, n in zip(params, capacities, strict=True) if p.has_penalties]
        never = never_sampled or [()] * len(params)
        starts = np.array(prompt_lens, dtype=np.int64)
        ints = np.stack([
            np.array([p.seed % 2**64 for p in params], dtype=np.uint64).view(np.int64),
            np.array([0 if p.greedy else min(p.top_k, 2**62) for p in params], dtype=np.int64),
            starts + np.array([p.min_new_tokens for p in params], dtype=np.int64),
            starts,
        ])  # fmt: skip
        floats = np.array([_filters(p) + _penalties(p) for p in params]).reshape(-1, 6)
        # A value that float32 rounds to 0 or infinity would give NaN, from 0 / 0 or inf / inf.
        for column in (_TEMPERATURE, _REPETITION):
            floats[:, column] = floats[:, column].clip(_FLOAT32.tiny, _FLOAT32.max)
        bools = [[p.greedy for p in params], [p.logprobs_mode == "processed" for p in params]]
        seeds, top_k, min_positions, device_prompt_lens = upload(ints, torch.int64, device)
        temperature, top_p, min_p, repetition, presence, frequency = upload(
            floats.T.copy(), torch.float32, device
        )
        greedy, processed_logprobs = upload(np.array(bools), torch.bool, device)
        return cls(
            params=tuple(params),
            seeds=seeds,
            greedy=greedy,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            min_positions=min_positions,
            stop_ids=_padded(banned, max(map(len, banned), default=0), device),
            history=_padded(kept, max(widths, default=0), device),
            prompt_lens=device_prompt_lens,
            processed_logprobs=processed_logprobs,
            banned_ids=_padded(never, max(map(len, never)), device),
        )

    def append(self, token_ids: Tensor, num_tokens: Tensor, positions: Tensor) -> SamplingInputs:
        """Write the first `num_tokens` [B] of token_ids [B, W] to the histories of rows with
        penalties, in place. Returns these inputs.

        The tokens replace what was at `positions` [B] (at least 1) and after: drafts are written
        before they are verified, and then replaced. Tokens past the end are dropped, because a step
        may be launched for a row that has ended.
        """
        if self.history.shape[1]:
            append_tokens(self.history, token_ids, num_tokens, positions)
        return self

    def repeat(self, width: int) -> SamplingInputs:
        """Return the inputs for sampling each row at `width` consecutive positions. The history is
        shared: `append` on either object changes both."""
        if width == 1:
            return self
        assert self.width == 1
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        columns = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() == 1}
        repeated: dict[str, Any] = {}
        for dtype in {column.dtype for column in columns.values()}:  # one launch for each dtype
            same = {name: column for name, column in columns.items() if column.dtype == dtype}
            stacked = torch.stack([c.unsqueeze(1).expand(-1, width) for c in same.values()])
            repeated |= zip(same, stacked.flatten(1), strict=True)
        stop_ids = self.stop_ids.repeat_interleave(width, 0)
        banned_ids = self.banned_ids.repeat_interleave(width, 0)
        return replace(self, stop_ids=stop_ids, banned_ids=banned_ids, **repeated)

    def heated(self, factors: Tensor) -> SamplingInputs:
        """Return the inputs with temperatures multiplied by these factors [R] float32. Greedy rows,
        whose temperature is 1, still take the most likely token, but their probabilities change."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _Heated(**values | {"temperature": self.temperature * factors})

    def index_select(self, rows: npt.NDArray[np.int64]) -> SamplingInputs:
        assert self.width == 1, "pick rows first, then repeat them"
        return super().index_select(rows)

    @classmethod
    def concat(cls, parts: Sequence[SamplingInputs]) -> SamplingInputs:
        assert all(part.width == 1 for part in parts), "join rows first, then repeat them"
        return super().concat(parts)

    @property
    def width(self) -> int:
        """How many rows of logits each row of the batch has."""
        return len(self.seeds) // self.num_rows if self.num_rows else 1

    @cached_property
    def all_greedy(self) -> bool:
        return all(p.greedy for p in self.params)

    @cached_property
    def any_penalties(self) -> bool:
        return any(p.has_penalties for p in self.params)

    @cached_property
    def any_min_new_tokens(self) -> bool:
        return any(p.min_new_tokens for p in self.params)

    @property
    def any_bans(self) -> bool:
        """Whether any row has tokens that are never sampled."""
        return self.banned_ids.shape[1] > 0

    @cached_property
    def any_temperature(self) -> bool:
        return any(p.temperature != 1 and not p.greedy for p in self.params)

    @cached_property
    def any_filters(self) -> bool:
        """Whether any row that is not greedy has top_k, top_p or min_p on."""
        return any((p.top_k, p.top_p, p.min_p) != (0, 1, 0) and not p.greedy for p in self.params)

    @cached_property
    def any_logprobs(self) -> bool:
        return any(p.logprobs for p in self.params)

    @cached_property
    def any_columns(self) -> bool:
        """Whether any row asks for an output column of a strategy or a layer."""
        return any(p.columns for p in self.params)

    @cached_property
    def any_entropy(self) -> bool:
        return any("entropy" in p.columns for p in self.params)

    @cached_property
    def any_processed_logprobs(self) -> bool:
        return any(p.logprobs_mode == "processed" for p in self.params)

    @cached_property
    def max_top_logprobs(self) -> int:
        """The largest K of top_logprobs that any row asks for; 0 if none does."""
        return max((p.top_logprobs for p in self.params), default=0)


@dataclass(frozen=True)
class _Heated(SamplingInputs):
    """Rows whose temperatures differ from those of their `params`."""

    @cached_property
    def any_temperature(self) -> bool:
        return True


def _filters(params: RequestParams) -> tuple[float, float, float]:
    """Return the temperature, top_p and min_p of a row; all are off for a greedy row."""
    return (1, 1, 0) if params.greedy else (params.temperature, params.top_p, params.min_p)


def _penalties(params: RequestParams) -> tuple[float, float, float]:
    """Return the repetition, presence and frequency penalties of a row."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Put B lists of ids into one tensor [B, width] int64, padded with -1."""
    out = np.full((len(rows), width), -1, dtype=np.int64)
    for i, ids in enumerate(rows):
        assert len(ids) <= width, f"{len(ids)} ids for a width of {width}"
        out[i, : len(ids)] = ids
    return upload(out, torch.int64, device)
