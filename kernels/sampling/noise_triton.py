"""Random 32-bit words of the generator Philox, and Gumbel noise made of them, in Triton.

`philox.py` is the PyTorch reference: a word is a function of the seed, the position, the stream
(the purpose), the draw and the column (a token id). Tokens are drawn as the argmax of logits plus
Gumbel noise, -log(-log(uniform)).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def approximate_log(values, NVIDIA: tl.constexpr):
    """Compute the natural logarithm; near 1 its error is at most 2⁻²². With NVIDIA, on a GPU, it is
    one instruction instead of Triton's twenty; the interpreter on a CPU cannot run that."""
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
    uniform = uniform_triton(words)
    rest = 1 - uniform
    # -log(rest) is a number of the exponential distribution. If `rest` is near 1, its logarithm is
    # small, and `approximate_log` is too coarse for it. There the Taylor series of -log(1 - z)
    # replaces it. Except for tiny numbers z is 1 - rest, not uniform, because the reference takes
    # the logarithm of `rest`, which is rounded.
    z = tl.where(uniform < 2.0**-10, uniform, 1 - rest)
    series = (((((z * (1 / 6) + 1 / 5) * z + 1 / 4) * z + 1 / 3) * z + 0.5) * z + 1) * z
    exponential = tl.where(uniform < 2.0**-4, series, -approximate_log(rest, NVIDIA))
    return -approximate_log(exponential, NVIDIA)


@triton.jit
def philox_words(seed, position, counters, stream, draw=0):
    """Compute the words of the columns 4·counter to 4·counter + 3 for each of `counters`, as four
    tensors like `counters`. `stream` and `draw` are constants or uint32."""
    counters = counters.to(tl.uint32)
    zeros = tl.zeros_like(counters)
    return tl.philox(seed, counters, zeros + position.to(tl.uint32), zeros + draw, zeros + stream)


@triton.jit
def chunk_noise(
    seed, position, start, stream, CHUNK: tl.constexpr, NVIDIA: tl.constexpr, draw=0
):  # fmt: skip
    """Compute the Gumbel noise [CHUNK] of the columns from `start` on, which is a multiple of 4."""
    counters = start // 4 + tl.arange(0, CHUNK // 4)
    words0, words1, words2, words3 = philox_words(seed, position, counters, stream, draw)
    # In the order of columns: word 0, 1, 2 and 3 of the first counter, then of the second, ...
    words = tl.interleave(tl.interleave(words0, words2), tl.interleave(words1, words3))
    return gumbel(words, NVIDIA)
