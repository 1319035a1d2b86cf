"""The Triton sampler against the PyTorch reference, over random batches of every option."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import sampling as reference
from batchgen.kernels.filter_triton import thresholds, top_logprobs
from batchgen.kernels.penalties_triton import apply_ban, apply_penalties
from batchgen.kernels.philox import Stream, gumbel_noise, philox
from batchgen.kernels.sampling_triton import Draw, draw

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Batch:
    """Random rows and their options; `strided` rows lie apart, with NaN between them."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    seeds: Tensor
    positions: Tensor
    processed: Tensor


def make_batch(
    seed: int, rows: int, vocab: int, dtype: torch.dtype, *, gap: int = 0, spread: float = 3.0
) -> Batch:
    """Ties (bfloat16 or rounded values), excluded tokens, and options on or off row by row."""
    rng = np.random.default_rng(seed)

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(rng.choice(values, rows), dtype=dtype, device=DEVICE)

    values = rng.normal(size=(rows, vocab + gap)) * spread
    if rng.integers(2):
        values = values.round()
    values[rng.random(values.shape) < 0.1] = -INF
    values[np.arange(rows), rng.integers(0, vocab, rows)] = 2.0
    logits = torch.tensor(values, dtype=dtype, device=DEVICE)
    logits[:, vocab:] = float("nan")
    greedy = pick([0, 0, 1], torch.bool)
    temperature = pick([1, 0.7, 1.6, 0.05, 1e-5, 50], torch.float32).masked_fill_(greedy, 1)
    return Batch(
        logits[:, :vocab],
        temperature,
        pick([0, 0, 1, 2, 5, 50, vocab, 2**62], torch.int64).masked_fill_(greedy, 0),
        pick([1, 1, 0.3, 0.9, 0.99, 1e-6], torch.float32).masked_fill_(greedy, 1),
        pick([0, 0, 0.01, 0.3, 1], torch.float32).masked_fill_(greedy, 0),
        greedy,
        torch.tensor(rng.integers(-(2**63), 2**63, rows), device=DEVICE),
        torch.tensor(rng.integers(0, 2**32, rows), device=DEVICE),
        pick([0, 1], torch.bool),
    )


def run_draw(
    batch: Batch, threshold: Tensor | None, *, raw: Tensor | None = None, logprobs: bool = True
) -> Draw:
    return draw(
        batch.logits,
        batch.logits if raw is None else raw,
        batch.temperature,
        threshold,
        batch.seeds,
        batch.positions,
        batch.greedy,
        batch.processed if logprobs else None,
    )


def scaled_logits(batch: Batch, threshold: Tensor | None = None) -> Tensor:
    """[R, V] float32 by the reference, without tokens below a threshold on the logits."""
    out = batch.logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    below = None if threshold is None else out < threshold.unsqueeze(1)
    reference.apply_temperature(out, batch.temperature)
    return out if below is None else out.masked_fill_(below, -INF)


def assert_same_tokens(tokens: Tensor, processed: Tensor, batch: Batch) -> None:
    """The reference's token, or one whose score rounding cannot tell from the best."""
    rows = torch.arange(len(tokens), device=DEVICE)
    words = philox(batch.seeds, batch.positions, 0, Stream.SAMPLE, processed.shape[1])
    noise = gumbel_noise(words).masked_fill_(batch.greedy.unsqueeze(1), 0)
    scores = processed + noise
    expected = scores.argmax(-1)
    gap = scores[rows, expected] - scores[rows, tokens]
    assert ((tokens == expected) | ((gap <= 1e-5) & ~batch.greedy)).all(), (tokens, expected)


shapes = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.one_of(st.integers(1, 40), st.integers(1000, 9001)),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
few = settings(max_examples=25, deadline=None)


# --- the draw -------------------------------------------------------------------------------------


@given(shapes, st.integers(0, 3), st.booleans(), st.booleans())
@few
def test_draw_equals_the_reference(
    shape: tuple[int, int, int, torch.dtype], gap: int, filtered: bool, penalised: bool
) -> None:
    batch = make_batch(*shape, gap=gap)
    raw = batch.logits
    if penalised:
        batch.logits = batch.logits.float() + 0.5 * torch.arange(raw.shape[1], device=DEVICE) % 2
    limit = batch.logits.float().quantile(0.5, -1).clamp(max=2) if filtered else None
    if limit is not None:
        limit[::2] = -INF
    out = run_draw(batch, limit, raw=raw)
    assert out.logprobs is not None
    processed = scaled_logits(batch, limit)
    assert_same_tokens(out.token_ids, processed, batch)
    assert out.token_ids.dtype == torch.int64 and out.logprobs.dtype == torch.float32
    assert not out.failed.any()
    source = torch.where(batch.processed.unsqueeze(1), processed, raw.float())
    expected = reference.logprobs_of(source, out.token_ids)
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(run_draw(batch, limit, raw=raw, logprobs=False).token_ids, out.token_ids)


