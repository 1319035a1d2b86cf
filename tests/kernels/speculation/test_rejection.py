"""Rejection sampling: the Triton kernels against the reference, and both against the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, uniform
from batchgen.kernels.sampling.sampling import filter_top_k_top_p_min_p, sample
from batchgen.kernels.speculation import rejection, rejection_triton
from batchgen.kernels.speculation.rejection import Verified

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Batch:
    """The arguments of `verify`, on the CPU; logits [B, k + 1, V]."""

    logits: Tensor
    drafts: Tensor
    num_drafts: Tensor
    probs: Tensor | None
    seeds: Tensor
    positions: Tensor
    greedy: Tensor

    def rows(self, index: Tensor) -> Batch:
        probs = None if self.probs is None else self.probs[index]
        return Batch(
            self.logits[index], self.drafts[index], self.num_drafts[index], probs,
            self.seeds[index], self.positions[index], self.greedy[index],
        )  # fmt: skip


def verify_reference(batch: Batch) -> Verified:
    return _verify(batch, rejection.verify, "cpu")


def verify_triton(batch: Batch) -> Verified:
    return _verify(batch, lambda *args: Verified(*rejection_triton.verify(*args)), DEVICE)


def _verify(batch: Batch, verify: Callable[..., Verified], device: str) -> Verified:
    return Verified(*(x.cpu() for x in verify(*arguments(batch, device))))


def arguments(batch: Batch, device: str) -> list[Tensor | None]:
    drafts = torch.full((len(batch.drafts), batch.drafts.shape[1] + 3), -7, device=device)
    drafts = drafts[:, 2:-1].copy_(batch.drafts)  # columns of a step's tokens
    values = [
        batch.logits.flatten(0, 1), drafts, batch.num_drafts, batch.probs, batch.seeds,
        batch.positions, batch.greedy,
    ]  # fmt: skip
    return [None if x is None else x.to(device) for x in values]


both = pytest.mark.parametrize("verify", [verify_reference, verify_triton])


def make_batch(seed: int, batch: int, k: int, vocab: int, *, point: bool, tie: bool) -> Batch:
    """Random rows whose drafts are likely, and garbage wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, k + 1, vocab)) * rng.choice([0.1, 1, 5])
    if tie:
        logits = logits.round()
    logits[rng.random(logits.shape) < 0.3] = -INF
    target = rng.integers(0, vocab, (batch, k + 1))
    np.put_along_axis(logits, target[..., None], rng.choice([3, 12], (batch, k + 1, 1)), -1)
    q = np.exp(rng.normal(size=(batch, k, vocab)) * 2)
    q[rng.random(q.shape) < 0.3] = 0.0
    weights = np.where(np.isfinite(logits[:, :k]), np.exp(logits[:, :k]), 0)
    close = rng.random((batch, k, 1)) < 0.5
    q = np.where(close, weights * rng.choice([1, 1, 0.7], q.shape), q) + 1e-9
    q /= q.sum(-1, keepdims=True)
    drafts = np.where(
        rng.random((batch, k)) < 0.7, target[:, :k], rng.integers(0, vocab, (batch, k))
    )
    num_drafts = rng.integers(0, k + 1, batch)
    for row, count in enumerate(num_drafts):
        logits[row, count + 1 :] = NAN
        q[row, count:] = NAN
        drafts[row, count:] = rng.choice([-1, 2**62])
    return Batch(
        torch.from_numpy(logits).float(),
        torch.from_numpy(drafts),
        torch.from_numpy(num_drafts).int(),
        None if point else torch.from_numpy(q).float(),
        torch.from_numpy(rng.integers(-(2**63), 2**63, batch)),
        torch.from_numpy(rng.integers(0, 2**32 - k, batch)),
        torch.from_numpy(rng.random(batch) < 0.3),
    )


def assert_valid(out: Verified, batch: Batch) -> None:
    rows, width, vocab = batch.logits.shape
    assert out.num_tokens.dtype == torch.int32 and out.token_ids.dtype == torch.int64
    assert out.failed.dtype == torch.bool and out.token_ids.shape == (rows, width)
    assert ((out.token_ids >= 0) & (out.token_ids < vocab)).all()
    assert torch.equal(out.num_tokens == 0, out.failed)
    assert (out.num_tokens <= batch.num_drafts + 1).all()
    used = torch.arange(width) < out.num_tokens.unsqueeze(1)
    chosen = batch.logits.gather(2, out.token_ids.unsqueeze(2)).squeeze(2)
    assert (chosen[used] > -INF).all(), "an excluded token"


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


shapes = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, 3, 7]),
    st.one_of(st.integers(2, 40), st.integers(4090, 9001)),
)


# --- the kernels against the reference ------------------------------------------------------------


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
    rejection_triton.verify(*moved)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = Verified(*rejection_triton.verify(*moved))  # type: ignore[arg-type]
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


# --- the law --------------------------------------------------------------------------------------


