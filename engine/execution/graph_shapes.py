"""Chooses the batch sizes for which CUDA graphs are captured, from the settings of an engine.

`ModelUse.graph_shapes` makes the `GraphShapes` that `ForwardGraphs` reads.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_ROWS = 8
"""The most rows of a prefill in a mixed step."""
SHORT_ROWS = 16
"""The fewest decoding rows with separate graphs for short contexts. In smaller batches attention
splits contexts of any length."""
_MIXED_ROWS = 32
"""Mixed batches are captured for multiples of this many decoding rows. The multiple is large
because padding rows cost little compared with a chunk of prefill."""
_LAUNCH_SECONDS = 1e-3
"""The seconds that the host needs to launch the kernels of one layer (measured with an H100)."""
_FLOPS = 7e14
"""The arithmetic operations per second of a device (bfloat16 matrix products on an H100)."""


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The batch sizes for which graphs are captured. A batch is padded to the next size."""

    max_rows: int  # the most decoding rows of a batch, and the most rows of a prefill
    max_blocks: int  # the most blocks of the paged cache that a row can have
    chunk_tokens: int  # the most prefill tokens in a mixed batch; 0 if there are no mixed batches
    # The most tokens of a captured prefill, and of a captured decode step of several tokens per
    # row; larger batches run without a graph.
    prefill_tokens: int
    # Decode batches whose rows have at most this many blocks have separate graphs, in which
    # attention does not split a row's context; 0 if there are no such graphs.
    short_blocks: int = 0
    widths: tuple[int, ...] = (1,)  # every number of tokens per row that a decode forward can have
    # Whether captured prefills compute the last layer for all tokens, and not only for those whose
    # hidden states are needed.
    all_tokens: bool = False
    # Whether graphs can read prompts. If not, neither mixed batches nor prefills are captured.
    reads_prompts: bool = True

    @property
    def alone_tokens(self) -> int:
        """The most tokens of a captured prefill; 0 if there is none."""
        return self.prefill_tokens if self.reads_prompts else 0

    @property
    def decode_sizes(self) -> list[int]:
        """The numbers of rows of captured decode steps of one token per row, ascending."""
        if 1 not in self.widths:
            return []
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, self.max_rows, 16)]
        return [*(size for size in sizes if size < self.max_rows), self.max_rows]

    def wide_sizes(self, width: int) -> list[int]:
        """Return the numbers of rows of captured decode steps of `width` > 1 tokens per row,
        ascending."""
        max_rows = min(self.max_rows, self.prefill_tokens // width)
        sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_rows, 32)]
        return [*(size for size in sizes if size < max_rows), max_rows] if max_rows else []

    @property
    def short_sizes(self) -> list[int]:
        """The `decode_sizes` that also have a graph for short contexts, ascending."""
        return [size for size in self.decode_sizes if self.short_blocks and size >= SHORT_ROWS]

    @property
    def mixed_sizes(self) -> list[int]:
        """The numbers of decoding rows of captured mixed batches, ascending."""
        if not self.chunk_tokens or not self.reads_prompts:
            return []
        return [*range(_MIXED_ROWS, self.max_rows, _MIXED_ROWS), self.max_rows]

    @property
    def prefill_sizes(self) -> list[int]:
        """The numbers of tokens of captured prefills without decoding rows, ascending."""
        if not self.alone_tokens:
            return []
        sizes = [256, 512, 1024, 1536, *range(2048, self.prefill_tokens, 1024)]
        return [*(size for size in sizes if size < self.prefill_tokens), self.prefill_tokens]

    def __len__(self) -> int:
        """Return the number of graphs that may be captured."""
        sizes = (self.decode_sizes, self.short_sizes, self.mixed_sizes, self.prefill_sizes)
        wide = sum(len(self.wide_sizes(width)) for width in self.widths if width > 1)
        return sum(map(len, sizes)) + wide


def launch_bound_tokens(num_layers: int, parameters_per_token: int, limit: int) -> int:
    """Return the number of tokens of the largest prefill that is worth a CUDA graph.

    Up to this size the device computes a prefill faster than the host launches its kernels one by
    one. The number is a multiple of 256, or `limit` if that is smaller.
    """
    tokens = int(num_layers * _LAUNCH_SECONDS * _FLOPS / (2 * parameters_per_token))
    return min(limit, tokens // 256 * 256)
