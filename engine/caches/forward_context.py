"""What the layers of one forward need besides their activations, passed on explicitly: caches,
attention, states of rows, images, and where to write output columns.

`ModelRunner` makes a `ForwardContext` for each forward, and every layer gets it as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from batchgen.engine.caches.cache_specs import LatentCache
from batchgen.engine.caches.replay import ReplayStep
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.layers.cache_plane import write_plane

LayerCache = KVCache | LatentCache | Tensor | StateCache
"""What a layer keeps: made from a KVSpec, LatentSpec, PlaneSpec, or StateSpec."""

C = TypeVar("C", KVCache, LatentCache, Tensor, StateCache)


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """The R tokens of a forward whose hidden states are wanted."""

    index: Tensor  # [R] int64, the indices of these tokens among the T tokens of the forward
    # The attention metadata of these tokens' queries only, one for each part.
    attention: Sequence[AttentionMetadata]


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """The B rows of one part of the tokens, for layers that keep a state per row.

    In a *decode step* (`width` is W) every row has W tokens, of which only the first is certain to
    stay: the others are drafts. So the layer keeps, besides the state in the row's slot, a ring of
    *records*, each of which says what one token does to the state (`StateCache`). Of the records,
    `pending[slot]` belong to accepted tokens that the state lacks; the oldest is at `first[slot]`.
    The layer runs the W tokens from the state with the pending records applied, and writes the
    tokens' records behind the pending ones. It then applies the oldest pending records to the state
    for good and writes that back, `fold` records at a time, as long as `fold` are left.

    In a *prefill* all tokens stay. A row whose first token has position 0 starts from a state of
    zeros, as its slot may hold anything, even NaN. Any other row starts from the state in its slot.
    The layer writes the state after the row's last token to the row's slot, and the states after
    the numbers of tokens in `snapshots` to the slots named there.

    Slot 0 belongs to no row; what is written there is never read.
    """

    slots: Tensor  # [B] int64, the rows' state slots
    positions: Tensor  # [T] int64, the absolute position of each token of the part in its row
    # [B + 1] int32 on the device, the index at which each row's tokens begin among those of the
    # part; the last entry is where the last row ends.
    starts: Tensor
    width: int | None  # W, the number of tokens of each row in a decode step; None for a prefill
    # [B, S, 2] int64, what each row leaves: after how many of its tokens in this part, and in which
    # state slot. Unused entries have 0 tokens. None if the part leaves none.
    snapshots: Tensor | None
    # The number of tokens of each of the B rows, on the host; None in the captured graph of a
    # prefill, which reads `starts` at its replay.
    query_lens: tuple[int, ...] | None
    # How many of each row's last tokens a prefill must compute as a decode step would, bit by bit,
    # because a layer's prefill may round differently; None if no row has any.
    replayed: tuple[int, ...] | None = None
    # Those tokens as decode steps, for layers whose steps leave records pending.
    replay: Sequence[ReplayStep] = ()


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The features of the N image tokens of a forward, whose ids say only that they are images."""

    index: Tensor  # [N] int64, the indices of these tokens among the T tokens, all different
    # [1 + K, N, hidden_size]: the embeddings of these tokens, and what is added to the residual
    # stream behind each of the first K layers.
    values: Tensor

    @property
    def num_layers(self) -> int:
        """K, the number of layers behind which features are added to the residual stream."""
        return len(self.values) - 1

    def put(self, embedded: Tensor) -> Tensor:
        """Replace the image tokens' rows of `embedded` [T, hidden_size], in place; return it."""
        return embedded.index_copy_(0, self.index, self.values[0])

    def add(self, stream: Tensor, layer: int) -> Tensor:
        """Add the features of layer `layer` < K to the residual stream [T, hidden_size] behind it,
        in place; return it."""
        return stream.index_add_(0, self.index, self.values[1 + layer])


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the layers of one forward of T tokens read and write besides their activations."""

    # What each layer keeps, by the layer's index; None for a layer that keeps nothing.
    caches: Sequence[LayerCache | None]
    # [T] int64, the KV slot of each token: block · block_size + offset in the block.
    kv_slots: Tensor
    # Which cached tokens each query reads, one entry for each part of the tokens.
    attention: Sequence[AttentionMetadata]
    # The rows of each part, for layers that keep a state per row; empty if the model has no such
    # layers.
    rows: Sequence[RowMetadata] = ()
    # Maps the name of each output column that has a value for each token of the context, and is
    # recorded, to its plane in the paged cache, [num_blocks, block_size, *tail].
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    # [T, hidden_size], the hidden states of another model that a head reads besides the tokens; or
    # [canvas_tokens, hidden_size], what tokens of canvases are conditioned on. None otherwise.
    hidden: Tensor | None = None
    # The tokens whose hidden states are wanted; None means all tokens.
    outputs: OutputTokens | None = None
    # [T] or [T, 3] int64, the positions that rotary tables are read at; None: the tokens' own.
    rope_positions: Tensor | None = None
    images: ImageFeatures | None = None  # None: no token is an image's
    # The same as `kv_slots` for layers with a window; None for models without such layers.
    window_slots: Tensor | None = None
    # [T, layers, size], what each layer reads besides the stream; None for most models.
    layer_inputs: Tensor | None = None
    # Whether tokens may have adapters, so that layers read the T tokens of the forward, or the
    # outputs among them, and no others (`LoRAState.tokens`).
    adapted: bool = False
    # How many of the first tokens stand on canvases, where they see each other.
    canvas_tokens: int = 0

    def cache(self, layer: int, kind: type[C]) -> C:
        """Return what the layer with this index keeps; it must be of the given type."""
        layer_cache = self.caches[layer]
        assert isinstance(layer_cache, kind), f"layer {layer} keeps a {type(layer_cache).__name__}"
        return layer_cache

    def slots(self, window: int | None) -> Tensor:
        """Return the KV slots [T] int64 of the tokens in layers with this window."""
        if window is None or self.window_slots is None:
            return self.kv_slots
        return self.window_slots

    def record(self, column: OutputColumn, values: Tensor, layer: int | None = None) -> None:
        """Write the values of an output column for all T tokens, if the job records the column.

        The values go to the tokens' KV slots. So the values of rejected drafts are overwritten by
        those of the tokens that replace them, and rows that share a prefix share its values.

        Args:
            values: [T, *tail], or [T, *tail[1:]] if a layer is given.
            layer: the index on the first axis of the tail to write to; None writes the whole tail.
        """
        plane = self.columns.get(column.name)
        if plane is None:
            return
        flat = plane.flatten(0, 1)
        target = flat if layer is None else flat[:, layer]
        write_plane(target, self.kv_slots, values)