def test_the_noise_of_every_column_is_philox() -> None:
    """With one token left per row, or two, the noise alone decides: every lane is looked at."""
    batch = make_batch(1, 64, 4100, torch.float32)
    batch.logits = torch.zeros_like(batch.logits)
    batch.temperature.fill_(1)
    batch.greedy.fill_(False)
    out = run_draw(batch, None)
    assert_same_tokens(out.token_ids, batch.logits, batch)
    assert len(set((out.token_ids % 4).tolist())) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_rows_fail_alone(dtype: torch.dtype) -> None:
    batch = make_batch(3, 8, 5000, dtype)
    good = run_draw(batch, None)
    spoilt = batch.logits.clone()
    spoilt[1, 4999] = float("nan")
    spoilt[3, 0] = INF
    spoilt[4] = -INF
    spoilt[6] = float("nan")
    batch.logits = spoilt
    for raw in (spoilt, spoilt.float()):
        out = run_draw(batch, torch.full((8,), -INF, device=DEVICE), raw=raw)
        assert out.failed.tolist() == [False, True, False, True, True, False, True, False]
        assert torch.equal(out.token_ids[~out.failed], good.token_ids[~out.failed])
        assert out.logprobs is not None and not out.logprobs[~out.failed].isnan().any()
        assert ((out.token_ids >= 0) & (out.token_ids < 5000)).all()


def test_the_lowest_of_equal_scores_wins_across_chunks() -> None:
    batch = make_batch(4, 3, 9000, torch.float32)
    batch.greedy.fill_(True)
    batch.temperature.fill_(1)
    batch.logits = torch.full_like(batch.logits, -1.0)
    batch.logits[0, [17, 5000, 8999]] = 3.0
    batch.logits[1, [4096, 8192]] = 3.0
    assert run_draw(batch, None).token_ids.tolist() == [17, 4096, 0]


def test_extreme_temperatures_and_logits_give_numbers() -> None:
    for temperature in (torch.finfo(torch.float32).tiny, 1e-30, 1e30, torch.finfo().max):
        for scale in (1e-30, 1.0, 1e30, 3e37):
            batch = make_batch(5, 4, 5000, torch.float32)
            batch.logits = batch.logits * scale
            batch.logits[:, 4096:] = -INF
            batch.temperature.fill_(temperature)
            batch.processed.fill_(True)
            out = run_draw(batch, None)
            assert out.logprobs is not None
            assert out.logprobs.isfinite().all() and not out.failed.any()
            assert (batch.logits.gather(1, out.token_ids.unsqueeze(1)) > -INF).all()


# --- filters --------------------------------------------------------------------------------------


