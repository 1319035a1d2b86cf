"""The embedding of token ids, and the output layer that computes logits. Both have a row for each
id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from batchgen.engine.layers.cpu_products import CPUProducts
from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.lora.layer_lora import EmbeddingLoRA, LoRAState
from batchgen.engine.lora.lora_targets import Factors, LoRASite, LoRATarget
from batchgen.engine.lora.saved_weights import SavedWeights
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import (
    EMBEDDING_LANE,
    Stream,
    TensorParallel,
    summed,
)
from batchgen.kernels.fp8.quantise import FP8Rows
from batchgen.kernels.layers.embedding import embedding, embedding_share
from batchgen.kernels.lora.lora import LoRAPart
from batchgen.kernels.sampling.sampling_triton import CHUNK


class Embedding(nn.Module):
    """A table with a vector for each token id. Vectors are multiplied by `scale`, rounded to their
    dtype.

    Each rank of tensor parallelism has a range of consecutive ids. Adapters (LoRA) may add to the
    vectors. An adapter may also have a *saved* weight: a table of its own that replaces this one.
    """

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
        self.lora: EmbeddingLoRA | None = None
        self._saved: SavedWeights | None = None

    def forward(self, input_ids: Tensor) -> Stream:
        """Look up the vectors [T, hidden_size] of token ids [T] int64."""
        vectors = self._vectors(input_ids)
        return vectors if self.lora is None else self.lora.add_(summed(vectors), input_ids)

    def _vectors(self, input_ids: Tensor) -> Stream:
        """Look up the vectors, in an adapter's own table if it has one."""
        vectors = self._own_vectors(input_ids)
        return (
            vectors
            if self._saved is None
            else self._saved.replace_rows_(summed(vectors), input_ids)
        )

    def _own_vectors(self, input_ids: Tensor) -> Stream:
        """Compute `forward` without adapters."""
        if self._parallel.size == 1:
            return self._scaled(embedding(input_ids, self.weight))
        vectors = embedding_share(input_ids, self.weight, self._parallel.rank * len(self.weight))
        # One rank has the vector and all others have zeros, so the sum is exact.
        return self._parallel.add_sum(None, self._scaled(vectors), EMBEDDING_LANE)

    def mean(self, logits: Tensor) -> Tensor:
        """Compute the mean vectors [R, hidden_size] of R distributions over all ids.

        This needs all ids on one rank, and does not support adapters.

        Args:
            logits: [R, V] float32, the logits of the distributions, which are rounded to the
                vectors' dtype first.
        """
        assert self._parallel.size == 1 and self.lora is None and self._saved is None
        dtype = self.weight.dtype
        shares = logits.to(dtype).softmax(-1, dtype=torch.float32).to(dtype)
        return self._scaled(shares @ self.weight)

    def _scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the table."""
        yield vocab_slot(f"{path}.weight", self.weight, self._vocab_size, self._parallel)

    def lora_sites(self, path: str) -> Iterator[LoRASite]:
        """Yield the table as a product with one-hot vectors. Each rank has all ids of an adapter's
        A."""
        width = self.weight.shape[1]
        yield LoRASite((LoRATarget(path, LoRAPart(0, width)),), width, self._vocab_size)

    def add_lora(
        self, path: str, factors: Sequence[Mapping[str, Factors]], state: LoRAState
    ) -> None:
        """Add the adapters' factors to the table, as `Linear.add_lora` does."""
        if not any(path in adapter for adapter in factors):
            return
        # The table's vectors are multiplied by a scale, and so are the adapters'.
        scaled = [
            {path: replace(adapter[path], scale=adapter[path].scale * self._scale)}
            if path in adapter
            else {}
            for adapter in factors
        ]
        (site,) = self.lora_sites(path)
        self.lora = EmbeddingLoRA(site, scaled, state, self.weight.dtype, self.weight.device)

    @property
    def saved_numbers(self) -> int:
        """How many numbers an adapter's own table takes in an adapter slot."""
        return self._vocab_size * self.weight.shape[1]

    def add_saved(self, weights: Sequence[Tensor | None], state: LoRAState) -> None:
        """Let adapters have their own tables, which are not divided among ranks."""
        if any(weight is not None for weight in weights):
            scaled = [
                self._scaled(w.to(self.weight.dtype, copy=True)) if w is not None else None
                for w in weights
            ]
            self._saved = SavedWeights(scaled, state, self.weight.device)

    def pack(self, products: CPUProducts) -> None:
        """Choose how adapters are computed on a CPU."""
        if self.lora is not None:
            self.lora.pack(products)


