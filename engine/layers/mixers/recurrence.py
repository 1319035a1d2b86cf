"""A recurrence with a matrix as its state: the common part of gated delta networks and Mamba2.

`GatedDeltaNet` and `Mamba2` have the formulas. `ConvMixer` says what states, records and replayed
tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.mixers.conv_mixer import ConvMixer, replay_parts
from batchgen.engine.layers.mixers.delta_shape import DeltaShape, state_spec
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_replay import delta_replay
from batchgen.kernels.linear_attention.delta_rule import delta_prefill, delta_step
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows


class Recurrence(ConvMixer[DeltaInputs]):
    """The causal convolution and the recurrence of a mixer. Its state is a matrix for each value
    head and row. Subclasses add the projections before and after.

    Small parameters are float32, whatever checkpoints hold.

    Args:
        shape: the sizes for this rank's heads.
        channels: this rank's channels of the checkpoint's convolution.
        heads: this rank's value heads of the checkpoint's.
        arrange: reorders the channels to queries, keys and values.
        skips: whether a token's value, times a number per head (D), is added to its output.
    """

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        *,
        channels: Shard | None,
        heads: Shard | None,
        arrange: Callable[[Tensor], Tensor] | None = None,
        conv_bias: bool = False,
        skips: bool = False,
        where: Placement,
    ) -> None:
        super().__init__(
            layer,
            shape.channels,
            shape.conv_width,
            conv_bias=conv_bias,
            shard=channels,
            arrange=arrange,
            where=where,
        )
        self.shape, self._heads = shape, heads
        # exp(−exp(A_log) · softplus(a + dt_bias)) is the decay of the state for a token's a.
        wide = partial(empty_parameter, device=where.device, dtype=torch.float32)
        self.A_log, self.dt_bias = wide(shape.num_value_heads), wide(shape.num_value_heads)
        self.D = wide(shape.num_value_heads) if skips else None
        self.cache_spec: CacheSpec | None = state_spec(shape, where.dtype)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the parameters that are not in a linear layer or a norm."""
        yield from super().weight_slots(path)
        for name, parameter in (("A_log", self.A_log), ("dt_bias", self.dt_bias), ("D", self.D)):
            if parameter is not None:
                yield WeightSlot.plain(f"{path}.{name}", parameter, shard=self._heads)

    def mix(self, x: Tensor, a: Tensor, b: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Compute the outputs [T, value heads, value_dim] of tokens. The arguments are as for
        `DeltaInputs`, with x before the convolution. States are read and written as `RowMetadata`
        says."""
        return self.run(DeltaInputs(x, a, b, self.A_log, self.dt_bias, self.D), ctx)

    def prefill(
        self,
        tokens: DeltaInputs,
        cache: StateCache,
        rows: PrefillRows,
        replayed: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Compute a prefill's output. The last `replayed` tokens of each row are computed as in
        decode steps."""
        tokens = tokens._replace(qkv=self.convolved(tokens.qkv, cache, rows))
        if replayed is None:
            return delta_prefill(tokens, cache.state["matrix"], rows)
        out, forms = self.empty(tokens), (delta_prefill, delta_replay)
        for run, (part, index) in zip(forms, replay_parts(rows, replayed), strict=True):
            if len(index):
                out[index] = run(tokens.take(index), cache.state["matrix"], part)
        return out

    def step(self, tokens: DeltaInputs, cache: StateCache, rows: StepRows) -> Tensor:
        """Compute a decode step's output."""
        tokens = tokens._replace(qkv=self.convolved(tokens.qkv, cache, rows))
        records = DeltaRecords(*(cache.records[name] for name in DeltaRecords._fields))
        return delta_step(tokens, cache.state["matrix"], records, rows)

    def empty(self, tokens: DeltaInputs) -> Tensor:
        """Allocate the outputs of these tokens."""
        shape = self.shape
        return tokens.qkv.new_empty((len(tokens.qkv), shape.num_value_heads, shape.value_dim))
