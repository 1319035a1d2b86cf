"""What the layers of one forward need besides their activations: caches, attention metadata, row
states, images, and where to write output columns.

`ModelRunner` makes a `ForwardContext` for each forward, and every layer gets it as an argument.

The tokens of a forward come in one or two *parts*: those of decoding rows, and those of a prefill,
which reads prompts. A *snapshot* is the state of a row after a prefix, kept for later rows with the
same prefix. A *canvas* is the block of tokens that a diffusion model writes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import LatentCache
from batchgen.engine.caches.replay import ReplayStep
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.layers.cache_plane import write_plane

LayerCache = KVCache | LatentCache | Tensor | StateCache
"""The cache of one layer, allocated from a KVSpec, LatentSpec, PlaneSpec or StateSpec."""

C = TypeVar("C", KVCache, LatentCache, Tensor, StateCache)


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """The R tokens of a forward whose hidden states the caller needs."""

    index: Tensor  # [R] int64, the indices of these tokens among the T tokens of the forward
    # The attention metadata of only these tokens' queries, one entry for each part.
    attention: Sequence[AttentionMetadata]

    def rows(self, residual: Tensor | None) -> Tensor | None:
        """Return these tokens' rows [R, N] of a residual [T, N]; None stands for zeros."""
        return None if residual is None else residual[self.index]


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """The B rows of one part of a forward, for recurrent layers.

    In a *decode step* (`width` is W) every row has W tokens. Only the first is certain to stay; the
    others are drafts. So besides the state, the layer keeps a ring of *records* for each row; a
    record describes the effect of one token on the state (`StateCache`). `pending[slot]` records
    belong to accepted tokens that are not in the state yet; `first[slot]` is the index of the
    oldest.

    The layer computes the W tokens from the state with all pending records applied, and writes
    their records after the pending ones. Then it folds the oldest pending records into the stored
    state, `fold` records at a time, while at least `fold` are pending.

    In a *prefill* all tokens stay. A row whose first token has position 0 starts from a state of
    zeros, whatever its slot contains (even NaN). Any other row starts from the state in its slot.
    The layer writes the state after the row's last token to the row's slot, and the states that
    `snapshots` asks for to the slots named there.

    Slot 0 belongs to no row; what is written there is never read.
    """

    slots: Tensor  # [B] int64, the rows' state slots
    positions: Tensor  # [T] int64, the absolute position of each token of the part in its row
    # [B + 1] int32 on the device, the index of each row's first token among those of the part; the
    # last entry is the number of tokens.
    starts: Tensor
    width: int | None  # W, the number of tokens of each row in a decode step; None for a prefill
    # [B, S, 2] int64, the snapshots to take: after how many of the row's tokens in this part, and
    # the state slot to write to. Unused entries have 0 tokens. None if there are no snapshots.
    snapshots: Tensor | None
    # The number of tokens of each row, on the host. None when a prefill is captured as a graph,
    # whose replay reads `starts`.
    query_lens: tuple[int, ...] | None
    # How many of each row's last tokens a prefill must compute with the same rounding as decode
    # steps; None if there are none.
    replayed: tuple[int, ...] | None = None
    # The decode steps that compute these tokens, for layers that leave records pending.
    replay: Sequence[ReplayStep] = ()


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The features of the N image tokens of a forward. The ids of these tokens say only that they
    stand for an image."""

    index: Tensor  # [N] int64, the indices of these tokens among the T tokens, all different
    # [1 + K, N, hidden_size]: the embeddings of these tokens, and what is added to the residual
    # stream after each of the first K layers.
    values: Tensor

    @property
    def num_layers(self) -> int:
        """K, the number of layers after which features are added to the residual stream."""
        return len(self.values) - 1

    def behind(self, tokens: int) -> ImageFeatures:
        """Return the features in a forward that has this many tokens before these T."""
        return replace(self, index=self.index + tokens) if tokens else self

    def put(self, embedded: Tensor) -> Tensor:
        """Replace the image tokens' rows of `embedded` [T, hidden_size] in place, and return it."""
        return embedded.index_copy_(0, self.index, self.values[0])

    def add(self, stream: Tensor, layer: int) -> Tensor:
        """Add the features of layer `layer` < K to the residual stream [T, hidden_size] after it,
        in place, and return the stream."""
        return stream.index_add_(0, self.index, self.values[1 + layer])

    def hide(self, input_ids: Tensor, pad_id: int) -> Tensor:
        """Return the ids [T] with `pad_id` for image tokens."""
        return input_ids.index_fill(0, self.index, pad_id)