class LogitsLayer(Linear):
    """The output layer, which computes a logit for each token id. Each rank of tensor parallelism
    computes a range of consecutive ids (`Logits`)."""

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
        self.saved: SavedWeights | None = None

    def _product(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute logits, with an adapter's own weight if it has one."""
        out = super()._product(x)
        if self.saved is None:
            return out
        assert isinstance(x, Tensor)
        return self.saved.replace_products_(out, x)

    @property
    def saved_numbers(self) -> int:
        """How many numbers an adapter's own weight takes in an adapter slot on this rank."""
        shard = ids_of_rank(self.out_features, self._vocab_size, self._parallel)
        return shard.length * self.in_features

    def add_saved(self, weights: Sequence[Tensor | None], state: LoRAState) -> None:
        """Let adapters have their own weights. Each rank has the rows of its ids."""
        if any(weight is not None for weight in weights):
            shard = ids_of_rank(self.out_features, self._vocab_size, self._parallel)
            rank_weights = [None if w is None else shard.take(w).to(self._dtype) for w in weights]
            self.saved = SavedWeights(rank_weights, state, self.weight.device)

    def pack(self, products: CPUProducts) -> None:
        """Convert the loaded weights, as `Linear.pack` says."""
        if self.saved is not None:
            self.saved.pack(products)
        super().pack(products)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight."""
        yield vocab_slot(f"{path}.weight", self.weight, self._vocab_size, self._parallel)

    def lora_targets(self, path: str) -> Iterator[LoRATarget]:
        """Yield the weight. Each rank has the same rows of B as of W."""
        shard = ids_of_rank(self.out_features, self._vocab_size, self._parallel)
        divided = self._parallel.size > 1
        yield LoRATarget(path, LoRAPart(0, shard.length), rows=shard if divided else None)


_FEWEST_CHUNKS = 4
"""Ranks get whole chunks of the sampler if each gets at least this many; then rounding up wastes
little."""


def rows_of_rank(vocab_size: int, parallel: TensorParallel) -> int:
    """Return the number of table rows on each rank; the last rows may belong to no id.

    With a large vocabulary, a rank has whole chunks of the sampler, so that ranks can sample
    without gathering logits (`can_divide`).
    """
    rows = -(-vocab_size // parallel.size)
    chunks = -(-rows // CHUNK) * CHUNK
    few = rows < _FEWEST_CHUNKS * CHUNK
    has_all = chunks * (parallel.size - 1) < vocab_size  # the last rank has some rows, too
    return rows if parallel.size == 1 or few or not has_all else chunks


def vocab_slot(name: str, weight: Tensor, vocab_size: int, parallel: TensorParallel) -> WeightSlot:
    """Return the slot of this rank's rows [rows, hidden_size] of a tensor with a row for each
    id."""
    if parallel.size == 1:
        return WeightSlot.plain(name, weight)
    shard = ids_of_rank(len(weight), vocab_size, parallel)
    return WeightSlot.plain(name, weight[: shard.length], shard=shard)


def ids_of_rank(rows: int, vocab_size: int, parallel: TensorParallel) -> Shard:
    """Return the token ids of a rank that has `rows` rows of the table."""
    start = min(parallel.rank * rows, vocab_size)
    return Shard(0, vocab_size, ((start, min(start + rows, vocab_size)),))


def _clear_padding(weight: Tensor, vocab_size: int, parallel: TensorParallel) -> None:
    """Zero the rows that belong to no id, because no checkpoint fills them."""
    real = max(vocab_size - parallel.rank * len(weight), 0)
    if real < len(weight):
        weight[real:].zero_()
