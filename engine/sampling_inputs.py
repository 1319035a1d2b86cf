"""What the sampler knows of a batch's rows, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batched import Batched, row
from batchgen.engine.sampling_params import SamplingParams
from batchgen.engine.transfer import upload

_FLOAT32 = torch.finfo(torch.float32)
# Columns of the floats that `build` uploads together.
_TEMPERATURE, _REPETITION = 0, 3


@dataclass(frozen=True)
class SamplingInputs(Batched):
    """What the sampler reads of B rows. Properties are facts of the batch, known on the host.

    Owned by a `StepInputs`: `append` writes to `history` in place, `index_select` and `concat` of
    several parts make tensors of their own.

    Attributes:
        params: B, on the host.
        seeds: [B] int64, the same 64 bits as `SamplingParams.seed`.
        greedy: [B] bool; such rows have temperature 1 and every filter off.
        temperature, top_p, min_p, repetition, presence, frequency: [B] float32.
        top_k: [B] int64.
        min_positions: [B] int64, prompt length + min_new_tokens: tokens at smaller absolute
            positions are not sampled from stop_ids.
        stop_ids: [B, S] int64, filled up with -1; of rows with min_new_tokens.
        history: [B, H] int64, token ids by absolute position, -1 where there is none yet. Only of
            rows with penalties and as wide as the longest of them will get; others are all -1.
        prompt_lens: [B] int64.
        processed_logprobs: [B] bool, rows whose `logprobs_mode` is `processed`.
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
        """Add the tokens of a step to the histories that are kept, in place; returns self.

        Args:
            token_ids: [B, W] int64.
            num_tokens: [B], how many of a row's W tokens count.
            positions: [B] int64, absolute position of each row's first new token, at least 1.
        """
        width = self.history.shape[1]
        if not width:
            return self
        offsets = torch.arange(token_ids.shape[1], device=token_ids.device)
        places = positions.unsqueeze(1) + offsets
        # A row keeps a history if its first prompt token is there. A step launched before its row
        # is known to have ended may lie past the end. What does not count writes that first token
        # to its own place again.
        first = self.history[:, :1].clone()
        counts = (offsets < num_tokens.unsqueeze(1)) & (first >= 0) & (places < width)
        self.history.scatter_(
            1, torch.where(counts, places, 0), torch.where(counts, token_ids, first)
        )
        return self

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
