"""What the sampler knows of a batch's rows, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.execution.batched import Batched, row
from batchgen.engine.execution.transfer import upload
from batchgen.engine.sampling.params import SamplingParams
from batchgen.kernels.sampling.history import append_tokens

_FLOAT32 = torch.finfo(torch.float32)
# Columns of the floats that `build` uploads together.
_TEMPERATURE, _REPETITION = 0, 3


@dataclass(frozen=True)
class SamplingInputs(Batched):
    """What the sampler reads of B rows. Properties are facts of the batch, known on the host.

    Owned by a `StepInputs`: `append` writes to `history` in place, `index_select` and `concat` of
    several parts make tensors of their own.

    A row is sampled at one position, or after `repeat` at `width` of them: R = B · width logits
    rows, of which row r belongs to row r // width.

    Attributes:
        params: B, on the host.
        seeds: [R] int64, the same 64 bits as `SamplingParams.seed`.
        greedy: [R] bool; such rows have temperature 1 and every filter off.
        temperature, top_p, min_p, repetition, presence, frequency: [R] float32.
        top_k: [R] int64.
        min_positions: [R] int64, prompt length + min_new_tokens: tokens at smaller absolute
            positions are not sampled from stop_ids.
        stop_ids: [R, S] int64, filled up with -1; of rows with min_new_tokens.
        history: [B, H] int64, token ids by absolute position; from the position on that is sampled,
            anything. Only of rows with penalties and as wide as the longest of them will get;
            others are all -1.
        prompt_lens: [R] int64.
        processed_logprobs: [R] bool, rows whose `logprobs_mode` is `processed`.
    """

    params: tuple[SamplingParams, ...] = row()
    seeds: Tensor = row()
    greedy: Tensor = row()
    temperature: Tensor = row()
    top_k: Tensor = row()
    top_p: Tensor = row()
    min_p: Tensor = row()
    repetition: Tensor = row()
    presence: Tensor = row()
    frequency: Tensor = row()
    min_positions: Tensor = row()
    stop_ids: Tensor = row(pad=-1)
    history: Tensor = row(pad=-1)
    prompt_lens: Tensor = row()
    processed_logprobs: Tensor = row()

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        prompt_lens: Sequence[int],
        histories: Sequence[Sequence[int]],
        stop_ids: Sequence[Sequence[int]],
        capacities: Sequence[int],
        device: torch.device,
    ) -> SamplingInputs:
        """The inputs of B rows.

        Args:
            histories: prompt and output ids of each row so far.
            stop_ids: of each row: EOS unless ignored, and its stop token ids.
            capacities: the longest that prompt and output of each row can get together.
        """

        banned = [ids if p.min_new_tokens else () for p, ids in zip(params, stop_ids, strict=True)]
        kept = [ids if p.has_penalties else () for p, ids in zip(params, histories, strict=True)]
        widths = [n for p, n in zip(params, capacities, strict=True) if p.has_penalties]
        starts = np.array(prompt_lens, dtype=np.int64)
        ints = np.stack([
            np.array([p.seed % 2**64 for p in params], dtype=np.uint64).view(np.int64),
            np.array([0 if p.greedy else min(p.top_k, 2**62) for p in params], dtype=np.int64),
            starts + np.array([p.min_new_tokens for p in params], dtype=np.int64),
            starts,
        ])  # fmt: skip
        floats = np.array([_filters(p) + _penalties(p) for p in params]).reshape(-1, 6)
        # What float32 would round to 0 or infinity would make NaN of 0 / 0 or inf / inf.
        for column in (_TEMPERATURE, _REPETITION):
            floats[:, column] = floats[:, column].clip(_FLOAT32.tiny, _FLOAT32.max)
        bools = [[p.greedy for p in params], [p.logprobs_mode == "processed" for p in params]]
        seeds, top_k, min_positions, starts_there = upload(ints, torch.int64, device)
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
            prompt_lens=starts_there,
            processed_logprobs=processed_logprobs,
        )

    def append(self, token_ids: Tensor, num_tokens: Tensor, positions: Tensor) -> SamplingInputs:
        """Write tokens to the histories that are kept, in place; returns self.

        What stood at their places is gone, what stands behind them stays: tokens that were written
        before they were verified are overwritten by those that are right.

        Args:
            token_ids: [B, W] int64.
            num_tokens: [B], how many of a row's W tokens count.
            positions: [B] int64, absolute position of each row's first token here, at least 1.
                Tokens past the end of the histories are dropped: a step may be launched before its
                row is known to have ended.
        """
        if self.history.shape[1]:
            append_tokens(self.history, token_ids, num_tokens, positions)
        return self

    def repeat(self, width: int) -> SamplingInputs:
        """For `width` logits rows of each row, one after another; itself for a width of 1.

        The history is shared, not copied: what is appended to one is seen by the other.
        """
        if width == 1:
            return self
        assert self.width == 1
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        columns = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() == 1}
        repeated: dict[str, Any] = {}
        for dtype in {column.dtype for column in columns.values()}:  # one launch for each
            same = {name: column for name, column in columns.items() if column.dtype == dtype}
            stacked = torch.stack([c.unsqueeze(1).expand(-1, width) for c in same.values()])
            repeated |= zip(same, stacked.flatten(1), strict=True)
        return replace(self, stop_ids=self.stop_ids.repeat_interleave(width, 0), **repeated)

    def index_select(self, rows: npt.NDArray[np.int64]) -> SamplingInputs:
        assert self.width == 1, "pick rows first, then repeat them"
        return super().index_select(rows)

    @classmethod
    def concat(cls, parts: Sequence[SamplingInputs]) -> SamplingInputs:
        assert all(part.width == 1 for part in parts), "join rows first, then repeat them"
        return super().concat(parts)

    @property
    def width(self) -> int:
        """Logits rows per row."""
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

    @cached_property
    def any_temperature(self) -> bool:
        return any(p.temperature != 1 and not p.greedy for p in self.params)

    @cached_property
    def any_filters(self) -> bool:
        return any((p.top_k, p.top_p, p.min_p) != (0, 1, 0) and not p.greedy for p in self.params)

    @cached_property
    def any_logprobs(self) -> bool:
        return any(p.logprobs for p in self.params)

    @cached_property
    def any_columns(self) -> bool:
        """Any of the paradigm's own."""
        return any(p.columns for p in self.params)

    @cached_property
    def any_processed_logprobs(self) -> bool:
        return any(p.logprobs_mode == "processed" for p in self.params)

    @cached_property
    def max_top_logprobs(self) -> int:
        return max((p.top_logprobs for p in self.params), default=0)


def _filters(params: SamplingParams) -> tuple[float, float, float]:
    """Temperature, top-p and min-p, all off for a greedy row."""
    return (1, 1, 0) if params.greedy else (params.temperature, params.top_p, params.min_p)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """[B, width] int64, filled up with -1."""
    out = np.full((len(rows), width), -1, dtype=np.int64)
    for i, ids in enumerate(rows):
        assert len(ids) <= width, f"{len(ids)} ids for a width of {width}"
        out[i, : len(ids)] = ids
    return upload(out, torch.int64, device)
