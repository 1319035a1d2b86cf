"""Counter-based random numbers: no generator, no state, the same words on every device.

A random number is a pure function of its purpose: the row's seed, the position, and so on. So it
does not depend on batch mates, the order of work or restarts of the job.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF
"""A mask of the 32 low bits."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""The factors of two counters in each round, from the paper on Philox (see `philox`)."""
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""What is added to the two words of the key from round to round, from the same paper."""
_ROUNDS = 10


class Stream(IntEnum):
    """The purpose of a random number. Streams are independent of each other."""

    SAMPLE = 0  # the ordinary draw of the token
    ACCEPT = 1  # whether rejection sampling keeps the draft; column 0 alone
    RECOVER = 2  # the draw of the token that replaces a rejected draft
    DRAFT = 3  # the proposer's draw of the draft
    RENOISE = 4  # a token of a canvas that stands for noise; column 0 alone


def philox(
    seeds: Tensor, positions: Tensor, draw: Tensor | int, stream: int, num_columns: int
) -> Tensor:
    """Compute random 32-bit words, a pure function of (seed; position, draw, stream, column).

    This is Philox4x32-10 (Salmon et al. 2011). Triton's `tl.philox(seed, c0, c1, c2, c3)` with c0 =
    column // 4, c1 = position, c2 = draw and c3 = stream gives the same words: a column's word is
    output number column % 4.

    Seeds [R] int64 are the key, the low and the high 32 bits. Positions [R] are in [0, 2³²), and so
    is `draw`, the number of earlier draws of the stream at the position. Returns [R, num_columns]
    int64.
    """
    counters = torch.arange(-(-num_columns // 4), device=seeds.device).unsqueeze(0)
    words = _philox_words(seeds, positions, draw, stream, counters)
    return torch.stack(words, dim=-1).flatten(1)[:, :num_columns]


def philox_at(
    seeds: Tensor, positions: Tensor, draw: Tensor | int, stream: int, columns: Tensor
) -> Tensor:
    """Compute the words of `philox` at the given columns only: columns [R, S] → [R, S], int64."""
    words = _philox_words(seeds, positions, draw, stream, columns >> 2)
    return torch.stack(words, dim=-1).gather(-1, (columns & 3).unsqueeze(-1)).squeeze(-1)


def _philox_words(
    seeds: Tensor, positions: Tensor, draw: Tensor | int, stream: int, c0: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the four output words, each [R, C] int64, for counters c0 [R or 1, C].

    The product of two 32-bit words overflows int64, but its 64 bits are right. Its low word is
    masked only after it is XORed into the next round's high word. Counters that a whole row (or
    column) shares keep a width of 1 until the second round; later products reuse buffers of the
    round before.
    """
    k0 = (seeds & _LOW32).unsqueeze(1)
    k1 = (seeds >> 32 & _LOW32).unsqueeze(1)
    c1 = positions.unsqueeze(1)
    c2 = draw.unsqueeze(1) if isinstance(draw, Tensor) else torch.full_like(c1, draw)
    c3 = torch.full_like(c1, stream)
    shape = (len(seeds), c0.shape[1])
    spare: list[Tensor] = []
    for number in range(_ROUNDS):
        p0 = torch.mul(c0, _MULTIPLIERS[0], out=spare.pop() if spare else None)
        p1 = torch.mul(c2, _MULTIPLIERS[1], out=spare.pop() if spare else None)
        r0 = (k0 + number * _KEY_STEPS[0]) & _LOW32
        r1 = (k1 + number * _KEY_STEPS[1]) & _LOW32
        if number < 2:
            c0 = ((p1 >> 32) ^ c1 ^ r0) & _LOW32
            c2 = ((p0 >> 32) ^ c3 ^ r1) & _LOW32
        else:
            torch.bitwise_right_shift(p1, 32, out=c0)
            c0.bitwise_xor_(c1).bitwise_xor_(r0).bitwise_and_(_LOW32)
            torch.bitwise_right_shift(p0, 32, out=c2)
            c2.bitwise_xor_(c3).bitwise_xor_(r1).bitwise_and_(_LOW32)
            spare = [buffer for buffer in (c1, c3) if buffer.shape == shape]
        c1, c3 = p1, p0
    return c0, c1 & _LOW32, c2, c3 & _LOW32


def uniform(words: Tensor) -> Tensor:
    """Map random words in [0, 2³²), of any shape, to (word + ½)·2⁻³²: float32, [2⁻³³, 1 - 2⁻²⁴]."""
    return words.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def uniform_ids(
    seeds: Tensor, positions: Tensor, draws: Tensor, stream: int, vocab_size: int
) -> Tensor:
    """Draw one token id below `vocab_size` per entry, [R] int64.

    All ids are equally likely, up to an error of 2⁻³² · vocab_size. Seeds, positions and draws [R]
    are those of `philox`.
    """
    words = philox(seeds, positions, draws, stream, 1).squeeze(1)
    return words * vocab_size >> 32


def gumbel_noise(words: Tensor) -> Tensor:
    """Map random words in [0, 2³²), of any shape, to standard Gumbel noise as float32.

    The noise is -log(E) with E = -log(1 - u) and u = `uniform`. Large noise, which decides the
    draw, then comes from small u, where float32 values are dense: it reaches 33·log 2 ≈ 22.9 in
    fine steps. With E = -log(u) it would not exceed 16.6, in coarse steps. A series replaces log1p,
    which Triton lacks; below u = 2⁻¹⁰ it is exact in float32.
    """
    u = uniform(words)
    small = u < 2.0**-10
    series = u.mul(1 / 3).add_(0.5).mul_(u).add_(1).mul_(u)
    exponential = torch.where(small, series, u.neg_().add_(1).log_().neg_())
    return exponential.log_().neg_()
