"""The one place where logits become tokens and log-probabilities, for any row of any paradigm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batched import Batched, row
from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling_params import SamplingParams
from batchgen.engine.transfer import upload
from batchgen.kernels import filter_triton, sampling_triton
from batchgen.kernels import sampling as kernels

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
# Their tail is each row's own K; `requested_columns` sets it.
TOP_LOGPROBS = OutputColumn("top_logprobs", np.dtype(np.float32), (0,))
TOP_LOGPROB_IDS = OutputColumn("top_logprob_ids", np.dtype(np.int32), (0,))

_INF = float("inf")
_FLOAT32 = torch.finfo(torch.float32)


def requested_columns(params: SamplingParams) -> tuple[OutputColumn, ...]:
    """The columns of a row with these parameters, with their shapes."""
    columns = [LOGPROBS] if params.logprobs else []
    if params.top_logprobs:
        tail = (params.top_logprobs,)
        columns.append(replace(TOP_LOGPROBS, tail_shape=tail))
        columns.append(replace(TOP_LOGPROB_IDS, tail_shape=tail))
    return tuple(columns)


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


def process(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> Tensor:
    """The logits of the distribution that rows are sampled from.

    In this order: penalties, the ban of stop ids before min_new_tokens (void where no other token
    is left), temperature, top-k, top-p, min-p.

    Args:
        logits: [R, V], any floating dtype, finite or -inf; row i belongs to row i of sampling.
        positions: [R] int64, absolute position of the token to be sampled.

    Returns:
        [R, V] float32, -inf for excluded tokens, never a row of only those unless it came as one.
        The logits themselves where nothing applies.
    """
    out = _penalised(logits, sampling, positions)
    if not (sampling.any_temperature or sampling.any_filters):
        return out.float()
    if out is logits:
        out = _float_copy(logits)
    if sampling.any_temperature:
        kernels.apply_temperature(out, sampling.temperature)
    if sampling.any_filters:
        kernels.filter_top_k_top_p_min_p(out, sampling.top_k, sampling.top_p, sampling.min_p)
    return out


def _penalised(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> Tensor:
    """After penalties and ban: [R, V] float32, or the logits themselves if no row has any."""
    if not (sampling.any_penalties or sampling.any_min_new_tokens):
        return logits
    out = _float_copy(logits)
    if sampling.any_penalties:
        kernels.apply_penalties(
            out,
            sampling.history,
            sampling.prompt_lens,
            sampling.repetition,
            sampling.presence,
            sampling.frequency,
        )
    if sampling.any_min_new_tokens:
        kernels.apply_ban(out, sampling.stop_ids, positions < sampling.min_positions)
    return out


def _float_copy(logits: Tensor) -> Tensor:
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def sample(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> StepOutput:
    """One token for each row, with the columns that any row asks for.

    Args:
        logits: [R, V], any floating dtype; row i belongs to row i of sampling.
        positions: [R] int64, absolute position of the token to be sampled.

    Returns:
        W = 1, or no token for a row whose logits hold NaN or infinity. Columns have the batch's
        largest K of top_logprobs; what a row did not ask for is undefined.
    """
    if logits.is_cuda:
        return sample_fused(logits, sampling, positions)
    processed = process(logits, sampling, positions)
    if sampling.all_greedy:
        token_ids = processed.argmax(-1)
    else:
        token_ids = kernels.sample(processed, sampling.seeds, positions, sampling.greedy)
    source = logits
    if sampling.any_processed_logprobs:
        source = torch.where(sampling.processed_logprobs.unsqueeze(1), processed, logits)
    logprobs = top = None
    if sampling.any_logprobs:
        logprobs = kernels.logprobs_of(source, token_ids)
    if sampling.max_top_logprobs:
        top = kernels.top_logprobs(source, sampling.max_top_logprobs)
    failed = ~logits.amax(-1).isfinite()  # a NaN anywhere in a row is its maximum
    return _step_output(token_ids, failed, logprobs, top)


def sample_fused(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> StepOutput:
    """`sample` by the Triton kernels, which read the logits as they are, once for the draw.

    Equal to `sample` but for floating point: a token differs only where two scores all but tie.
    Nothing is copied unless a row has penalties or a ban; the host never waits.
    """
    penalised = _penalised(logits, sampling, positions)
    threshold = None
    if sampling.any_filters:
        threshold = filter_triton.thresholds(
            penalised, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
    drawn = sampling_triton.draw(
        penalised,
        logits,
        sampling.temperature,
        threshold,
        sampling.seeds,
        positions,
        sampling.greedy,
        sampling.processed_logprobs if sampling.any_logprobs else None,
    )
    top = None
    if sampling.max_top_logprobs:
        top = filter_triton.top_logprobs(
            penalised,
            logits,
            sampling.temperature,
            threshold,
            sampling.processed_logprobs,
            sampling.max_top_logprobs,
        )
    return _step_output(drawn.token_ids, drawn.failed, drawn.logprobs, top)


def _step_output(
    token_ids: Tensor, failed: Tensor, logprobs: Tensor | None, top: tuple[Tensor, Tensor] | None
) -> StepOutput:
    """One token per row, with log-probabilities [R] and the most likely ids and values [R, K]."""
    columns: dict[str, Tensor] = {}
    if logprobs is not None:
        columns[LOGPROBS.name] = logprobs.unsqueeze(1)
    if top is not None:
        columns[TOP_LOGPROB_IDS.name] = top[0].unsqueeze(1)
        columns[TOP_LOGPROBS.name] = top[1].unsqueeze(1)
    return StepOutput(
        num_tokens=(~failed).int(),
        token_ids=token_ids.unsqueeze(1),
        failed=failed,
        columns=columns,
    )


_TEMPERATURE, _REPETITION = 0, 3


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
