"""Batches of drafts with their laws, verified by the reference and by the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

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
    return _verify(batch, lambda *args: Verified(*rejection_triton.verify_triton(*args)), DEVICE)


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


shapes = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, 3, 7]),
    st.one_of(st.integers(2, 40), st.integers(4090, 9001)),
)
