"""Forwards as CUDA graphs: one launch for all kernels of all layers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.execution.forward_context import OutputTokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.transfer import upload
from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.prefill import cut_tiles

CHUNK_ROWS = 8
"""Rows of a mixed batch's prefill, at most."""
_MIXED_ROWS = 32
"""Mixed batches are captured for multiples of so many decoding rows: beside a chunk of prefill,
the rows that fill up cost little."""
_SHORT_ROWS = 16
"""Fewer rows split their contexts in any case."""
_LAUNCH_SECONDS = 1e-3
"""That the host needs for the launches of a layer (measured; an H100's machine)."""
_FLOPS = 7e14
"""What the device computes meanwhile, per second."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a forward whose attention is computed together.

    Attributes:
        rows: [T] int32, the row of each token; None if all rows have the same number of them.
        tiles: of the attention, where the rows' numbers of tokens are not known at capture.
        width: of decoding rows, the tokens of each.
    """

    inputs: ModelInputs
    rows: Tensor | None = None
    tiles: Tensor | None = None
    width: int | None = None


class Forward(Protocol):
    """Hidden states of all tokens of the parts, or of the outputs among them. To be captured it may
    neither wait for the device nor look at its data.
    """

    def __call__(self, parts: Sequence[Part], outputs: OutputTokens | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """What is captured.

    Attributes:
        max_rows: decoding rows of a batch, and rows of a prefill, at most.
        max_blocks: of a row.
        chunk_tokens: prefill tokens of a mixed batch, at most; 0 if there are none.
        prefill_tokens: of a prefill by itself, or of decoding rows of several tokens, at most;
            larger batches run without a graph.
        short_blocks: decode batches whose rows have no more blocks have graphs of their own, whose
            attention combines nothing; 0 if there are none.
        widths: tokens of a decoding row in one forward.
    """

    max_rows: int
    max_blocks: int
    chunk_tokens: int
    prefill_tokens: int
    short_blocks: int = 0
    widths: tuple[int, ...] = (1,)

    @property
    def decode_sizes(self) -> list[int]:
        """Numbers of rows of one token, ascending; other batches are filled up."""
        if 1 not in self.widths:
            return []
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, self.max_rows, 16)]
        return [*(size for size in sizes if size < self.max_rows), self.max_rows]

    @property
    def wide_sizes(self) -> list[int]:
        """As `decode_sizes`, for rows of several tokens."""
        sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, self.max_rows, 32)]
        return [*(size for size in sizes if size < self.max_rows), self.max_rows]

    @property
    def short_sizes(self) -> list[int]:
        return [size for size in self.decode_sizes if self.short_blocks and size >= _SHORT_ROWS]

    @property
    def mixed_sizes(self) -> list[int]:
        """As `decode_sizes`, for batches that prefill too."""
        if not self.chunk_tokens:
            return []
        return [*range(_MIXED_ROWS, self.max_rows, _MIXED_ROWS), self.max_rows]

    @property
    def prefill_sizes(self) -> list[int]:
        """Numbers of tokens, ascending; other prefills are filled up."""
        if not self.prefill_tokens:
            return []
        sizes = [256, 512, 1024, 1536, *range(2048, self.prefill_tokens, 1024)]
        return [*(size for size in sizes if size < self.prefill_tokens), self.prefill_tokens]

    def __len__(self) -> int:
        """Graphs in all."""
        sizes = (self.decode_sizes, self.short_sizes, self.mixed_sizes, self.prefill_sizes)
        wide = sum(width > 1 for width in self.widths)
        return sum(map(len, sizes)) + len(self.wide_sizes) * wide


