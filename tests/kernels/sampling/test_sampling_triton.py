"""The Triton sampler against the PyTorch reference, over random batches of every option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.sampling import sampling as reference
from batchgen.kernels.sampling.candidates_triton import TILES, CandidateTiles
from batchgen.kernels.sampling.filter_triton import thresholds
from batchgen.kernels.sampling.history import (
    append_tokens,
    append_tokens_reference,
    append_tokens_triton,
)
from batchgen.kernels.sampling.penalties_triton import apply_ban_triton, apply_penalties_triton
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox
from batchgen.kernels.sampling.sampling_triton import CHUNK, Draw, Share, can_divide, draw_triton
from batchgen.kernels.sampling.top_logprobs_triton import top_logprobs_triton

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
    return draw_triton(
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
few = settings(max_examples=settings().max_examples // 10, deadline=None)
fewer = settings(few, max_examples=max(1, settings().max_examples // 16))
fewest = settings(few, max_examples=max(1, settings().max_examples // 33))
tiles = st.sampled_from([TILES, CandidateTiles(4, 1024, 512), CandidateTiles(16, 32, 64)])
"""The real ones, and some that take many groups, and loops over them, at these sizes."""


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
    batch = make_batch(1, 32, 4100, torch.float32)
    batch.logits = torch.zeros_like(batch.logits)
    batch.temperature.fill_(1)
    batch.greedy.fill_(False)
    out = run_draw(batch, None)
    assert_same_tokens(out.token_ids, batch.logits, batch)
    assert len(set((out.token_ids % 4).tolist())) == 4


@pytest.mark.quick(1)
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


@pytest.mark.thorough
def test_extreme_temperatures_and_logits_give_numbers() -> None:
    for temperature in (torch.finfo(torch.float32).tiny, 1e-30, 1e30, torch.finfo().max):
        for scale in (1e-30, 1.0, 1e30, 3e37):
            batch = make_batch(5, 2, 5000, torch.float32)
            batch.logits = batch.logits * scale
            batch.logits[:, 4096:] = -INF
            batch.temperature.fill_(temperature)
            batch.processed.fill_(True)
            out = run_draw(batch, None)
            assert out.logprobs is not None
            assert out.logprobs.isfinite().all() and not out.failed.any()
            assert (batch.logits.gather(1, out.token_ids.unsqueeze(1)) > -INF).all()


def run_ranks(batch: Batch, ranks: int, logprobs: bool) -> list[Draw]:
    """The draws of ranks which have some of the columns each, and random ones past the last."""
    vocab = batch.logits.shape[1]
    width = -(-vocab // ranks // CHUNK) * CHUNK
    padded = torch.randn((len(batch.logits), ranks * width), device=DEVICE) + 100
    padded[:, :vocab] = batch.logits
    shares = padded.to(batch.logits.dtype).split(width, 1)
    sent: list[Tensor] = []

    def draw_on(rank: int, gather: Callable[[Tensor], Tensor]) -> Draw:
        own = shares[rank].contiguous()
        return draw_triton(
            own, own, batch.temperature, None, batch.seeds, batch.positions, batch.greedy,
            batch.processed if logprobs else None,
            share=Share(rank * width, vocab, ranks, gather),
        )  # fmt: skip

    def note(own: Tensor) -> Tensor:
        sent.append(own)
        return own.repeat(1, ranks)

    for rank in range(ranks):
        draw_on(rank, note)
    gathered = torch.cat(sent, 1)
    return [draw_on(rank, lambda _: gathered) for rank in range(ranks)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "vocab", "dtype"),
    [(2, 8192, torch.float32), (2, 15001, torch.bfloat16), (4, 12290, torch.float32)],
)
def test_ranks_draw_from_their_columns_what_one_draws(
    ranks: int, vocab: int, dtype: torch.dtype
) -> None:
    batch = make_batch(vocab + ranks, 5, vocab, dtype)
    whole = run_draw(batch, None)
    for out in run_ranks(batch, ranks, True):
        assert torch.equal(out.token_ids, whole.token_ids)
        assert torch.equal(out.failed, whole.failed)
        assert out.logprobs is not None and whole.logprobs is not None
        assert torch.equal(out.logprobs, whole.logprobs)
    (out, *_) = run_ranks(batch, ranks, False)
    assert out.logprobs is None and torch.equal(out.token_ids, whole.token_ids)


@pytest.mark.thorough
def test_a_row_that_is_broken_on_one_rank_fails_on_all() -> None:
    batch = make_batch(3, 4, 9000, torch.float32)
    batch.logits[1, 8999] = float("nan")
    batch.logits[2] = -INF
    for out in run_ranks(batch, 2, True):
        assert out.failed.tolist() == [False, True, True, False]
        assert ((out.token_ids >= 0) & (out.token_ids < 9000)).all()


def test_ranks_draw_only_what_one_would() -> None:
    assert can_divide(151_936, 10 * CHUNK, 4) and can_divide(151_936, 19 * CHUNK, 2)
    assert not can_divide(151_936, 37_984, 4)
    assert not can_divide(64 * CHUNK, 22 * CHUNK, 3), "66 chunks are joined as 128 are"


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


def filter_options(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.temperature, batch.top_k, batch.top_p, batch.min_p


@given(shapes, st.integers(0, 3), st.sampled_from([0.01, 1.0, 3.0, 30.0]), tiles)
@fewest
def test_thresholds_keep_what_the_reference_keeps(
    shape: tuple[int, int, int, torch.dtype], gap: int, spread: float, tiles: CandidateTiles
) -> None:
    batch = make_batch(*shape, gap=gap, spread=spread)
    limit = thresholds(batch.logits, *filter_options(batch), tiles=tiles)
    expected, clear = reference_keep(batch)
    kept = (batch.logits >= limit.unsqueeze(1)) & (batch.logits > -INF)
    assert torch.equal(kept[clear], expected[clear])
    off = (batch.top_k == 0) & (batch.top_p == 1) & (batch.min_p == 0)
    assert (limit[off] == -INF).all()


@pytest.mark.thorough
def test_thresholds_of_broken_rows_return_and_leave_others_alone() -> None:
    batch = make_batch(6, 6, 3000, torch.bfloat16)
    batch.top_k.fill_(7)
    batch.top_p.fill_(0.9)
    options = filter_options(batch)
    good = thresholds(batch.logits, *options)
    spoilt = batch.logits.clone()
    spoilt[1, 5] = float("nan")
    spoilt[2] = -INF
    spoilt[4] = INF
    out = thresholds(spoilt, *options)
    assert torch.equal(out[[0, 3, 5]], good[[0, 3, 5]])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("spread", "tiles"),
    [
        pytest.param(spread, tiles, marks=[] if i % 2 == j else [pytest.mark.slow])
        for i, spread in enumerate([0.01, 1.0, 3.0])
        for j, tiles in enumerate([TILES, CandidateTiles(4, 256, 128)])
    ],
)
def test_a_threshold_is_the_value_of_a_kept_token_and_the_same_in_any_batch(
    spread: float, tiles: CandidateTiles
) -> None:
    batch = make_batch(8, 8, 900, torch.float32, spread=spread)
    batch.logits[batch.logits == -INF] = -40.0
    options = filter_options(batch)
    limit = thresholds(batch.logits, *options, tiles=tiles)
    filtered = (batch.top_k.clamp(max=900) % 900 > 0) | (batch.top_p < 1)
    filtered |= (batch.min_p > 0) & (batch.temperature != 1)
    found = (batch.logits == limit.unsqueeze(1)).any(-1)
    below_min_p = (batch.temperature == 1) & (batch.min_p > 0)  # then it is the limit as it is
    assert found[filtered & ~below_min_p].all()
    for row in range(0, 8, 5):
        alone = [o[row : row + 1] for o in (batch.logits, *options)]
        one = thresholds(alone[0], alone[1], alone[2], alone[3], alone[4], tiles=tiles)
        assert torch.equal(one, limit[row : row + 1])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_rows_keep_every_token(dtype: torch.dtype) -> None:
    batch = make_batch(9, 8, 701, dtype)
    batch.logits = torch.full_like(batch.logits, -3.25)
    limit = thresholds(batch.logits, *filter_options(batch), tiles=CandidateTiles(4, 256, 128))
    assert (limit <= -3.25).all()


@pytest.mark.thorough
def test_clustered_tokens_do_not_mislead_the_guess_of_top_p() -> None:
    """Likely tokens side by side, or one of the maximum in every group and the rest just below."""
    logits = torch.full((3, 1600), -9.0, device=DEVICE)
    logits[0, :600] = torch.linspace(3, 1, 600, device=DEVICE)
    logits[1, ::8] = torch.linspace(3, -2, 200, device=DEVICE)
    logits[2] = 2.75
    logits[2, ::8] = 3.0
    batch = make_batch(10, 3, 1600, torch.float32)
    batch.logits = logits
    batch.temperature = torch.tensor([1.0, 1.5, 1.0], device=DEVICE)
    batch.top_k.fill_(0)
    batch.min_p.fill_(0)
    for share in (0.5, 0.9, 0.97, 0.999):
        batch.top_p.fill_(share)
        limit = thresholds(batch.logits, *filter_options(batch), tiles=CandidateTiles(16, 256, 256))
        expected, clear = reference_keep(batch)
        assert clear.all()
        assert torch.equal(batch.logits >= limit.unsqueeze(1), expected)


# --- the most likely tokens -----------------------------------------------------------------------


@given(shapes, st.integers(1, 100), st.booleans(), tiles)
@fewer
def test_top_logprobs_equal_the_reference(
    shape: tuple[int, int, int, torch.dtype], k: int, filtered: bool, tiles: CandidateTiles
) -> None:
    batch = make_batch(*shape)
    raw = batch.logits
    batch.logits = raw.float() * 1.25
    limit = batch.logits.quantile(0.9, -1).clamp(max=2.5) if filtered else None
    ids, values = top_logprobs_triton(
        batch.logits, raw, batch.temperature, limit, batch.processed, k, tiles=tiles
    )
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


@pytest.mark.thorough
def test_top_logprobs_of_ties_take_the_lowest_ids_and_fill_up() -> None:
    logits = torch.full((3, 700), -INF, device=DEVICE)
    logits[0] = 1.5
    logits[1, [3, 650, 651]] = 2.0
    logits[1, 9] = 2.5
    logits[2, 5:7] = -1e-3
    ones, raw = torch.ones(3, device=DEVICE), torch.zeros(3, dtype=torch.bool, device=DEVICE)
    for tiles in (TILES, CandidateTiles(4, 256, 128)):
        ids, values = top_logprobs_triton(logits, logits, ones, None, raw, 5, tiles=tiles)
        assert ids.tolist() == [[0, 1, 2, 3, 4], [9, 3, 650, 651, -1], [5, 6, -1, -1, -1]]
        assert ((ids == -1) == (values == -INF)).all()


# --- penalties and ban ----------------------------------------------------------------------------


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 50),
    st.one_of(st.integers(0, 3), st.integers(4, 2500)),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@few
def test_penalties_equal_the_reference(
    seed: int, rows: int, repeats: int, vocab: int, width: int, dtype: torch.dtype
) -> None:
    """Several positions of each history, from 1 to past its end, and garbage behind each row's."""
    rng = np.random.default_rng(seed)
    source = make_batch(seed, rows * repeats, vocab, dtype, gap=seed % 2).logits
    source[rng.integers(0, rows * repeats), rng.integers(0, vocab)] = float("nan")
    history = torch.tensor(rng.integers(0, vocab, (rows, width)), device=DEVICE)
    history[:, 1:][rng.random((rows, max(0, width - 1))) < 0.1] = -1
    if width:
        history[rng.random(rows) < 0.3, 0] = -1
    positions = torch.tensor(rng.integers(1, width + 4, rows * repeats), device=DEVICE)
    positions[rng.random(rows * repeats) < 0.2] = 1
    positions[rng.random(rows * repeats) < 0.2] = max(1, width)
    last = positions.view(rows, repeats).amax(1, keepdim=True)
    behind = torch.arange(width, device=DEVICE) >= last
    history = torch.where(behind, torch.tensor(rng.choice([-9, 0, vocab - 1])), history)
    prompt_lens = torch.tensor(rng.integers(0, width + 1, rows * repeats), device=DEVICE)

    def floats(low: float, high: float) -> Tensor:
        values = rng.uniform(low, high, rows * repeats)
        return torch.tensor(values, dtype=torch.float32, device=DEVICE)

    options = (prompt_lens, floats(0.5, 2), floats(-2, 2), floats(-2, 2))
    logits = source.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    before = logits.cpu()
    arguments = [t.cpu() for t in (source, history, positions, *options)]
    expected = reference.apply_penalties(before.clone(), *arguments)
    out = apply_penalties_triton(logits, source, history, positions, *options)
    assert out is logits
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    if width:
        plain = (history[:, 0] < 0).cpu().repeat_interleave(repeats)
        torch.testing.assert_close(out.cpu()[plain], before[plain], rtol=0, atol=0, equal_nan=True)


