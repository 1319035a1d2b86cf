"""Forwards captured as CUDA graphs, so that one launch runs all kernels of all layers.

`ModelRunner` copies a batch's inputs to the addresses that a graph reads (`fixed_inputs.py`), and
replays the graph. The *kind* of a graph is a decode step, a prefill, or a mixed step; each kind is
captured for several batch sizes. Padding rows are on *scratch*: block 0 of the caches, which
belongs to no row. *Replayed tokens* (`ModelInputs.replayed`) are no replay of a graph: a prefill
computes them with the rounding of decode steps, which graphs do not support.

Three limits of `GraphShapes` say how many tokens a graph can hold: `chunk_tokens` those of the
prefill in a mixed step, `alone_tokens` those of a prefill without decoding rows, and
`prefill_tokens` those of a decode step of several tokens per row. Larger batches run without a
graph.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ImageFeatures, OutputTokens
from batchgen.engine.device.side_stream import with_side_stream
from batchgen.engine.device.transfer import release_cached_memory
from batchgen.engine.execution.fixed_inputs import RaggedInputs, fill_rows
from batchgen.engine.execution.forward import Forward, Part
from batchgen.engine.execution.graph_choice import GraphChoice
from batchgen.engine.execution.graph_shapes import CHUNK_ROWS, SHORT_ROWS, GraphShapes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.kernels.attention.metadata import AttentionMetadata

_Kind = Literal["decode", "short", "mixed", "prefill"]


class _Key(NamedTuple):
    """Identifies one captured graph."""

    # What the graph computes: a `decode` step, a decode step of rows with `short` contexts, a
    # `mixed` step, or a `prefill`.
    kind: _Kind
    size: int  # the number of tokens of a prefill; for other kinds, the number of decoding rows
    width: int = 1  # the number of tokens of each decoding row


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured forward, and the tensor in which its replay leaves the hidden states."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class ForwardGraphs:
    """A forward over inputs at fixed addresses, captured for some batch sizes.

    `capture` captures only the largest size of each kind. Smaller sizes are captured while steps
    run, once they are worth it (`GraphChoice`); until then their batches are padded to a larger
    captured size. Decode steps of several tokens per row, which not every engine needs, are
    captured only while steps run.

    All graphs share their working memory, because they run one after another in one stream; only
    their results are separate. A graph may use a side stream to run layers' work concurrently.

    Args:
        tiles: the sizes of the model's prefill-attention tiles, in tokens.
        scratch: a row on the scratch block that has every optional input the model reads.
        features: as for `RaggedInputs`.
    """

    def __init__(
        self,
        forward: Forward,
        shapes: GraphShapes,
        block_size: int,
        tiles: Collection[int],
        scratch: ModelInputs,
        features: Tensor | None = None,
    ) -> None:
        self._shapes = shapes
        self._block_size = block_size
        rows, blocks = shapes.max_rows, shapes.max_blocks
        device = scratch.positions.device
        states, hidden = scratch.state_slots is not None, scratch.hidden
        windows = scratch.window_tables is not None
        self._decode = ModelInputs.on_scratch(
            np.full(rows, max(shapes.widths)),
            blocks,
            device,
            states=states,
            hidden=hidden,
            rope_shifts=scratch.rope_shifts is not None,
            windows=windows,
            lora=scratch.lora_slots is not None,
        )
        fixed = blocks, tiles, scratch, features
        self._chunk = RaggedInputs(shapes.chunk_tokens, CHUNK_ROWS, *fixed)
        self._prefill = RaggedInputs(shapes.alone_tokens, rows, *fixed)
        # The prefill tokens whose hidden states are needed, and the same tokens as rows of one
        # query.
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        ones = np.ones(rows, np.int64)
        self._last_rows = ModelInputs.on_scratch(ones, blocks, device, windows=windows)
        self._graphs: dict[_Key, _Graph] = {}
        self._choices = _choices_of(shapes)
        self._forward, self._device = forward, device

    def run_all(self) -> None:
        """Run, without capturing, the forwards of all graphs and those that `capture` warms up
        with."""
        for key in dict.fromkeys([*self._each_kind(), *self._keys()]):
            self._forward(*self._arguments(key))

    def _keys(self) -> Iterator[_Key]:
        """Yield the keys of all graphs that may be captured, in descending order of size within a
        kind."""
        for (kind, width), choice in self._choices.items():
            for size in reversed(choice.sizes):
                yield _Key(kind, size, width)

    def _each_kind(self) -> list[_Key]:
        """Return keys of graphs whose forwards together launch nearly all kernels of all graphs."""
        shapes = self._shapes
        # Batches of few rows run different kernels than batches of many.
        keys = [_Key("decode", n, w) for w in shapes.widths for n in (1, shapes.max_rows)]
        return list(dict.fromkeys([*keys, *self._largest()]))

    def _largest(self) -> list[_Key]:
        """Return the key of the largest graph of each kind, for one token per row."""
        narrow = {kind: choice for (kind, width), choice in self._choices.items() if width == 1}
        return [_Key(kind, choice.sizes[-1]) for kind, choice in narrow.items()]

    def capture(self) -> None:
        """Compile all kernels, which cannot be done during a capture, and capture the largest
        sizes."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        self._side = torch.cuda.Stream(self._device)
        for key in self._each_kind():
            self._forward(*self._arguments(key))
        # Graphs of a dropped engine cannot be freed during a capture, so they are freed now.
        gc.collect()
        torch.cuda.synchronize(self._device)
        for key in self._largest():
            self._capture(key)

    def capture_all(self) -> None:
        """Capture all sizes that are not captured yet, so that no later step is padded to a larger
        size or waits for a capture."""
        for key in self._keys():
            if key not in self._graphs:
                self._capture(key)

    def _capture(self, key: _Key) -> _Graph:
        """Capture the forward of this graph and keep it."""
        arguments = self._arguments(key)
        # During a capture torch cannot return its cached memory to the GPU, so it does so now.
        release_cached_memory(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), with_side_stream(self._side), _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            hidden = self._forward(*arguments)
            graph.capture_end()
        captured = self._graphs[key] = _Graph(graph, hidden)
        self._choices[key.kind, key.width].add(key.size)
        return captured

    def _arguments(self, key: _Key) -> tuple[list[Part], OutputTokens | None]:
        """Return the arguments of the forward for this graph: the parts of the batch, which are the
        used part of the fixed inputs, and the tokens to compute in the last layer (None: all)."""
        kind, size, width = key
        if kind == "prefill":
            outputs = OutputTokens(self._last, [self._last_attention()])
            return [self._prefill.part(size)], None if self._shapes.all_tokens else outputs
        decode = self._decode.first(size, size * width)
        blocks = self._shapes.short_blocks if kind == "short" else self._shapes.max_blocks
        window_tables = decode.window_tables
        decode = replace(
            decode,
            block_tables=decode.block_tables[:, :blocks],
            query_lens=np.full(size, width),
            window_tables=None if window_tables is None else window_tables[:, :blocks],
        )
        chunk = [self._chunk.part(self._shapes.chunk_tokens)] if kind == "mixed" else []
        return [Part(decode, width=width), *chunk], None

    def _last_attention(self) -> AttentionMetadata:
        """Return the attention metadata of the prefill's last tokens, one query per row."""
        rows = self._last_rows
        ones = (1,) * rows.num_rows
        return AttentionMetadata(
            rows.positions, ones, ones, rows.block_tables, window_tables=rows.window_tables
        )

    def drop(self) -> None:
        """Free the graphs. None can be replayed afterwards."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    def takes_decode(self, num_rows: int, width: int) -> bool:
        """Return whether there is a graph for a decode batch of this many rows of `width`
        tokens. Steps of one token per row always have one; wider ones only while launching their
        kernels takes longer than computing them, as with prefills of as many tokens."""
        return width == 1 or num_rows * width <= self._shapes.prefill_tokens

    def decode_rows(self, num_rows: int, width: int) -> int:
        """Return the largest number of rows whose decode batches fit the same graph size as this
        batch."""
        return self._choices["decode", width].fitting(num_rows)

    def decode(self, inputs: ModelInputs) -> Tensor:
        """Run a decode step of B rows of W tokens each. Returns the hidden states [B · W,
        hidden_size], which are valid until the next replay."""
        shapes, tokens = self._shapes, len(inputs.input_ids)
        rows, width = inputs.num_rows, tokens // inputs.num_rows
        short = inputs.context_lens.max() <= shapes.short_blocks * self._block_size
        has_short_graph = self.decode_rows(rows, width) >= SHORT_ROWS  # see `short_sizes`
        kind: _Kind = "short" if width == 1 and short and has_short_graph else "decode"
        size = self._choices[kind, width].choose(rows)
        fill_rows(self._decode, inputs, size)
        return self._replay(_Key(kind, size, width))[:tokens]

    def takes_chunk(self, prefill: ModelInputs) -> bool:
        """Return whether there is a graph of mixed batches for this prefill."""
        if not self._may_read(prefill):
            return False
        tokens, rows = len(prefill.input_ids), prefill.num_rows
        return 0 < tokens <= self._shapes.chunk_tokens and rows <= CHUNK_ROWS

    def mixed(
        self, decode: ModelInputs, prefill: ModelInputs, images: ImageFeatures | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a decode step of B rows of one token each, together with a prefill and its image
        tokens.

        Returns:
            The hidden states of the decoding rows, [B, hidden_size], and of the prefill's tokens,
                [chunk_tokens, hidden_size]; entries after the last token are undefined. Both are
                valid until the next replay.
        """
        size = self._choices["mixed", 1].choose(decode.num_rows)
        fill_rows(self._decode, decode, size)
        self._chunk.fill(prefill, self._shapes.chunk_tokens, images)
        hidden = self._replay(_Key("mixed", size))
        return hidden[: decode.num_rows], hidden[size:]

    def takes_prefill(self, inputs: ModelInputs) -> bool:
        """Return whether there is a graph for this prefill without decoding rows."""
        return len(inputs.input_ids) <= self._shapes.alone_tokens and self._may_read(inputs)

    def _may_read(self, prefill: ModelInputs) -> bool:
        """Return whether graphs can compute a prefill of few tokens. They replay no tokens, and
        read no images whose tokens attend to each other."""
        is_causal = prefill.replayed is None and prefill.last_seen is None
        return self._shapes.reads_prompts and is_causal

    def takes_all(self, inputs: ModelInputs) -> bool:
        """Return whether there is a graph for this prefill that computes the hidden states of all
        tokens."""
        return self._shapes.all_tokens and self.takes_prefill(inputs)

    def prefill_all(self, inputs: ModelInputs, images: ImageFeatures | None = None) -> Tensor:
        """Run a prefill and return the hidden states of all its tokens, [T, hidden_size], valid
        until the next replay."""
        size = self._choices["prefill", 1].choose(len(inputs.input_ids))
        self._prefill.fill(inputs, size, images)
        return self._replay(_Key("prefill", size))[: len(inputs.input_ids)]

    def prefill(
        self,
        inputs: ModelInputs,
        last: Tensor,
        outputs: ModelInputs,
        images: ImageFeatures | None = None,
    ) -> Tensor:
        """Run a prefill and return the hidden states of R of its tokens, [R, hidden_size], valid
        until the next replay.

        Args:
            last: [R] int64, the indices of these tokens.
            outputs: these tokens as rows of one token each.
            images: the image tokens of the prefill; None if it has none.
        """
        assert not self._shapes.all_tokens, "the graph computes all tokens"
        size = self._choices["prefill", 1].choose(len(inputs.input_ids))
        self._prefill.fill(inputs, size, images)
        count = len(last)
        self._last[:count].copy_(last)
        self._last[count:].zero_()
        fill_rows(self._last_rows, outputs, self._shapes.max_rows)
        return self._replay(_Key("prefill", size))[:count]

    def _replay(self, key: _Key) -> Tensor:
        """Replay a graph, capturing it first if needed, and return its hidden states."""
        captured = self._graphs.get(key) or self._capture(key)
        captured.graph.replay()
        return captured.hidden


def _choices_of(shapes: GraphShapes) -> dict[tuple[_Kind, int], GraphChoice]:
    """Return a `GraphChoice` for each kind and width that has sizes. The kinds whose largest graphs
    take the most memory come first."""
    choices: dict[tuple[_Kind, int], GraphChoice] = {
        ("prefill", 1): GraphChoice(shapes.prefill_sizes),
        ("mixed", 1): GraphChoice(shapes.mixed_sizes, concurrent_tokens=shapes.chunk_tokens),
        ("decode", 1): GraphChoice(shapes.decode_sizes),
        ("short", 1): GraphChoice(shapes.short_sizes),
    }
    for width in shapes.widths:
        if width > 1:
            choices["decode", width] = GraphChoice(shapes.wide_sizes(width))
    return {kind: choice for kind, choice in choices.items() if choice.sizes}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing CUDA graphs during a capture, where that is an
    error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