def launch_bound_tokens(num_layers: int, num_parameters: int, most: int) -> int:
    """The largest prefill, a multiple of 256 or `most`, that the device computes faster than the
    host launches its kernels one by one."""
    tokens = int(num_layers * _LAUNCH_SECONDS * _FLOPS / (2 * num_parameters))
    return min(most, tokens // 256 * 256)


class _Key(NamedTuple):
    """Of a graph: rows or, of a prefill, tokens; and the tokens of a decoding row."""

    kind: str
    size: int
    width: int = 1


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class ForwardGraphs:
    """A forward over fixed tensors, captured once per size of batch. Most sizes are captured at the
    start; those of decode batches with long contexts or several tokens a row when they come.

    The graphs share their memory, which is safe because they run one after another in one stream;
    only their outputs are apart.

    Args:
        block_size: of the KV cache.
        tile: tokens of a tile of prefill attention.
    """

    def __init__(
        self,
        forward: Forward,
        shapes: GraphShapes,
        block_size: int,
        tile: int,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._block_size = block_size
        rows, blocks = shapes.max_rows, shapes.max_blocks
        self._decode = ModelInputs.on_scratch(np.full(rows, max(shapes.widths)), blocks, device)
        self._chunk = _Ragged(shapes.chunk_tokens, CHUNK_ROWS, blocks, tile, device)
        self._prefill = _Ragged(shapes.prefill_tokens, rows, blocks, tile, device)
        # The tokens whose hidden states a prefill is for, as rows of one query.
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._last_rows = ModelInputs.on_scratch(np.ones(rows, np.int64), blocks, device)
        self._graphs: dict[_Key, _Graph] = {}
        self._forward, self._device = forward, device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._prepare()

    def _prepare(self) -> None:
        """Compile all kernels, which a capture cannot, and capture what every job needs."""
        shapes = self._shapes
        short = shapes.short_sizes
        first = [_Key("decode", size) for size in shapes.decode_sizes if size not in short]
        first += [_Key("short", size) for size in short]
        first += [_Key("mixed", size) for size in shapes.mixed_sizes]
        first += [_Key("prefill", size) for size in shapes.prefill_sizes]
        # Few rows have other kernels than many.
        compiled = [_Key("decode", n, w) for w in shapes.widths for n in (1, shapes.max_rows)]
        for key in [*compiled, *{key.kind: key for key in first}.values()]:
            self._forward(*self._arguments(key))
        gc.collect()  # graphs of an engine that is gone cannot be freed during a capture
        torch.cuda.synchronize(self._device)
        for key in reversed(first):  # the largest first: the others fit into its memory
            self._capture(key)

    def _capture(self, key: _Key) -> _Graph:
        arguments = self._arguments(key)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            hidden = self._forward(*arguments)
            graph.capture_end()
        captured = self._graphs[key] = _Graph(graph, hidden)
        return captured

    def _arguments(self, key: _Key) -> tuple[list[Part], OutputTokens | None]:
        kind, size, width = key
        if kind == "prefill":
            return [self._prefill.part(size)], OutputTokens(self._last, [self._last_attention()])
        whole = self._decode
        blocks = self._shapes.short_blocks if kind == "short" else self._shapes.max_blocks
        decode = ModelInputs(
            whole.input_ids[: size * width],
            whole.positions[: size * width],
            whole.block_tables[:size, :blocks],
            np.full(size, width),
            whole.context_lens[:size],
        )
        chunk = [self._chunk.part(self._shapes.chunk_tokens)] if kind == "mixed" else []
        return [Part(decode, width=width), *chunk], None

    def _last_attention(self) -> AttentionMetadata:
        rows = self._last_rows
        ones = (1,) * rows.num_rows
        return AttentionMetadata(rows.positions, ones, ones, rows.block_tables)

    def takes_decode(self, num_rows: int, width: int) -> bool:
        """It is no larger than what is captured."""
        return width == 1 or num_rows * width <= self._shapes.prefill_tokens

    def decode_rows(self, num_rows: int, width: int) -> int:
        """Rows of the graph that a decode batch of num_rows of W tokens replays."""
        shapes = self._shapes
        return _bucket(shapes.decode_sizes if width == 1 else shapes.wide_sizes, num_rows)

    def decode(self, inputs: ModelInputs) -> Tensor:
        """[B · W, hidden_size] of B decoding rows of W tokens, valid until the next run."""
        shapes, tokens = self._shapes, len(inputs.input_ids)
        width = tokens // inputs.num_rows
        size = self.decode_rows(inputs.num_rows, width)
        _fill_rows(self._decode, inputs, size)
        short = inputs.context_lens.max() <= shapes.short_blocks * self._block_size
        kind = "short" if width == 1 and short and size >= _SHORT_ROWS else "decode"
        return self._replay(_Key(kind, size, width))[:tokens]

    def takes_chunk(self, prefill: ModelInputs) -> bool:
        """It fits a mixed batch."""
        tokens, rows = len(prefill.input_ids), prefill.num_rows
        return 0 < tokens <= self._shapes.chunk_tokens and rows <= CHUNK_ROWS

    def mixed(self, decode: ModelInputs, prefill: ModelInputs) -> tuple[Tensor, Tensor]:
        """Hidden states of the B decoding rows and of the prefill's tokens, valid until the next
        run: [B, hidden_size] and [chunk_tokens, hidden_size], undefined past the prefill's.
        """
        size = _bucket(self._shapes.mixed_sizes, decode.num_rows)
        _fill_rows(self._decode, decode, size)
        self._chunk.fill(prefill, self._shapes.chunk_tokens)
        hidden = self._replay(_Key("mixed", size))
        return hidden[: decode.num_rows], hidden[size:]

    def takes_prefill(self, inputs: ModelInputs) -> bool:
        """It is no larger than what was captured."""
        return len(inputs.input_ids) <= self._shapes.prefill_tokens

    def prefill(self, inputs: ModelInputs, last: Tensor, outputs: ModelInputs) -> Tensor:
        """[R, hidden_size] of R of a prefill's tokens, valid until the next run.

        Args:
            last: [R] int64, their places among the tokens.
            outputs: those tokens as rows of one token.
        """
        size = _bucket(self._shapes.prefill_sizes, len(inputs.input_ids))
        self._prefill.fill(inputs, size)
        count = len(last)
        self._last[:count].copy_(last)
        self._last[count:].zero_()
        _fill_rows(self._last_rows, outputs, self._shapes.max_rows)
        return self._replay(_Key("prefill", size))[:count]

    def _replay(self, key: _Key) -> Tensor:
        captured = self._graphs.get(key) or self._capture(key)
        captured.graph.replay()
        return captured.hidden


class _Ragged:
    """Fixed tensors of rows whose numbers of tokens are known at the replay only.

    They have one row more than can be asked for, without blocks, for the tokens that fill up.
    """

    def __init__(
        self, tokens: int, rows: int, max_blocks: int, tile: int, device: torch.device
    ) -> None:
        self._inputs = ModelInputs.on_scratch(np.array([*[0] * rows, tokens]), max_blocks, device)
        self._rows = torch.full((tokens,), rows, dtype=torch.int32, device=device)
        self._filler = rows
        self._tile = tile
        num_tiles = -(-tokens // tile) + rows
        self._tiles = torch.zeros((num_tiles, 3), dtype=torch.int32, device=device)

    def part(self, size: int) -> Part:
        """The first `size` tokens."""
        whole = self._inputs
        lens = np.zeros(self._filler + 1, np.int64)
        lens[self._filler] = size
        inputs = ModelInputs(
            whole.input_ids[:size],
            whole.positions[:size],
            whole.block_tables,
            lens,
            whole.context_lens,
        )
        return Part(inputs, self._rows[:size], self._tiles[: -(-size // self._tile) + self._filler])

    def fill(self, inputs: ModelInputs, size: int) -> None:
        """Stand in for the part of `size` tokens."""
        fixed, count = self._inputs, len(inputs.input_ids)
        fixed.input_ids[:count].copy_(inputs.input_ids)
        fixed.positions[:count].copy_(inputs.positions)
        _fill_tables(fixed.block_tables, inputs.block_tables)
        device = fixed.positions.device
        rows = np.full(size, self._filler, np.int32)
        rows[:count] = np.repeat(np.arange(inputs.num_rows), inputs.query_lens)
        self._rows[:size].copy_(upload(rows, torch.int32, device))
        tiles = np.zeros((-(-size // self._tile) + self._filler, 3), np.int32)
        cut = cut_tiles(inputs.query_lens.tolist(), self._tile, inputs.context_lens.tolist())
        tiles[: len(cut)] = cut.numpy()
        self._tiles[: len(tiles)].copy_(upload(tiles, torch.int32, device))


def _bucket(sizes: Sequence[int], size: int) -> int:
    return sizes[int(np.searchsorted(sizes, size))]


def _fill_rows(fixed: ModelInputs, inputs: ModelInputs, size: int) -> None:
    """Rows of equally many tokens; those that fill up use the scratch block alone."""
    rows, tokens = inputs.num_rows, len(inputs.input_ids)
    fixed.input_ids[:tokens].copy_(inputs.input_ids)
    fixed.positions[:tokens].copy_(inputs.positions)
    _fill_tables(fixed.block_tables, inputs.block_tables)
    if rows < size:
        width = tokens // max(rows, 1)
        fixed.positions[tokens : size * max(width, 1)].zero_()
        fixed.block_tables[rows:size, 0].zero_()


def _fill_tables(fixed: Tensor, tables: Tensor) -> None:
    """Tables grow ahead of need, so they may be wider than any row."""
    rows, blocks = tables.shape
    blocks = min(blocks, fixed.shape[1])
    fixed[:rows, :blocks].copy_(tables[:, :blocks])