def test_penalties_count_more_often_than_a_block_is_long() -> None:
    """One token all over the history: each of its places finds the count, or the logit there."""
    history = torch.full((1, 5000), 3, device=DEVICE)
    source = torch.tensor([[1.0, -1.0, INF, -2.0, -INF]] * 3, device=DEVICE)
    positions = torch.tensor([1, 2049, 5000], device=DEVICE)
    ones, prompt_lens = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE).long()
    arguments = (history, positions, prompt_lens, 3 * ones, 0.5 * ones, 0.25 * ones)
    out = apply_penalties_triton(source.clone(), source, *arguments)
    expected = source.clone()
    expected[:, 3] = torch.tensor([-6.0, -6.5 - 2048 / 4, -6.5 - 4999 / 4])
    assert torch.equal(out, expected)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 12),
    st.sampled_from([torch.int32, torch.int64]),
)
@few
def test_append_equals_a_loop(
    seed: int, rows: int, width: int, capacity: int, count_dtype: torch.dtype
) -> None:
    """By kernel and reference, with views as arguments; places past the end are dropped."""
    rng = np.random.default_rng(seed)
    history = torch.tensor(rng.integers(-1, 50, (rows, capacity)))
    table = torch.tensor(rng.integers(0, 50, (rows, width + 2)), device=DEVICE)
    counts = torch.tensor(rng.integers(0, width + 1, (rows, 2)), dtype=count_dtype, device=DEVICE)
    positions = torch.tensor(rng.integers(1, capacity + 3, (rows, 3)), device=DEVICE)
    arguments = (table[:, 1 : width + 1], counts[:, 1], positions[:, 0])
    expected = history.clone()
    for row in range(rows):
        for i in range(int(counts[row, 1])):
            place = int(positions[row, 0]) + i
            if history[row, 0] >= 0 and place < capacity:
                expected[row, place] = table[row, 1 + i]
    for append in (append_tokens_triton, append_tokens_reference, append_tokens):
        out = history.to(DEVICE, copy=True)
        assert append(out, *arguments) is out
        assert torch.equal(out.cpu(), expected)


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
    assert torch.equal(apply_ban_triton(logits, ids, banned).cpu(), expected)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
