"""Rotary embedding: the scaling variants, and the table of cosines and sines that layers read.

Each variant computes the same float32 steps as transformers' function for its rope type.
`ModelConfig` holds the variant; the model makes a `RotaryTable` from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from batchgen.kernels.row_indices import row_indices

# YaRN divides by the logarithm of rope_theta. For mscale, models write 0 to turn it off.
_LEAST = {"rope_theta": 1.0, "mscale": -1.0, "mscale_all_dim": -1.0}
"""Exclusive lower bounds of parameters by name; the bound of other parameters is 0."""
_MOST = 1e18
"""The exclusive upper bound of all parameters, so that no computation with them overflows."""


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Rotary embedding without scaling (Su et al. 2021).

    A head of D values has D/2 pairs. Pair i is rotated at position p by the angle p ·
    rope_theta^(-2i/D).
    """

    rope_theta: float

    def __post_init__(self) -> None:
        """Raise ValueError, naming the parameter, if one has a wrong type or range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                fits, kind = isinstance(value, bool), "true or false"
            else:
                minimum = _LEAST.get(field.name, 0.0)
                numbers = value if isinstance(value, tuple) else (value,)
                fits = all(_is_between(minimum, number, _MOST) for number in numbers)
                kind = f"a number over {minimum:g}"
            if not fits and not (value is None and field.default is None):
                raise ValueError(
                    f"rotary embedding: {field.name} is {value!r:.60}, and must be {kind}"
                )

    def inv_freq(self, head_dim: int) -> Tensor:
        """Return the angle per position of each rotated pair, [D/2] float32 on the CPU."""
        exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
        return 1.0 / self.rope_theta**exponents

    def angles(self, head_dim: int, num_positions: int) -> Tensor:
        """Return the angle of each pair at all positions, [P, D/2] float32 on the CPU."""
        positions = torch.arange(num_positions, device="cpu").float()
        return torch.outer(positions, self.inv_freq(head_dim))

    @property
    def attention_scaling(self) -> float:
        """The factor that every cosine and sine is multiplied by."""
        return 1.0


def _is_between(minimum: float, value: object, upper: float) -> bool:
    """Return whether a value is a number (not a bool) strictly between two others."""
    return isinstance(value, int | float) and type(value) is not bool and minimum < value < upper


@dataclass(frozen=True, slots=True)
class LinearRope(DefaultRope):
    """Position interpolation: all positions are divided by `factor` (Chen et al. 2023)."""

    factor: float

    def inv_freq(self, head_dim: int) -> Tensor:
        return DefaultRope.inv_freq(self, head_dim) / self.factor


@dataclass(frozen=True, slots=True)
class FrequencyFactorsRope(DefaultRope):
    """Divides the angle of pair i by factors[i]: a llama3 scaling as GGUF files store it."""

    factors: tuple[float, ...]

    def inv_freq(self, head_dim: int) -> Tensor:
        return DefaultRope.inv_freq(self, head_dim) / torch.tensor(self.factors, device="cpu")


@dataclass(frozen=True, slots=True)
class Llama3Rope(DefaultRope):
    """Llama 3.1: long wavelengths are interpolated, short ones kept, with a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        DefaultRope.__post_init__(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rotary embedding: high_freq_factor {self.high_freq_factor} must be over "
                f"low_freq_factor {self.low_freq_factor}"
            )

    def inv_freq(self, head_dim: int) -> Tensor:
        inv_freq = DefaultRope.inv_freq(self, head_dim)
        wavelength = 2 * math.pi / inv_freq
        rotations = self.original_max_position_embeddings / wavelength
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        longest = self.original_max_position_embeddings / self.low_freq_factor
        shortest = self.original_max_position_embeddings / self.high_freq_factor
        scaled = torch.where(wavelength > longest, inv_freq / self.factor, ramp)
        return torch.where(wavelength < shortest, inv_freq, scaled)