def reference_keep(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which tokens [R, V] stay, and which rows rounding cannot change."""
    kept = []
    for nudge in (1 - 1e-5, 1, 1 + 1e-5):
        logits = scaled_logits(batch)
        top_p = torch.where(batch.top_p < 1, batch.top_p * nudge, 1)
        min_p = torch.where(batch.min_p < 1, batch.min_p * nudge, 1)
        reference.filter_top_k_top_p_min_p(logits, batch.top_k, top_p, min_p)
        kept.append(logits > -INF)
    return kept[1], (kept[0] == kept[2]).all(-1)


@given(shapes, st.integers(0, 3), st.sampled_from([0.01, 3.0, 30.0]))
@few
def test_thresholds_keep_what_the_reference_keeps(
    shape: tuple[int, int, int, torch.dtype], gap: int, spread: float
) -> None:
    batch = make_batch(*shape, gap=gap, spread=spread)
    limit = thresholds(batch.logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    expected, clear = reference_keep(batch)
    kept = (batch.logits >= limit.unsqueeze(1)) & (batch.logits > -INF)
    assert torch.equal(kept[clear], expected[clear])
    off = (batch.top_k == 0) & (batch.top_p == 1) & (batch.min_p == 0)
    assert (limit[off] == -INF).all()


def test_thresholds_of_broken_rows_return_and_leave_others_alone() -> None:
    batch = make_batch(6, 6, 3000, torch.bfloat16)
    batch.top_k.fill_(7)
    batch.top_p.fill_(0.9)
    options = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    good = thresholds(batch.logits, *options)
    spoilt = batch.logits.clone()
    spoilt[1, 5] = float("nan")
    spoilt[2] = -INF
    spoilt[4] = INF
    out = thresholds(spoilt, *options)
    assert torch.equal(out[[0, 3, 5]], good[[0, 3, 5]])


# --- the most likely tokens -----------------------------------------------------------------------


@given(shapes, st.integers(1, 100), st.booleans())
@few
def test_top_logprobs_equal_the_reference(
    shape: tuple[int, int, int, torch.dtype], k: int, filtered: bool
) -> None:
    batch = make_batch(*shape)
    raw = batch.logits
    batch.logits = raw.float() * 1.25
    limit = batch.logits.quantile(0.9, -1).clamp(max=2.5) if filtered else None
    ids, values = top_logprobs(batch.logits, raw, batch.temperature, limit, batch.processed, k)
    processed = scaled_logits(batch, limit)
    source = torch.where(batch.processed.unsqueeze(1), processed, raw.float())
    expected_ids, expected = reference.top_logprobs(source, k)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=2e-5)
    assert ids.dtype == torch.int32 and values.dtype == torch.float32
    # Where rounding makes or breaks ties of the log-probabilities, their order may differ.
    full = source.log_softmax(-1)
    clear = torch.ones_like(ids, dtype=torch.bool)
    for row, column in (ids != expected_ids).nonzero().tolist():
        distance = full[row, ids[row, column]] - full[row, expected_ids[row, column]]
        clear[row, column] = distance.abs() > 2e-5
    assert torch.equal(ids[clear], expected_ids[clear])
    for row in ids.tolist():
        present = [i for i in row if i >= 0]
        assert len(set(present)) == len(present)
    tied = values[:, 1:] == values[:, :-1]
    assert (ids[:, 1:] > ids[:, :-1])[tied & (ids[:, 1:] >= 0)].all()


# --- penalties and ban ----------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 50), st.integers(0, 2500))
@few
def test_penalties_equal_the_reference(seed: int, rows: int, vocab: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    logits = make_batch(seed, rows, vocab, torch.float32).logits.clone()
    history = torch.tensor(rng.integers(0, vocab, (rows, width)), device=DEVICE)
    lengths = torch.tensor(rng.integers(0, width + 1, rows), device=DEVICE)
    history.masked_fill_(torch.arange(width, device=DEVICE) >= lengths.unsqueeze(1), -1)
    prompt_lens = torch.tensor(rng.integers(0, width + 1, rows), device=DEVICE)

    def floats(low: float, high: float) -> Tensor:
        return torch.tensor(rng.uniform(low, high, rows), dtype=torch.float32, device=DEVICE)

    options = (floats(0.5, 2), floats(-2, 2), floats(-2, 2))
    expected = reference.apply_penalties(
        logits.cpu().clone(), history.cpu(), prompt_lens.cpu(), *(o.cpu() for o in options)
    )
    out = apply_penalties(logits, history, prompt_lens, *options)
    assert out is logits
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    plain = (lengths == 0).cpu()
    assert torch.equal(out.cpu()[plain], expected[plain])


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
@few
def test_ban_equals_the_reference(seed: int, rows: int, vocab: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    logits = make_batch(seed, rows, vocab, torch.float32).logits.clone()
    if seed % 2:  # few tokens left, so that bans are void
        logits[:, rng.random(vocab) < 0.8] = -INF
    ids = torch.tensor(rng.integers(-1, vocab + 3, (rows, width)), device=DEVICE)
    banned = torch.tensor(rng.integers(0, 2, rows), dtype=torch.bool, device=DEVICE)
    expected = reference.apply_ban(logits.cpu().clone(), ids.cpu(), banned.cpu())
    assert torch.equal(apply_ban(logits, ids, banned).cpu(), expected)


# --- real sizes -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes(dtype: torch.dtype) -> None:
    batch = make_batch(7, 64, 151_936, dtype)
    limit = thresholds(batch.logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    expected, clear = reference_keep(batch)
    kept = (batch.logits >= limit.unsqueeze(1)) & (batch.logits > -INF)
    assert torch.equal(kept[clear], expected[clear])
    out = run_draw(batch, limit)
    processed = scaled_logits(batch, limit)
    assert_same_tokens(out.token_ids, processed, batch)
    source = torch.where(batch.processed.unsqueeze(1), processed, batch.logits.float())
    assert out.logprobs is not None
    torch.testing.assert_close(
        out.logprobs, reference.logprobs_of(source, out.token_ids), rtol=1e-5, atol=5e-5
    )


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, vocab = 14_200, 151_937
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, -1] = 5.0
    ones, none = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    index = torch.arange(rows, device=DEVICE)
    limit = thresholds(logits, ones, (index * 0 + 3), ones, none)
    out = draw(logits, logits, ones, limit, index, index, index >= 0, index < 0)
    assert out.token_ids[-1].item() == vocab - 1 and (out.token_ids[:-1] == 0).all()
    ids, _ = top_logprobs(logits, logits, ones, None, index < 0, 2)
    assert ids[-1].tolist() == [vocab - 1, 0]