def test_real_sizes_of_filters_and_top_logprobs(dtype: torch.dtype, spread: float) -> None:
    """From flat rows, whose every group is searched, to peaked ones; vocabularies of two sizes."""
    for vocab in (151_936, 300_001):
        batch = make_batch(11, 48, vocab, dtype, spread=spread)
        limit = thresholds(batch.logits, *filter_options(batch))
        expected, clear = reference_keep(batch)
        kept = (batch.logits >= limit.unsqueeze(1)) & (batch.logits > -INF)
        assert torch.equal(kept[clear], expected[clear])
        ids, values = top_logprobs_triton(
            batch.logits, batch.logits, batch.temperature, limit, batch.processed, 20
        )
        processed = scaled_logits(batch, limit)
        source = torch.where(batch.processed.unsqueeze(1), processed, batch.logits.float())
        full = source.log_softmax(-1)
        expected_values = full.sort(dim=-1, descending=True, stable=True).values[:, :20]
        torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=5e-5)
        there = ids >= 0
        named = full.gather(1, ids.clamp(min=0).long())
        torch.testing.assert_close(values[there], named[there], rtol=1e-5, atol=5e-5)


@pytest.mark.gpu
def test_filters_and_top_logprobs_in_a_cuda_graph() -> None:
    batch = make_batch(12, 16, 151_936, torch.bfloat16)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        limit = thresholds(batch.logits, *filter_options(batch))
        logits, processed = batch.logits, batch.processed
        return limit, *top_logprobs_triton(logits, logits, batch.temperature, limit, processed, 20)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        batch.logits.copy_(batch.logits.roll(1, 0))
        batch.top_k.copy_(batch.top_k.roll(1, 0))
        graph.replay()
        for there, here in zip(captured, step(), strict=True):
            assert torch.equal(there, here)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, vocab = 14_200, 151_937
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, -1] = 5.0
    ones, none = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    index = torch.arange(rows, device=DEVICE)
    limit = thresholds(logits, ones, (index * 0 + 3), ones, none)
    out = draw_triton(logits, logits, ones, limit, index, index, index >= 0, index < 0)
    assert out.token_ids[-1].item() == vocab - 1 and (out.token_ids[:-1] == 0).all()
    ids, _ = top_logprobs_triton(logits, logits, ones, None, index < 0, 2)
    assert ids[-1].tolist() == [vocab - 1, 0]
