"""Philox words and Gumbel noise, as `philox` defines them, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def approximate_log(values, NVIDIA: tl.constexpr):
    """Compute the natural logarithm with one instruction instead of Triton's twenty; near 1 its
    error is at most 2⁻²²."""
    if NVIDIA:
        logs = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        logs = tl.log2(values)
    return logs * _LOG_2


@triton.jit
def uniform_triton(words):
    """Compute `philox.uniform`, with the same bits."""
    return tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), 1 - 2.0**-24)


@triton.jit
def gumbel(words, NVIDIA: tl.constexpr):
    """Compute `philox.gumbel_noise`, up to rounding."""
    u = uniform_triton(words)
    rest = 1 - u
    # The logarithm of a `rest` near 1 is small, and the approximate one is too coarse for it: there
    # a longer series takes its place. The series is in 1 - rest, not in u, because the reference
    # takes the logarithm of the rounded `rest`.
    z = tl.where(u < 2.0**-10, u, 1 - rest)
    series = (((((z * (1 / 6) + 1 / 5) * z + 1 / 4) * z + 1 / 3) * z + 0.5) * z + 1) * z
    exponential = tl.where(u < 2.0**-4, series, -approximate_log(rest, NVIDIA))
    return -approximate_log(exponential, NVIDIA)


@triton.jit
def philox_words(seed, position, counters, stream, draw=0):
    """Compute the four words of each counter, of the columns 4·counter to 4·counter + 3; `stream`
    and `draw` are constants or uint32."""
    counters = counters.to(tl.uint32)
    zeros = tl.zeros_like(counters)
    return tl.philox(seed, counters, zeros + position.to(tl.uint32), zeros + draw, zeros + stream)


@triton.jit
def chunk_noise(
    seed, position, start, stream, CHUNK: tl.constexpr, NVIDIA: tl.constexpr, draw=0
):  # fmt: skip
    """Compute the Gumbel noise [CHUNK] of the columns from `start` on, which is a multiple of 4."""
    counters = start // 4 + tl.arange(0, CHUNK // 4)
    a, b, c, d = philox_words(seed, position, counters, stream, draw)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return gumbel(words, NVIDIA)