@dataclass(frozen=True, slots=True)
class LongRope(DefaultRope):
    """LongRoPE (Ding et al. 2024): the angle of pair i is divided by short_factor[i] at all
    positions of a row up to the original context, and by long_factor[i] in a longer row.

    A row that grows over that border would have to be computed again (`ModelConfig.rope_border`).
    The table has the angles of long rows after those of short ones.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float  # how much longer the context is with the long factors
    original_max_position_embeddings: int
    attention_factor: float | None = None  # factor of cosines and sines; None: the paper's formula

    def inv_freq(self, head_dim: int) -> Tensor:
        exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
        return 1.0 / (torch.tensor(self.short_factor, device="cpu") * self.rope_theta**exponents)

    def angles(self, head_dim: int, num_positions: int) -> Tensor:
        """Return the angles of short rows for the original context, followed by those of long rows
        for all positions if the model has more positions than the original context."""
        border = self.original_max_position_embeddings
        short = DefaultRope.angles(self, head_dim, min(num_positions, border))
        if num_positions <= border:
            return short
        long = replace(self, short_factor=self.long_factor)
        return torch.cat((short, DefaultRope.angles(long, head_dim, num_positions)))

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))


@dataclass(frozen=True, slots=True)
class YarnRope(DefaultRope):
    """YaRN scaling (Peng et al. 2023).

    Pairs that turn often within the original context keep their angles, slow pairs are interpolated
    by `factor`, with a linear ramp in between ("NTK by parts").
    """

    factor: float  # how much longer the context becomes
    original_max_position_embeddings: int  # the context before scaling
    # The factor of cosines and sines. None computes it from mscale and mscale_all_dim if both are
    # set, else by the paper's formula.
    attention_factor: float | None = None
    beta_fast: float = 32.0  # pairs with at least this many turns are kept
    beta_slow: float = 1.0  # pairs with at most this many turns are interpolated
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ends of the ramp to whole pairs

    def inv_freq(self, head_dim: int) -> Tensor:
        exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
        powers = self.rope_theta**exponents
        low, high = self._ramp_range(head_dim)
        ramp = (torch.arange(head_dim // 2, device="cpu").float() - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - keep) + 1.0 / powers * keep

    def _ramp_range(self, head_dim: int) -> tuple[float, float]:
        """Return the indices of the pairs with `beta_fast` and `beta_slow` turns, where the ramp
        starts and ends."""

        def pair(turns: float) -> float:
            positions = self.original_max_position_embeddings
            return (
                head_dim
                * math.log(positions / (turns * 2 * math.pi))
                / (2 * math.log(self.rope_theta))
            )

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        """Return 0.1 · weight · ln(factor) + 1, the paper's formula with a weight; 1 if the context
        is not extended."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Multiplies queries at position p by 1 + beta · ln(1 + ⌊(p + offset) / original⌋) after
    rotation, which keeps attention sharp beyond the original context (Llama 4, Meta 2025)."""

    beta: float
    original: int  # the number of positions before the first change
    offset: int = 0  # added to positions

    def __post_init__(self) -> None:
        for name, value in (
            ("llama_4_scaling_beta", self.beta),
            ("original_max_position_embeddings", self.original),
        ):
            if not _is_between(0.0, value, _MOST):
                raise ValueError(
                    f"rotary embedding: {name} is {value!r:.60}, and must be a number over 0"
                )

    def table(self, num_positions: int) -> Tensor:
        """Return the factors of positions below this number, [P] float32 on the CPU."""
        positions = torch.arange(self.offset, num_positions + self.offset, device="cpu")
        steps = torch.floor(positions / self.original)
        return 1 + self.beta * torch.log(1 + steps)


@dataclass(frozen=True, slots=True)
class ProportionalRope(DefaultRope):
    """Rotates only the first pairs of a head of `head_dim` values, by the angles that they would
    have if all pairs were rotated (Gemma 4). Pairs are those of the whole head: i and i +
    head_dim/2."""

    head_dim: int

    def inv_freq(self, head_dim: int) -> Tensor:
        """Return the angles per position of the first pairs, [head_dim/2] for the method's
        argument."""
        exponents = torch.arange(0, head_dim, 2, device="cpu").float() / self.head_dim
        return 1.0 / self.rope_theta**exponents


class RotaryTable:
    """The cosines and sines of all positions below `num_positions`, shared by all layers.

    The table is computed on the CPU, so that every device reads the same bits.

    Args:
        rotary_dim: how many values of a head are rotated; all of them in most models.
        sections: for positions with three axes (time, row, column), the number of frequencies that
            read each axis (M-RoPE, Wang et al. 2024).
        interleaved: whether neighbouring frequencies read different axes (Qwen3-VL), or those of
            one axis are adjacent.
    """

    def __init__(
        self,
        rope: DefaultRope,
        rotary_dim: int,
        num_positions: int,
        device: torch.device,
        sections: tuple[int, int, int] | None = None,
        interleaved: bool = True,
    ) -> None:
        angles = rope.angles(rotary_dim, num_positions)
        table = torch.empty(len(angles), rotary_dim, device="cpu")
        cos, sin = table.chunk(2, dim=-1)
        torch.cos(angles, out=cos).mul_(rope.attention_scaling)
        torch.sin(angles, out=sin).mul_(rope.attention_scaling)
        self._table = table.to(device)
        self._axes: Tensor | None = None
        if sections is not None:
            axes = axes_of_frequencies(rotary_dim // 2, sections, interleaved)
            self._axes = torch.cat((axes, axes)).to(device)
            self._columns = torch.arange(rotary_dim, device=device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Look up positions, [T] int64, or [T, 3] with sections. Returns [T, R] float32: R/2
        cosines, then R/2 sines."""
        if positions.dim() == 1:
            return self._table[positions]
        assert self._axes is not None, "the table has one axis"
        # Each column is read at the position on the axis of its frequency.
        return self._table[positions[:, self._axes], self._columns]


def axes_of_frequencies(
    number: int, sections: tuple[int, int, int], interleaved: bool = True
) -> Tensor:
    """Return the axis that each frequency reads, [number] int64 on the CPU: 0 is time, 1 the row
    and 2 the column."""
    if not interleaved:
        return row_indices(torch.tensor(sections, device="cpu"))
    # Time, row and column take turns. An axis whose section is used up is replaced by time.
    index = torch.arange(number, device="cpu")
    axis = index % 3
    ends = torch.tensor([number, 3 * sections[1], 3 * sections[2]], device="cpu")
    return torch.where(index < ends[axis], axis, 0)


def rotary_order(head_dim: int, rotary_dim: int, interleaved: bool = False) -> Tensor | None:
    """Return the order [head_dim] int64 in which a head's values are loaded; None for the order of
    checkpoints.

    Checkpoints pair value i with i + rotary_dim/2, or, if `interleaved`, 2i with 2i + 1; values
    from rotary_dim on are not paired. The kernels always pair i with i + head_dim/2 and rotate the
    first rotary_dim/2 pairs. Queries and keys may have any common order, because only their
    products are used.
    """
    if rotary_dim == head_dim and not interleaved:
        return None
    indices = torch.arange(head_dim, device="cpu")
    first, rest = indices[:rotary_dim], indices[rotary_dim:].chunk(2)
    rotated = (first[::2], first[1::2]) if interleaved else first.chunk(2)
    return torch.cat((rotated[0], rest[0], rotated[1], rest[1]))