@dataclass(frozen=True, slots=True)
class ImagePlanes:
    """The features of the image tokens among S consecutive tokens of a forward, with a place for
    each of the S. A captured graph reads them, because it does not know which tokens these are.

    The methods compute the same bits as those of `ImageFeatures`.
    """

    mask: Tensor  # [S, 1] bool, whether a token is an image token
    values: Tensor  # [1 + K, S, hidden_size], as in `ImageFeatures`; arbitrary for other tokens
    start: int = 0  # the index of the first of the S tokens among the T tokens of the forward

    @property
    def num_layers(self) -> int:
        """K, the number of layers after which features are added to the residual stream."""
        return len(self.values) - 1

    def behind(self, tokens: int) -> ImagePlanes:
        """Return the features in a forward that has this many tokens before these T."""
        return replace(self, start=self.start + tokens)

    def put(self, embedded: Tensor) -> Tensor:
        """Replace the image tokens' rows of `embedded` [T, hidden_size] in place, and return it."""
        rows = self._rows(embedded)
        torch.where(self.mask, self.values[0], rows, out=rows)
        return embedded

    def add(self, stream: Tensor, layer: int) -> Tensor:
        """Add the features of layer `layer` < K to the residual stream [T, hidden_size] after it,
        in place, and return the stream."""
        rows = self._rows(stream)
        # A sum with 0 would change the sign of -0.
        torch.where(self.mask, rows + self.values[1 + layer], rows, out=rows)
        return stream

    def hide(self, input_ids: Tensor, pad_id: int) -> Tensor:
        """Return the ids [T] with `pad_id` for image tokens."""
        ids = input_ids.clone()
        self._rows(ids).masked_fill_(self.mask[:, 0], pad_id)
        return ids

    def fill(self, images: ImageFeatures | None) -> None:
        """Copy the features of a batch; None: the batch has no image tokens."""
        self.mask.zero_()
        if images is not None:
            self.mask.index_fill_(0, images.index, value=True)
            self.values.index_copy_(1, images.index, images.values)

    def first(self, tokens: int) -> ImagePlanes:
        """Return the features of the first `tokens` of the S tokens, as views."""
        return replace(self, mask=self.mask[:tokens], values=self.values[:, :tokens])

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor[self.start : self.start + len(self.mask)]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the layers of one forward of T tokens read and write besides their activations."""

    # The cache of each layer, by the layer's index; None for a layer that keeps nothing.
    caches: Sequence[LayerCache | None]
    # [T] int64, the KV slot of each token: block · block_size + offset in the block.
    kv_slots: Tensor
    # Which cached tokens each query attends to, one entry for each part of the tokens.
    attention: Sequence[AttentionMetadata]
    # The rows of each part, for recurrent layers; empty if the model has none.
    rows: Sequence[RowMetadata] = ()
    # The columns of context scope that are recorded: maps a column's name to its plane in the paged
    # cache, [num_blocks, block_size, *tail].
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    # [T, hidden_size], the target's hidden states that an MTP head reads; or [canvas_tokens,
    # hidden_size], what the tokens of canvases are conditioned on. None otherwise.
    hidden: Tensor | None = None
    # The tokens whose hidden states the caller needs; None: all tokens.
    outputs: OutputTokens | None = None
    # [T] or [T, 3] int64, the rotary positions of the tokens; None: equal to their positions.
    rope_positions: Tensor | None = None
    images: ImageFeatures | ImagePlanes | None = None  # None if the forward has no image tokens
    # [T] int64, like `kv_slots` for layers with a window; None for models without such layers.
    window_slots: Tensor | None = None
    # [T, layers, size], an input of each layer besides the residual stream; None for most models.
    layer_inputs: Tensor | None = None
    # Whether tokens may have adapters. If so, every linear layer is called with all T tokens of the
    # forward, or with all of `outputs`, never with other selections (`LoRAState.tokens`).
    adapted: bool = False
    # How many of the first tokens belong to canvases, whose tokens attend to each other.
    canvas_tokens: int = 0

    def cache(self, layer: int, kind: type[C]) -> C:
        """Return the cache of the layer with this index, which must be of the given type."""
        layer_cache = self.caches[layer]
        assert isinstance(layer_cache, kind), f"layer {layer} keeps a {type(layer_cache).__name__}"
        return layer_cache

    def slots(self, window: int | None) -> Tensor:
        """Return the tokens' KV slots [T] int64 for a layer with this window (None: without
        one)."""
        if window is None or self.window_slots is None:
            return self.kv_slots
        return self.window_slots

    def record(self, column: OutputColumn, values: Tensor, layer: int | None = None) -> None:
        """Write the values of an output column for all T tokens, if the job records the column.

        The values go to the tokens' KV slots. So the values of rejected drafts are overwritten by
        those of the tokens that replace them, and rows that share a prefix share its values.

        Args:
            values: [T, *tail], or [T, *tail[1:]] if a layer is given.
            layer: the index on the tail's first axis to write to; None writes the whole tail.
        """
        plane = self.columns.get(column.name)
        if plane is None:
            return
        flat = plane.flatten(0, 1)
        target = flat if layer is None else flat[:, layer]
        write_plane(target, self.kv_slots, values)
