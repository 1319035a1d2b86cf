"""The embedding of token ids, and the layer that computes logits: both have a row for each id."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import (
    EMBEDDING_LANE,
    Stream,
    TensorParallel,
)
from batchgen.kernels.layers.embedding import embedding, embedding_share
from batchgen.kernels.sampling.sampling_triton import CHUNK


class Embedding(nn.Module):
    """A table of vectors of token ids, which are multiplied by `scale`; each rank of tensor
    parallelism has consecutive ids. The factor is rounded to the vectors' dtype first."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        where: Placement,
    ) -> None:
        super().__init__()
        self._vocab_size, self._parallel = vocab_size, where.parallel
        self._scale = float(torch.tensor(scale, dtype=where.dtype, device="cpu"))
        rows = rows_of_rank(vocab_size, where.parallel)
        self.weight = empty_parameter(rows, hidden_size, device=where.device, dtype=where.dtype)
        _clear_padding(self.weight, vocab_size, where.parallel)

    def forward(self, input_ids: Tensor) -> Stream:
        """Look up the vectors [T, hidden_size] of token ids [T] int64."""
        if self._parallel.size == 1:
            return self._scaled(embedding(input_ids, self.weight))
        own = embedding_share(input_ids, self.weight, self._parallel.rank * len(self.weight))
        # One rank has the vector and the others have zeros, so the sum is exact.
        return self._parallel.add_sum(None, self._scaled(own), EMBEDDING_LANE)

    def _scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the table."""
        yield vocab_slot(f"{path}.weight", self.weight, self._vocab_size, self._parallel)


class LogitsLayer(Linear):
    """The linear layer that computes a logit for each token id.

    Each rank of tensor parallelism computes consecutive ids (`Logits`).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        where: Placement,
    ) -> None:
        rows = rows_of_rank(vocab_size, where.parallel)
        super().__init__(hidden_size, rows, bias=False, quantisable=False, where=where)
        self._vocab_size, self._parallel = vocab_size, where.parallel
        _clear_padding(self.weight, vocab_size, where.parallel)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight."""
        yield vocab_slot(f"{path}.weight", self.weight, self._vocab_size, self._parallel)


_FEWEST_CHUNKS = 4
"""Ranks have whole chunks of the sampler if each has at least this number, of which rounding up
wastes few."""


def rows_of_rank(vocab_size: int, parallel: TensorParallel) -> int:
    """Return for how many token ids each rank has rows; the last ones may be for no id. Of a large
    vocabulary a rank has whole chunks of the sampler, so that ranks can draw (`can_divide`)."""
    rows = -(-vocab_size // parallel.size)
    chunks = -(-rows // CHUNK) * CHUNK
    few = rows < _FEWEST_CHUNKS * CHUNK
    has_all = chunks * (parallel.size - 1) < vocab_size  # the last rank has some, too
    return rows if parallel.size == 1 or few or not has_all else chunks


def vocab_slot(name: str, weight: Tensor, vocab_size: int, parallel: TensorParallel) -> WeightSlot:
    """Return the slot of a rank's rows [rows, hidden_size] of a tensor with a row for each id."""
    if parallel.size == 1:
        return WeightSlot.plain(name, weight)
    start = min(parallel.rank * len(weight), vocab_size)
    end = min(start + len(weight), vocab_size)
    return WeightSlot.plain(
        name, weight[: end - start], shard=Shard(0, vocab_size, ((start, end),))
    )


def _clear_padding(weight: Tensor, vocab_size: int, parallel: TensorParallel) -> None:
    """Set the rows for no id to zero, as no checkpoint fills them."""
    real = max(vocab_size - parallel.rank * len(weight), 0)
    if real < len(weight):
        weight[real:].zero_()