def assert_law(tokens: Tensor, probs: Tensor) -> None:
    """Chi-square of tokens [N] against probs [V], up to float32's rounding of their sum."""
    counts = np.bincount(tokens.numpy(), minlength=len(probs))
    law = probs.double().numpy() / probs.double().sum().item()
    support = law > 0
    assert counts[~support].sum() == 0, "a token without probability"
    if support.sum() > 1:
        assert stats.chisquare(counts[support], law[support] * len(tokens)).pvalue > 1e-3


COUNT = 20_000

TARGETS = {
    "plain": [0.3, -1.0, 2.0, 0.0, 1.0, -2.0, 0.5, 1.5],
    "flat": [0.0] * 8,
    "sparse": [0.3, -INF, 2.0, -INF, 1.0, -INF, -INF, 1.5],
    "single": [-INF, -INF, 0.7, -INF, -INF, -INF, -INF, -INF],
}
PROPOSALS = {
    "far": [2.0, 1.5, -3.0, 2.5, -2.0, 1.0, 0.0, -4.0],
    "close": [0.5, -0.8, 1.7, 0.1, 1.0, -2.0, 0.4, 1.6],
    "disjoint": [-INF, 1.0, -INF, 2.0, -INF, 0.0, 1.0, -INF],
}


def one_step(p: Tensor, q: Tensor | None, draft: int) -> Batch:
    """Rows with one draft: of q, or the given one with a point mass."""
    seeds, zeros = torch.arange(COUNT) * 7919, torch.zeros(COUNT, dtype=torch.int64)
    positions = torch.arange(COUNT) % 1000 + 2**31
    drafts, probs = torch.full((COUNT,), draft), None
    if q is not None:
        rows = q.expand(COUNT, -1).contiguous()
        drafts, probs = rejection.draw_drafts(rows, seeds, positions, zeros > 0)
        assert_law(drafts, q.softmax(-1))
        probs = probs.unsqueeze(1)
    logits = p.expand(COUNT, 2, -1).contiguous()
    ones = torch.ones(COUNT, dtype=torch.int32)
    return Batch(logits, drafts.unsqueeze(1), ones, probs, seeds, positions, zeros > 0)


@pytest.mark.parametrize("proposal", ["far", "close", "disjoint", "itself", "point"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_first_token_has_the_law_of_p(target: str, proposal: str) -> None:
    p = torch.tensor(TARGETS[target])
    q = {**PROPOSALS, "itself": TARGETS[target]}.get(proposal)
    batch = one_step(p, None if q is None else torch.tensor(q), 2)
    out = verify_reference(batch)
    assert_valid(out, batch)
    assert_law(out.token_ids[:, 0], p.softmax(-1))
    probs = p.softmax(-1)
    overlap = probs[2] if q is None else probs.minimum(torch.tensor(q).softmax(-1)).sum()
    accepted = int((out.num_tokens == 2).sum())
    assert stats.binomtest(accepted, COUNT, min(float(overlap), 1.0)).pvalue > 1e-3
    if accepted:
        assert_law(out.token_ids[out.num_tokens == 2, 1], probs)


@pytest.mark.gpu  # the interpreter takes tens of milliseconds a row
@pytest.mark.parametrize("proposal", ["far", "close", "disjoint", "point"])
def test_the_first_token_has_the_law_of_p_by_triton(proposal: str) -> None:
    p = torch.tensor(TARGETS["sparse"])
    q = None if proposal == "point" else torch.tensor(PROPOSALS[proposal])
    out = verify_triton(one_step(p, q, 2))
    assert_law(out.token_ids[:, 0], p.softmax(-1))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.8, 0.0), (5, 0.9, 0.1)])
