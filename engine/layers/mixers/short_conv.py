"""Gated short convolutions, used instead of attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import CacheSpec, StateSpec, StateTensor
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.layers.linear import RowParallelLinear
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.conv_mixer import ConvMixer
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import MIXER_LANE, Stream
from batchgen.kernels.linear_attention.state_rows import CHUNK, PrefillRows, StepRows


class ConvInputs(NamedTuple):
    """The inputs x [T, C] of a convolution."""

    x: Tensor

    def take(self, tokens: slice | Tensor) -> ConvInputs:
        """Return the inputs of some tokens."""
        return ConvInputs(self.x[tokens])


class ShortConv(ConvMixer[ConvInputs]):
    """A gated short convolution, added to the residual (Liquid AI 2025, arXiv 2511.23404).

    A projection computes B, C and x, each [T, hidden_size]; the output is the projection of C ·
    conv(B · x). Each rank has some of the channels.
    """

    with_silu = False

    def __init__(
        self, layer: int, hidden_size: int, width: int, *, bias: bool, where: Placement
    ) -> None:
        parallel = where.parallel
        rank_size = parallel.share("hidden_size", hidden_size)
        is_whole = parallel.size == 1
        super().__init__(
            layer,
            rank_size,
            width,
            conv_bias=bias,
            shard=None if is_whole else parallel.shard(0, hidden_size),
            where=where,
        )
        rows = parallel.shard(0, hidden_size, hidden_size, hidden_size)
        self.projection = MergedLinear(
            hidden_size,
            {"in_proj": 3 * rank_size},
            bias=bias,
            shards=None if is_whole else {"in_proj": rows},
            where=where,
        )
        self.out_proj = RowParallelLinear(
            hidden_size, hidden_size, bias=bias, lane=MIXER_LANE, where=where
        )
        # The last inputs of the row, and those of the newest tokens, not yet moved to the window.
        self.cache_spec: CacheSpec | None = StateSpec(
            state={"window": StateTensor((width - 1, rank_size), where.dtype)},
            records={"inputs": StateTensor((rank_size,), where.dtype)},
            chunk_multiple=CHUNK,
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + convolved(hidden) as `Mixer` describes. States are read and written as
        `RowMetadata` says."""
        before, after, x = self.projection(hidden).chunk(3, dim=1)
        out = self.run(ConvInputs(before * x), ctx)
        if outputs is not None:
            out, after = (part[outputs.index] for part in (out, after))
            residual = outputs.rows(residual)
        return self.out_proj.add_to(residual, after * out)

    def prefill(
        self,
        tokens: ConvInputs,
        cache: StateCache,
        rows: PrefillRows,
        replayed: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Convolve the tokens of a prefill. Replayed tokens need no special treatment: prefills and
        decode steps give the same bits."""
        return self.convolved(tokens.x, cache, rows)

    def step(self, tokens: ConvInputs, cache: StateCache, rows: StepRows) -> Tensor:
        """Convolve the tokens of a decode step."""
        return self.convolved(tokens.x, cache, rows)

    def empty(self, tokens: ConvInputs) -> Tensor:
        """Make a tensor for the outputs of tokens."""
        return torch.empty_like(tokens.x)
