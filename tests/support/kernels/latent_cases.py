"""Random rows over a paged latent cache, for the tests of latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.attention.kv_cache import quantise_vectors
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.fp8.fp8_weight import FP8, LARGEST
from batchgen.kernels.mla.mla_attention import latent_attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Sizes(NamedTuple):
    """Heads, and the values of a latent, a key's fixed part, its rotated part, and a value."""

    heads: int = 4
    latent: int = 24
    key: int = 12
    rotated: int = 8
    value: int = 10


SMALL = Sizes()


@dataclass(frozen=True)
class PlainExpansion:
    """Expands latents by a weight [heads, N + V, L]."""

    weight: Tensor
    key_size: int

    @property
    def value_size(self) -> int:
        return self.weight.shape[1] - self.key_size

    def absorb(self, q: Tensor) -> Tensor:
        return torch.einsum("thn,hnl->thl", q, self.weight[:, : self.key_size])

    def values(self, mixed: Tensor, out: Tensor | None = None) -> Tensor:
        found = torch.einsum("thl,hvl->thv", mixed, self.weight[:, self.key_size :])
        return found if out is None else out.copy_(found)

    def expand(self, latents: Tensor) -> Tensor:
        return torch.einsum("sl,hnl->shn", latents, self.weight).contiguous()


class Case(NamedTuple):
    """What latent attention takes, but for the scale."""

    q: Tensor
    plane: Tensor
    expansion: PlainExpansion
    rotated: int
    meta: AttentionMetadata
    scales: Tensor | None = None  # of a plane in FP8

    def in_fp8(self) -> Case:
        """Round the plane to FP8."""
        finite = self.plane.isfinite().all(-1, keepdim=True)
        _, scales = quantise_vectors(self.plane.where(finite, 0.0))
        # torch before 2.13 makes NaN of what is too large for FP8.
        plane = (self.plane.float() / scales).clamp(-LARGEST, LARGEST).to(FP8)
        return self._replace(plane=plane, scales=scales.squeeze(-1))

    @property
    def wide_plane(self) -> Tensor:
        """The plane in float32, as queries see it."""
        scales = 1.0 if self.scales is None else self.scales.unsqueeze(-1)
        return self.plane.float() * scales

    def reference(self, scale: float) -> Tensor:
        """The result in float32 on the CPU."""
        meta = AttentionMetadata(
            self.meta.positions.cpu(),
            self.meta.query_lens,
            self.meta.context_lens,
            self.meta.block_tables.cpu(),
        )
        expansion = PlainExpansion(self.expansion.weight.float().cpu(), self.expansion.key_size)
        return latent_attention_reference(
            self.q.float().cpu(), self.wide_plane.cpu(), expansion, self.rotated, [meta], scale
        )


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    sizes: Sizes = SMALL,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    width: int | None = None,
    device: str = DEVICE,
) -> Case:
    """Rows of (new tokens, tokens in the cache), whose blocks are out of order."""
    generator = torch.Generator().manual_seed(len(rows) * 1000 + sum(map(sum, rows)))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    blocks = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(blocks), generator=generator) + 1
    tables = torch.zeros((len(rows), max(blocks)), dtype=torch.int64)
    for row, own in enumerate(order.split(blocks)):
        tables[row, : len(own)] = own
    positions = torch.cat([torch.arange(context - new, context) for new, context in rows])
    plane = numbers(sum(blocks) + 1, block_size, sizes.latent + sizes.rotated)
    plane[0, :, sizes.latent :] = float("nan")
    q = numbers(len(positions), sizes.heads, sizes.key + sizes.rotated)
    weight = numbers(sizes.heads, sizes.key + sizes.value, sizes.latent) / sizes.latent**0.5
    meta = AttentionMetadata(
        positions.to(device),
        tuple(new for new, _ in rows),
        tuple(context for _, context in rows),
        tables.to(device),
        decode_width=width,
    )
    return Case(q, plane, PlainExpansion(weight, sizes.key), sizes.rotated, meta)