def test_filtered_targets_keep_their_law(top_k: int, top_p: float, min_p: float) -> None:
    p = torch.tensor([TARGETS["plain"]])
    filter_top_k_top_p_min_p(p, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert 1 < (p > -INF).sum() < 8
    for q in PROPOSALS.values():
        batch = one_step(p[0], torch.tensor(q), 0)
        out = verify_reference(batch)
        assert_valid(out, batch)
        assert_law(out.token_ids[:, 0], p[0].softmax(-1))


FIRST = torch.tensor([0.2, -1.0, 1.0, -INF])
SECOND = torch.tensor(
    [[0.0, 1.0, -1.0, 0.3], [2.0, -INF, 0.0, 0.0], [-1.0, 0.5, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0]]
)
DRAFT_FIRST = torch.tensor([0.6, 0.6, -0.5, -1.0])
DRAFT_SECOND = SECOND.roll(1, 1).clamp(min=-2) * 0.7


def generate(verify: Callable[[Batch], Verified], k: int, point: bool) -> tuple[Tensor, Tensor]:
    """Two tokens from each row by a toy model, a step of up to k drafts after another.

    The token at position 0 has p = softmax(FIRST), the one at 1 softmax(SECOND[the token before]);
    what lies behind is discarded. A second step uses the random numbers of positions anew that the
    first drafted in vain.

    Returns:
        [COUNT, 2] int64 and how many tokens the first step gave: [COUNT].
    """
    seeds, zeros = torch.arange(COUNT) * 104729 + 1, torch.zeros(COUNT, dtype=torch.int64)
    tokens = torch.zeros(COUNT, 2, dtype=torch.int64)
    have, first_step = zeros.clone(), zeros.clone()
    while (have < 2).any():
        rows = (have < 2).nonzero().flatten()
        start, last = have[rows], tokens[rows, (have[rows] - 1).clamp(min=0)]
        logits, drafts, probs = [], [], []
        for j in range(k + 1):
            begin = (start + j == 0).unsqueeze(1)
            logits.append(torch.where(begin, FIRST, SECOND[last]))
            draft_logits = torch.where(begin, DRAFT_FIRST, DRAFT_SECOND[last])
            keys = (seeds[rows], start + j, torch.zeros_like(start) > 0)
            last, q = rejection.draw_drafts(draft_logits, *keys)
            drafts.append(last)
            probs.append(q)
        counts = torch.full((len(rows),), k, dtype=torch.int32)
        law = None if point else torch.stack(probs[:k], 1)
        batch = Batch(
            torch.stack(logits, 1), torch.stack(drafts[:k], 1), counts, law, seeds[rows], start,
            torch.zeros_like(start) > 0,
        )  # fmt: skip
        out = verify(batch)
        first_step[rows] = torch.where(start == 0, out.num_tokens.long(), first_step[rows])
        for j in range(k + 1):
            place = start + j
            here = (j < out.num_tokens) & (place < 2)
            tokens[rows[here], place[here]] = out.token_ids[here, j]
        have[rows] = (start + out.num_tokens).clamp(max=2)
    return tokens, first_step


@pytest.mark.parametrize("point", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_two_tokens_have_their_joint_law(k: int, point: bool) -> None:
    """Accepted, recovered and bonus tokens together: p1(x1) · p2(x2 | x1)."""
    check_joint_law(verify_reference, k, point)


@pytest.mark.gpu
@pytest.mark.parametrize("point", [False, True])
def test_two_tokens_have_their_joint_law_by_triton(point: bool) -> None:
    check_joint_law(verify_triton, 2, point)


def check_joint_law(verify: Callable[[Batch], Verified], k: int, point: bool) -> None:
    tokens, first_step = generate(verify, k, point)
    assert set(first_step.tolist()) == set(range(1, k + 2))
    joint = FIRST.softmax(-1).unsqueeze(1) * SECOND.softmax(-1)
    assert_law(tokens[:, 0] * 4 + tokens[:, 1], joint.flatten())


# --- the proposer's draw --------------------------------------------------------------------------


@given(shapes)
@settings(max_examples=settings().max_examples // 10, deadline=None)
def test_drafts_and_their_law(shape: tuple[int, int, int, int]) -> None:
    seed, rows, _, vocab = shape
    batch = make_batch(seed, rows, 0, vocab, point=True, tie=False)
    logits = batch.logits[:, 0]
    logits[-1, vocab // 2] = NAN if seed % 2 else INF
    logits[:1] = -INF if seed % 3 == 0 else logits[:1]
    keys = (batch.seeds, batch.positions, batch.greedy)
    drafts, probs = rejection.draw_drafts(logits, *keys)
    moved = [x.to(DEVICE) for x in (logits, *keys)]
    out_drafts, out_probs = (x.cpu() for x in rejection_triton.draw_drafts(*moved))
    assert out_drafts.dtype == drafts.dtype == torch.int64
    assert out_probs.dtype == probs.dtype == torch.float32

    failed = ~logits.amax(-1).isfinite()
    point = batch.greedy | failed
    for ids, q in ((drafts, probs), (out_drafts, out_probs)):
        one_hot = torch.nn.functional.one_hot(ids, vocab).float()
        assert torch.equal(q[point], one_hot[point])
        torch.testing.assert_close(q[~point], logits[~point].softmax(-1), rtol=3e-6, atol=1e-12)
    noise = gumbel_noise(philox(batch.seeds, batch.positions, 0, Stream.DRAFT, vocab))
    scores = logits + noise.masked_fill_(batch.greedy.unsqueeze(1), 0)
    best = scores[~failed].topk(2, -1).values
    close = best[:, 0] - best[:, 1] < 1e-4
    assert torch.equal(drafts[~failed], scores.argmax(-1)[~failed])
    clear = torch.where(batch.greedy[~failed], True, ~close)
    assert torch.equal(out_drafts[~failed][clear], drafts[~failed][clear])


def test_the_streams_of_a_position_differ() -> None:
    seeds, positions = torch.arange(3), torch.arange(3)
    words = [philox(seeds, positions, 0, stream, 8) for stream in Stream]
    assert len({tuple(x.flatten().tolist()) for x in words}) == len(Stream) == 4
