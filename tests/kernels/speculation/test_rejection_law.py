"""The tokens that verification leaves have the law of the target."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import stats
from torch import Tensor

from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox
from batchgen.kernels.sampling.sampling import filter_top_k_top_p_min_p
from batchgen.kernels.speculation import rejection, rejection_triton
from batchgen.kernels.speculation.rejection import Verified
from tests.support.kernels.verified_batches import (
    DEVICE,
    INF,
    NAN,
    Batch,
    assert_valid,
    make_batch,
    shapes,
    verify_reference,
    verify_triton,
)


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


@pytest.mark.quick(2, thorough=6)
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


@pytest.mark.quick(1)
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


@pytest.mark.quick(1)
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
    out_drafts, out_probs = (x.cpu() for x in rejection_triton.draw_drafts_triton(*moved))
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
    assert len({tuple(x.flatten().tolist()) for x in words}) == len(Stream) == 5
