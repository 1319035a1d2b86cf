"""Rejection sampling: the Triton kernels against the reference, and both against the law."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, uniform
from batchgen.kernels.sampling.sampling import sample
from batchgen.kernels.speculation import rejection_triton
from batchgen.kernels.speculation.rejection import Verified
from tests.support.kernels.verified_batches import (
    DEVICE,
    INF,
    NAN,
    Batch,
    arguments,
    assert_valid,
    make_batch,
    shapes,
    verify_reference,
    verify_triton,
)

both = pytest.mark.parametrize("verify", [verify_reference, verify_triton])


def assert_equal(out: Verified, expected: Verified, skip: Tensor | None = None) -> None:
    """Equal in all that is defined, in the rows that are not to be skipped."""
    kept = torch.ones_like(out.failed) if skip is None else ~skip
    width = out.token_ids.shape[1]
    used = torch.arange(width) < expected.num_tokens.unsqueeze(1)
    assert torch.equal(out.failed[kept], expected.failed[kept])
    assert torch.equal(out.num_tokens[kept], expected.num_tokens[kept])
    used &= kept.unsqueeze(1)
    assert torch.equal(out.token_ids[used], expected.token_ids[used])


def close_calls(batch: Batch, expected: Verified) -> Tensor:
    """[B]: random rows where a decision is a matter of rounding, by a plain float64 computation."""
    out = torch.zeros(len(batch.seeds), dtype=torch.bool)
    for row in (~batch.greedy & ~expected.failed).nonzero().flatten().tolist():
        count, stop = int(batch.num_drafts[row]), int(expected.num_tokens[row]) - 1
        one = torch.tensor([row])
        for j in range(min(stop + 1, count)):
            p = batch.logits[row, j].double().softmax(-1)
            u = uniform(philox(batch.seeds[one], batch.positions[one] + j, 0, Stream.ACCEPT, 1))
            draft = batch.drafts[row, j]
            q = 1.0 if batch.probs is None else batch.probs[row, j, draft]
            out[row] |= bool((u * q - p[draft]).abs() < 1e-6)
        p = batch.logits[row, stop].double().softmax(-1)
        stream, weights = Stream.SAMPLE, p
        if stop < count:
            point = torch.zeros_like(p)
            point[batch.drafts[row, stop]] = 1
            q_row = point if batch.probs is None else batch.probs[row, stop].double()
            stream, weights = Stream.RECOVER, (p - q_row).clamp(min=0)
            out[row] |= bool(weights.sum() < 1e-4)  # differences of rounding
        noise = gumbel_noise(
            philox(batch.seeds[one], batch.positions[one] + stop, 0, stream, len(p))
        )
        best = (weights.log() + noise[0]).topk(2).values
        out[row] |= bool(best[0] - best[1] < 1e-4)
    return out


@given(shapes, st.booleans(), st.booleans())
@settings(max_examples=settings().max_examples // 5, deadline=None)
def test_triton_equals_the_reference(
    shape: tuple[int, int, int, int], point: bool, tie: bool
) -> None:
    batch = make_batch(*shape, point=point, tie=tie)
    expected, out = verify_reference(batch), verify_triton(batch)
    for result in (expected, out):
        assert_valid(result, batch)
        assert not result.failed.any()
    assert_equal(out, expected, close_calls(batch, expected))


@pytest.mark.thorough
@pytest.mark.parametrize("point", [True, False])
def test_every_count_of_drafts_with_every_end(point: bool) -> None:
    """Few rows are close calls, or the comparison above would prove nothing."""
    batch = make_batch(1, 800, 3, 50, point=point, tie=False)
    expected = verify_reference(batch)
    skip = close_calls(batch, expected)
    assert skip.float().mean() < 0.1
    cases = {
        (bool(batch.greedy[row]), int(batch.num_drafts[row]), int(expected.num_tokens[row])): row
        for row in (~skip).nonzero().flatten().tolist()
    }
    assert len(cases) == 2 * (1 + 2 + 3 + 4)
    rows = torch.tensor(list(cases.values()))
    assert_equal(verify_triton(batch.rows(rows)), Verified(*(x[rows] for x in expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("point", [True, False])
def test_real_sizes_and_replays_of_a_graph(point: bool) -> None:
    """One graph for batches whose rows stop elsewhere: nothing is read back, nothing baked in."""
    batch = make_batch(11, 16, 7, 151_936, point=point, tie=False)
    moved = arguments(batch, DEVICE)
    rejection_triton.verify_triton(*moved)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = Verified(*rejection_triton.verify_triton(*moved))  # type: ignore[arg-type]
    for seed in (11, 12):
        batch = make_batch(seed, 16, 7, 151_936, point=point, tie=False)
        for old, new in zip(moved, arguments(batch, DEVICE), strict=True):
            if old is not None and new is not None:
                old.copy_(new)
        for x in out:
            x.fill_(77)
        graph.replay()
        expected = verify_reference(batch)
        result = Verified(*(x.cpu() for x in out))
        assert_valid(result, batch)
        assert_equal(result, expected, close_calls(batch, expected))
        assert_equal(verify_triton(batch), result)


@pytest.mark.quick(1)
@both
@pytest.mark.parametrize("point", [True, False])
def test_a_row_does_not_depend_on_its_batch_mates(
    verify: Callable[[Batch], Verified], point: bool
) -> None:
    batch = make_batch(7, 5, 3, 5000, point=point, tie=False)
    together = verify(batch)
    for row in range(5):
        index = torch.tensor([row])
        alone = verify(batch.rows(index))
        assert_equal(alone, Verified(*(x[index] for x in together)))
    order = torch.arange(4, -1, -1)
    assert_equal(verify(batch.rows(order)), Verified(*(x[order] for x in together)))


@pytest.mark.quick(2)
@both
@pytest.mark.parametrize("point", [True, False])
def test_broken_rows_fail_alone(verify: Callable[[Batch], Verified], point: bool) -> None:
    batch = make_batch(3, 9, 2, 5000, point=point, tie=False)
    good = verify(batch)
    stop = good.num_tokens - 1
    spoilt = batch.logits.clone()
    spoilt[1, 0, 4999] = NAN  # at the first position
    spoilt[3] = -INF
    spoilt[5, stop[5]] = NAN  # at the one that the row would stop at
    spoilt[6, stop[6], 17] = INF
    spoilt[8, stop[8] + 1 :] = NAN  # past it: not used
    batch.logits = spoilt
    out = verify(batch)
    assert_valid(out, batch)
    assert out.failed.nonzero().flatten().tolist() == [1, 3, 5, 6]
    assert_equal(out, good, out.failed)


@both
def test_a_failed_position_after_accepted_drafts_fails_the_row(
    verify: Callable[[Batch], Verified],
) -> None:
    """Also where the draft is what argmax makes of the broken logits."""
    logits = torch.zeros(2, 3, 8)
    logits[:, :, 5] = 1e4
    logits[:, 1] = -INF
    drafts = torch.tensor([[5, 0], [5, 0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    greedy = torch.tensor([True, False])
    out = verify(Batch(logits, drafts, torch.tensor([2, 2]).int(), None, zeros, zeros, greedy))
    assert out.failed.tolist() == [True, True] and out.num_tokens.tolist() == [0, 0]


@both
def test_greedy_rows_take_the_lowest_argmax(verify: Callable[[Batch], Verified]) -> None:
    logits = torch.full((3, 3, 9000), -1.0)
    logits[:, :, [17, 5000, 8999]] = 3.0
    drafts = torch.tensor([[17, 17], [17, 5000], [8999, 17]])
    zeros, counts = torch.zeros(3, dtype=torch.int64), torch.tensor([2, 2, 2]).int()
    q = torch.full((3, 2, 9000), NAN)  # not for greedy rows
    for probs in (None, q):
        out = verify(Batch(logits, drafts, counts, probs, zeros, zeros, zeros == 0))
        assert out.num_tokens.tolist() == [3, 2, 1]
        assert [out.token_ids[i, : out.num_tokens[i]].tolist() for i in range(3)] == [
            [17, 17, 17],
            [17, 17],
            [17],
        ]


@pytest.mark.quick(1)
@both
@pytest.mark.parametrize("vocab", [8, 4099])
def test_the_bonus_is_the_draw_of_the_ordinary_sampler(
    verify: Callable[[Batch], Verified], vocab: int
) -> None:
    """The token that autoregressive sampling gives at that position."""
    batch = make_batch(5, 9, 2, vocab, point=True, tie=False)
    batch.logits[:, :2] = -INF
    batch.logits[:, :2, 3] = 0.0
    batch.drafts.fill_(3)
    out = verify(batch)
    assert torch.equal(out.num_tokens, batch.num_drafts + 1)
    rows = torch.arange(9)
    last = batch.logits[rows, batch.num_drafts.long()]
    last[batch.num_drafts < 2] = batch.logits[batch.num_drafts < 2, 0]
    positions = batch.positions + batch.num_drafts
    moved = [x.to(DEVICE) for x in (last, batch.seeds, positions, batch.greedy)]
    expected = sample(moved[0], moved[1], moved[2], moved[3]).cpu()
    assert torch.equal(out.token_ids[rows, batch.num_drafts.long()], expected)


@pytest.mark.quick(1)
@both
def test_what_rounding_leaves_without_any_weight_is_drawn_from_p(
    verify: Callable[[Batch], Verified],
) -> None:
    """q > p everywhere, as rounding can have it; drafts that p excludes are rejected."""
    count, vocab = 8, 5
    logits = torch.tensor([-INF, 0.0, 1.0, -1.0, 0.5]).expand(count, 2, vocab).contiguous()
    q = (logits[:, :1].softmax(-1) * 1.001).contiguous()
    q[:, 0, 0] = 0.5
    zeros, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int32)
    batch = Batch(logits, zeros.unsqueeze(1), ones, q, torch.arange(count), zeros, zeros > 0)
    out = verify(batch)
    assert (out.num_tokens == 1).all()
    moved = [x.to(DEVICE) for x in (logits[:, 0], batch.seeds, zeros, batch.greedy)]
    expected = sample(moved[0], moved[1], moved[2], moved[3], Stream.RECOVER).cpu()
    assert torch.equal(out.token_ids[:, 0], expected)
    batch.probs = torch.zeros_like(q)  # underflow, as of a draft that p excludes
    assert (verify(batch).num_tokens == 1).all()
    batch.drafts = batch.drafts + 1  # and one that it does not
    assert (verify(batch).num_tokens == 2).all()


@pytest.mark.quick(1)
@both
@pytest.mark.parametrize("point", [True, False])
def test_a_rejected_draft_is_not_drawn_again(
    verify: Callable[[Batch], Verified], point: bool
) -> None:
    count = 14
    logits = torch.tensor([0.0, 1.0, 0.0]).expand(count, 2, 3).contiguous()
    q = torch.tensor([0.0, 1.0, 0.0]).expand(count, 1, 3).contiguous()
    zeros, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int32)
    drafts, probs = torch.ones_like(zeros).unsqueeze(1), None if point else q
    batch = Batch(logits, drafts, ones, probs, torch.arange(count) + 100, zeros, zeros > 0)
    out = verify(batch)
    rejected = out.token_ids[out.num_tokens == 1, 0]
    assert 0 < len(rejected) < count and (rejected != 1).all()
    assert set(rejected.tolist()) == {0, 2}


@pytest.mark.quick(1)
@both
def test_the_probability_of_a_draft_counts_every_chunk(
    verify: Callable[[Batch], Verified],
) -> None:
    """0.95 from the whole row; the maxima of its chunks differ by twelve."""
    count = 8
    logits = torch.zeros(count, 2, 9000)
    logits[:, :, 5000] = 12.0
    zeros, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int32)
    drafts = torch.full((count, 1), 5000)
    batch = Batch(logits, drafts, ones, None, torch.arange(count), zeros, zeros > 0)
    u = uniform(philox(batch.seeds, zeros, 0, Stream.ACCEPT, 1)).squeeze(1)
    p = float(np.exp(12) / (np.exp(12) + 8999))
    assert torch.equal(verify(batch).num_tokens == 2, u < p)
