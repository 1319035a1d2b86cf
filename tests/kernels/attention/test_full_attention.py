"""Attention within segments against a softmax in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from batchgen.kernels.attention.full_attention import Segments, full_attention
from batchgen.kernels.attention.full_attention_triton import full_attention_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn(
    lengths: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """Queries, and keys and values whose heads come first in memory."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randn((sum(lengths), heads, head_dim), generator=draw)
    kv = torch.randn((2, heads, sum(lengths), head_dim), generator=draw)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    k, v = kv.to(DEVICE, dtype).transpose(1, 2)
    return q.to(DEVICE, dtype), k, v, Segments(lengths, starts)


def check(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> None:
    found = full_attention(q, k, v, segments)
    assert found.shape == q.shape and found.dtype == q.dtype
    start = 0
    for length in segments.lengths:
        own = slice(start, start := start + length)
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k[own].double())
        weights = (scores * q.shape[-1] ** -0.5).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[own].double())
        close = 5e-5 if q.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[own].double(), expected, atol=close, rtol=close)
        alone = Segments((length,), torch.tensor([0, length], dtype=torch.int32, device=DEVICE))
        assert torch.equal(full_attention(q[own], k[own], v[own], alone), found[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 12])
def test_each_segment_sees_itself_alone(head_dim: int, dtype: torch.dtype) -> None:
    check(*drawn((5, 1, 40, 130), 2, head_dim, dtype))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="for Hopper"
)
@pytest.mark.parametrize("head_dim", [72, 64, 16, 24])
def test_the_kernel_agrees_and_a_broken_segment_harms_no_other(head_dim: int) -> None:
    lengths = (5, 1, 70, 129)
    q, k, v, segments = drawn(lengths, 2, head_dim, torch.bfloat16)

    def computed(k: Tensor, v: Tensor) -> Tensor:
        keys, values = (part.transpose(0, 1).contiguous() for part in (k, v))
        return full_attention_triton(q, keys, values, segments.starts, max(lengths), 0.25)

    expected = full_attention(q.cpu().float(), k.cpu().float(), v.cpu().float(), segments, 0.25)
    found = computed(k, v)
    assert found.dtype == q.dtype
    torch.testing.assert_close(found.cpu().float(), expected, atol=1e-2, rtol=1e-2)
    k[:6], v[:6], k[76:], v[76:] = torch.nan, torch.nan, torch.nan, torch.inf
    assert torch.equal(computed(k, v)[6:76], found[6:76])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80, 128])
@pytest.mark.parametrize("lengths", [(4096, 3844), (64,) * 30, (1000, 4, 9216, 257)])
def test_real_sizes(lengths: tuple[int, ...], head_dim: int) -> None:
    check(*drawn(lengths, 16, head_dim, torch.bfloat16))
