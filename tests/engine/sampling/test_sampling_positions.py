"""Several positions of each row in one call, as speculation needs them, against one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import sample_fused, sample_tokens
from batchgen.engine.sampling.sampler_columns import requested_columns
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STOP_IDS = (2, 5)
INF = float("inf")


@dataclass
class Rows:
    """B random rows: options, prompt lengths, and what they have generated so far."""

    params: list[RequestParams]
    prompt_lens: list[int]
    histories: list[list[int]]

    @property
    def positions(self) -> Tensor:
        return torch.tensor([len(history) for history in self.histories])

    @property
    def ends(self) -> list[int]:
        return [n + p.max_new_tokens for n, p in zip(self.prompt_lens, self.params, strict=True)]

    def build(self, device: torch.device = CPU) -> SamplingInputs:
        stop_ids = [STOP_IDS] * len(self.params)
        return SamplingInputs.build(
            self.params, self.prompt_lens, self.histories, stop_ids, self.ends, device
        )

    def alone(self, i: int, drafts: list[int]) -> SamplingInputs:
        """Row i after these tokens."""
        known = self.histories[i] + drafts
        return SamplingInputs.build(
            [self.params[i]], [self.prompt_lens[i]], [known], [STOP_IDS], [len(known)], CPU
        )


def random_params(rng: np.random.Generator) -> RequestParams:
    """Every option is off in half of the rows."""

    def pick(off: float, low: float, high: float) -> float:
        return float(rng.uniform(low, high)) if rng.integers(2) else off

    return RequestParams(
        temperature=[0.0, 1.0, 0.7, 1.6][rng.integers(4)],
        top_k=int(pick(0, 1, 9)),
        top_p=pick(1, 0.3, 1),
        min_p=pick(0, 0, 0.2),
        repetition_penalty=pick(1, 0.5, 2),
        presence_penalty=pick(0, -1, 1),
        frequency_penalty=pick(0, -1, 1),
        min_new_tokens=int(pick(0, 1, 9)),
        max_new_tokens=int(rng.integers(9, 20)),
        logprobs=bool(rng.integers(2)),
        top_logprobs=int(pick(0, 1, 6)),
        logprobs_mode="raw" if rng.integers(2) else "processed",
        seed=int(rng.integers(2**40)),
    )


def random_rows(rng: np.random.Generator, count: int, vocab: int) -> Rows:
    params = [random_params(rng) for _ in range(count)]
    if rng.integers(4) == 0:  # no histories at all
        params = [
            replace(p, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
            for p in params
        ]
    prompt_lens = rng.integers(1, 8, count).tolist()
    known = [n + int(rng.integers(0, 9)) for n in prompt_lens]
    return Rows(params, prompt_lens, [rng.integers(0, vocab, n).tolist() for n in known])


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape) * 2).float()


def verify_inputs(
    rows: Rows, drafts: Tensor, rng: np.random.Generator, device: torch.device = CPU
) -> SamplingInputs:
    """Repeated once for each draft and once more, with drafts of a step before behind them."""
    count, width = drafts.shape[0], drafts.shape[1] + 1
    sampling, positions = rows.build(device), rows.positions.to(device)
    repeated = sampling.repeat(width)
    left = torch.from_numpy(rng.integers(0, 9, (count, width + 3))).to(device)
    for token_ids in (left, drafts.to(device)):
        counts = torch.full((count,), token_ids.shape[1], device=device)
        sampling.append(token_ids, counts, positions)
    return repeated


def fold(step: StepOutput, width: int) -> StepOutput:
    """B · width rows of one token as B rows of `width`."""
    return StepOutput(
        step.num_tokens.view(-1, width).sum(1),
        step.token_ids.view(-1, width),
        step.failed.view(-1, width).any(1),
        {k: values.view(-1, width, *values.shape[2:]) for k, values in step.columns.items()},
    )


def row_of(step: StepOutput, i: int, j: int, params: RequestParams) -> dict[str, Tensor]:
    """What row i asked for at its j-th position, each column cut to its own shape."""
    out = {"token_ids": step.token_ids[i, j]}
    for column in requested_columns(params):
        out[column.name] = step.columns[column.name][i, j][
            tuple(slice(n) for n in column.tail_shape)
        ]
    return out


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_many_positions_equal_each_one_alone(
    seed: int, count: int, width: int, dtype: torch.dtype
) -> None:
    rng, vocab = np.random.default_rng(seed), 40
    rows = random_rows(rng, count, vocab)
    drafts = torch.from_numpy(rng.integers(0, vocab, (count, width - 1)))
    logits = normal(rng, count * width, vocab).to(dtype)
    before = logits.clone()
    sampling = verify_inputs(rows, drafts, rng)
    positions = (rows.positions.unsqueeze(1) + torch.arange(width)).flatten()
    processed = process(logits, sampling, positions)
    step = fold(sample_tokens(logits, sampling, positions), width)
    assert torch.equal(logits, before)
    assert step.num_tokens.tolist() == [width] * count and not step.failed.any()
    for r, position in enumerate(positions):
        i, j = divmod(r, width)
        if position > rows.ends[i]:
            continue  # launched past the row's end: nobody reads it
        alone, one = rows.alone(i, drafts[i, :j].tolist()), slice(r, r + 1)
        assert torch.equal(process(logits[one], alone, positions[one])[0], processed[r])
        expected = row_of(sample_tokens(logits[one], alone, positions[one]), 0, 0, rows.params[i])
        for name, values in row_of(step, i, j, rows.params[i]).items():
            assert torch.equal(values, expected[name]), (name, i, j)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1))
@settings(max_examples=max(1, settings().max_examples // 40), deadline=None)
def test_the_fused_kernels_sample_many_positions(
    seed: int, count: int, width: int, half: int
) -> None:
    rng, vocab = np.random.default_rng(seed), 40
    rows = random_rows(rng, count, vocab)
    drafts = torch.from_numpy(rng.integers(0, vocab, (count, width - 1)))
    logits = normal(rng, count * width, vocab).to([torch.float32, torch.bfloat16][half])
    positions = (rows.positions.unsqueeze(1) + torch.arange(width)).flatten()
    expected = fold(sample_tokens(logits, verify_inputs(rows, drafts, rng), positions), width)
    sampling = verify_inputs(rows, drafts, rng, DEVICE)
    step = fold(sample_fused(logits.to(DEVICE), sampling, positions.to(DEVICE)), width)
    for i, params in enumerate(rows.params):
        for j in range(width):
            for name, values in row_of(expected, i, j, params).items():
                found = row_of(step, i, j, params)[name].cpu()
                torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_verifying_drafts_yields_the_tokens_of_one_step_at_a_time(
    seed: int, count: int, width: int
) -> None:
    """Inputs repeated once serve all steps, and rejected drafts leave no trace."""
    rng, vocab, steps = np.random.default_rng(seed), 12, 9
    rows = random_rows(rng, count, vocab)
    logits = normal(rng, count, steps + width, vocab)  # at each position from the first one on
    sampling, ones = rows.build(), torch.ones(count, dtype=torch.int64)
    expected = torch.empty(count, steps, dtype=torch.int64)
    for j in range(steps):
        step = sample_tokens(logits[:, j], sampling, rows.positions + j)
        sampling.append(step.token_ids, step.num_tokens, rows.positions + j)
        expected[:, j] = step.token_ids[:, 0]

    sampling = rows.build()
    repeated = sampling.repeat(width)
    found = torch.empty(count, steps + width, dtype=torch.int64)
    done, order = torch.zeros(count, dtype=torch.int64), torch.arange(width)
    while done.min() < steps:
        places = done.clamp(max=steps - 1).unsqueeze(1) + order
        drafts = expected.gather(1, places[:, :-1].clamp(max=steps - 1))
        wrong = torch.from_numpy(rng.random(drafts.shape) < 0.3)
        drafts = torch.where(wrong, torch.from_numpy(rng.integers(0, vocab, drafts.shape)), drafts)
        positions = rows.positions + places[:, 0]
        sampling.append(drafts, ones * (width - 1), positions)
        lines = logits.gather(1, places.unsqueeze(2).expand(-1, -1, vocab)).flatten(0, 1)
        step = fold(
            sample_tokens(lines, repeated, (positions.unsqueeze(1) + order).flatten()), width
        )
        accepted = (step.token_ids[:, :-1] == drafts).long().cumprod(1).sum(1)
        sampling.append(step.token_ids, accepted + 1, positions)
        found.scatter_(1, places, step.token_ids)
        done = places[:, 0] + accepted + 1
    assert torch.equal(found[:, :steps], expected)


def test_repeated_inputs_share_the_history_and_have_their_own_rows() -> None:
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 3, 20)
    rows.params[1] = replace(rows.params[1], frequency_penalty=0.5, min_new_tokens=3)
    sampling = rows.build()
    assert sampling.repeat(1) is sampling and sampling.width == 1
    repeated = sampling.repeat(4)
    assert repeated.width == 4
    assert repeated.history.data_ptr() == sampling.history.data_ptr()
    for name in ("seeds", "greedy", "temperature", "top_k", "stop_ids", "processed_logprobs"):
        values = getattr(repeated, name)
        assert torch.equal(values, getattr(sampling, name).repeat_interleave(4, 0)), name
    assert repeated.any_penalties and repeated.any_min_new_tokens
    place = rows.positions
    sampling.append(torch.tensor([[7], [8], [9]]), torch.ones(3), place)
    assert repeated.history[1, place[1]] == 8
    with pytest.raises(AssertionError, match="pick rows first"):
        repeated.index_select(np.array([0]))
    with pytest.raises(AssertionError, match="join rows first"):
        SamplingInputs.concat([sampling, repeated])
    alone = sampling.index_select(np.array([1])).repeat(4)
    assert all(v.is_contiguous() for v in vars(alone).values() if isinstance(v, Tensor))
    nobody = sampling.index_select(np.array([], dtype=np.int64))
    assert nobody.repeat(3).index_select(np.array([], dtype=np.int64)).width == 1
