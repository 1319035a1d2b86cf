"""The one place where logits become tokens and log-probabilities, for any row of any paradigm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.batched import Batched, row
from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling_params import LogprobsMode, SamplingParams
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

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(value: Callable[[SamplingParams], float]) -> Tensor:
            return torch.tensor([value(p) for p in params], dtype=torch.float32, device=device)

        def positive(value: Callable[[SamplingParams], float]) -> Tensor:
            # A value that float32 rounds to 0 or infinity would make NaN of 0 / 0 or inf / inf.
            return floats(lambda p: min(max(value(p), _FLOAT32.tiny), _FLOAT32.max))

        banned = [ids if p.min_new_tokens else () for p, ids in zip(params, stop_ids, strict=True)]
        kept = [ids if p.has_penalties else () for p, ids in zip(params, histories, strict=True)]
        widths = [n for p, n in zip(params, capacities, strict=True) if p.has_penalties]
        return cls(
            params=tuple(params),
            seeds=ints([p.seed - 2**64 if p.seed >= 2**63 else p.seed for p in params]),
            greedy=torch.tensor([p.greedy for p in params], dtype=torch.bool, device=device),
            temperature=positive(lambda p: 1 if p.greedy else p.temperature),
            top_k=ints([0 if p.greedy else min(p.top_k, 2**62) for p in params]),
            top_p=floats(lambda p: 1 if p.greedy else p.top_p),
            min_p=floats(lambda p: 0 if p.greedy else p.min_p),
            repetition=positive(lambda p: p.repetition_penalty),
            presence=floats(lambda p: p.presence_penalty),
            frequency=floats(lambda p: p.frequency_penalty),
            min_positions=ints(
                [n + p.min_new_tokens for p, n in zip(params, prompt_lens, strict=True)]
            ),
            stop_ids=_padded(banned, max(map(len, banned), default=0), device),
            history=_padded(kept, max(widths, default=0), device),
            prompt_lens=ints(prompt_lens),
        )

    def append(self, token_ids: Tensor, num_tokens: Tensor, positions: Tensor) -> SamplingInputs:
        """With the tokens of a step added to the histories that are kept.

        Args:
            token_ids: [B, W] int64.
            num_tokens: [B], how many of a row's W tokens count.
            positions: [B] int64, absolute position of each row's first new token.
        """
        width = self.history.shape[1]
        if not width:
            return self
        offsets = torch.arange(token_ids.shape[1], device=token_ids.device)
        places = positions.unsqueeze(1) + offsets
        # A row keeps a history if its first prompt token is there. A step launched before its row
        # is known to have ended may lie past the end.
        counts = (offsets < num_tokens.unsqueeze(1)) & (self.history[:, :1] >= 0) & (places < width)
        extended = F.pad(self.history, (0, 1), value=-1)
        extended.scatter_(1, torch.where(counts, places, width), token_ids)
        return replace(self, history=extended[:, :width])

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
    if not (
        sampling.any_penalties
        or sampling.any_min_new_tokens
        or sampling.any_temperature
        or sampling.any_filters
    ):
        return logits.float()
    out = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
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
    if sampling.any_temperature:
        kernels.apply_temperature(out, sampling.temperature)
    if sampling.any_filters:
        kernels.filter_top_k_top_p_min_p(out, sampling.top_k, sampling.top_p, sampling.min_p)
    return out


def sample(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> StepOutput:
    """One token for each row, with the columns that any row asks for.

    Args:
        logits: [R, V], any floating dtype; row i belongs to row i of sampling.
        positions: [R] int64, absolute position of the token to be sampled.

    Returns:
        W = 1, or no token for a row whose logits hold NaN or infinity. Columns have the batch's
        largest K of top_logprobs; what a row did not ask for is undefined.
    """
    processed = process(logits, sampling, positions)
    if sampling.all_greedy:
        token_ids = processed.argmax(-1)
    else:
        token_ids = kernels.sample(processed, sampling.seeds, positions, sampling.greedy)
    columns: dict[str, Tensor] = {}
    if sampling.any_logprobs:
        columns[LOGPROBS.name] = _logprobs(logits, processed, token_ids, sampling)
    if sampling.max_top_logprobs:
        ids, values = _top_logprobs(logits, processed, sampling)
        columns[TOP_LOGPROBS.name] = values
        columns[TOP_LOGPROB_IDS.name] = ids
    failed = ~logits.amax(-1).isfinite()  # a NaN anywhere in a row is its maximum
    return StepOutput(
        num_tokens=(~failed).int(),
        token_ids=token_ids.unsqueeze(1),
        failed=failed,
        columns={name: values.unsqueeze(1) for name, values in columns.items()},
    )


def _logprobs(
    logits: Tensor, processed: Tensor, token_ids: Tensor, sampling: SamplingInputs
) -> Tensor:
    """[R] float32."""
    out = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    asking = [p.logprobs for p in sampling.params]
    for source, rows in _by_mode(logits, processed, sampling, asking):
        out[rows] = kernels.logprobs_of(source[rows], token_ids[rows])
    return out


def _top_logprobs(
    logits: Tensor, processed: Tensor, sampling: SamplingInputs
) -> tuple[Tensor, Tensor]:
    """Ids [R, K] int32 and log-probabilities [R, K] float32."""
    k = sampling.max_top_logprobs
    ids = torch.full((len(logits), k), -1, dtype=torch.int32, device=logits.device)
    values = torch.full((len(logits), k), -_INF, dtype=torch.float32, device=logits.device)
    asking = [p.top_logprobs > 0 for p in sampling.params]
    for source, rows in _by_mode(logits, processed, sampling, asking):
        ids[rows], values[rows] = kernels.top_logprobs(source[rows], k)
    return ids, values


def _by_mode(
    raw: Tensor, processed: Tensor, sampling: SamplingInputs, asking: Sequence[bool]
) -> Iterator[tuple[Tensor, Tensor | slice]]:
    """The logits that asking rows want log-probabilities of, and an index of those rows."""
    sources: tuple[tuple[LogprobsMode, Tensor], ...] = (("raw", raw), ("processed", processed))
    for mode, source in sources:
        modes = [p.logprobs_mode for p in sampling.params]
        rows = [i for i, m in enumerate(modes) if asking[i] and m == mode]
        if len(rows) == len(modes):
            yield source, slice(None)
        elif rows:
            # From pinned memory, so that the host does not wait for the device.
            index = torch.tensor(rows, pin_memory=source.is_cuda)
            yield source, index.to(source.device, non_blocking=True)


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """[B, width] int64, filled up with -1."""
    out = torch.full((len(rows), width), -1, dtype=torch.int64)
    for i, ids in enumerate(rows):
        assert len(ids) <= width, f"{len(ids)} ids for a width of {width}"
        out[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return out.to(device)
