"""Counter-based random numbers: no generator, no state, the same words on every device.

A random number is a pure function of what it is for: the row's seed, the position, and so on. So it
does not depend on the other rows of the batch, on the order of work or on restarts of the job.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Stream(IntEnum):
    """What the random numbers of a position are used for. Streams are independent of each other.

    Attributes:
        SAMPLE: the ordinary draw of the token at a position.
        ACCEPT: the decision whether rejection sampling keeps the draft at a position; it takes one
            number, that of column 0.
        RECOVER: the draw of the token that replaces a rejected draft.
        DRAFT: the proposer's draw of the draft at a position.
    """

    SAMPLE = 0
    ACCEPT = 1
    RECOVER = 2
    DRAFT = 3


def philox(
    seeds: Tensor, positions: Tensor, draw: Tensor | int, stream: int, num_columns: int
) -> Tensor:
    """Compute random 32-bit words, a pure function of (seed; position, draw, stream, column).

    This is Philox4x32-10 (Salmon et al. 2011). A call of Triton's `tl.philox(seed, c0, c1, c2, c3)`
    with c0 = column // 4, c1 = position, c2 = draw and c3 = stream gives the same words: the word
    of a column is output number column % 4.

    Args:
        seeds: [R] int64. The key of Philox is the low 32 bits and the high 32 bits of the seed.
        positions: [R] int64 in [0, 2³²).
        draw: [R] int64, or one int for all rows, in [0, 2³²): how many draws of the stream the
            position has had before.
        stream: the `Stream` of the words.
        num_columns: words per row.

    Returns:
        [R, num_columns] int64, each in [0, 2³²).
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

    The product of two 32-bit words overflows int64, but its 64 bits are the right ones. Its low
    word is not masked at once: it is XORed into the high word of the next round, and that is
    masked. Counters that are the same for a whole row (or column) keep a width of 1 until they meet
    the others in the second round. From then on products are written into buffers of the round
    before.
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


def gumbel_noise(words: Tensor) -> Tensor:
    """Map random words in [0, 2³²), of any shape, to standard Gumbel noise as float32.

    The noise is -log(E) with E = -log(1 - u) and u = `uniform`. Large noise, which decides the
    draw, comes from small u, where float32 values are dense: the noise reaches 33·log 2 ≈ 22.9 in
    fine steps. With E = -log(u), large noise would come from u near 1, where float32 values are
    sparse: it would not exceed 16.6, and come in coarse steps. The series replaces log1p, which
    Triton lacks; below u = 2⁻¹⁰ it is exact in float32.
    """
    u = uniform(words)
    small = u < 2.0**-10
    series = u.mul(1 / 3).add_(0.5).mul_(u).add_(1).mul_(u)
    exponential = torch.where(small, series, u.neg_().add_(1).log_().neg_())
    return exponential.log_().neg_()
