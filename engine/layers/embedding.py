"""The embedding of token ids, and the layer that computes logits: both have a row for each id."""

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
    """A table of vectors of token ids, which are multiplied by `scale`; each rank of tensor
    parallelism has consecutive ids. The factor is rounded to the vectors' dtype first. Tokens may
    have adapters, which add to their vectors."""

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
        """Look the vectors up, in the tables of adapters that have one of their own."""
        vectors = self._own_vectors(input_ids)
        return (
            vectors
            if self._saved is None
            else self._saved.replace_rows_(summed(vectors), input_ids)
        )

    def _own_vectors(self, input_ids: Tensor) -> Stream:
        """Do what `forward` does, without adapters."""
        if self._parallel.size == 1:
            return self._scaled(embedding(input_ids, self.weight))
        vectors = embedding_share(input_ids, self.weight, self._parallel.rank * len(self.weight))
        # One rank has the vector and the others have zeros, so the sum is exact.
        return self._parallel.add_sum(None, self._scaled(vectors), EMBEDDING_LANE)

    def mean(self, logits: Tensor) -> Tensor:
        """Compute the mean vectors [R, hidden_size] of R distributions over all ids, given by
        logits [R, V] float32, which are rounded to the vectors' dtype first. Needs all ids on this
        rank, and no adapters beside the table."""
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
        """Yield the table as a product with vectors of a one; each rank has all ids of an adapter's
        A."""
        width = self.weight.shape[1]
        yield LoRASite((LoRATarget(path, LoRAPart(0, width)),), width, self._vocab_size)

    def add_lora(
        self, path: str, factors: Sequence[Mapping[str, Factors]], state: LoRAState
    ) -> None:
        """Let adapters stand beside the table, as `Linear.add_lora` does."""
        if not any(path in adapter for adapter in factors):
            return
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
        """The numbers of an adapter's own table in an adapter slot."""
        return self._vocab_size * self.weight.shape[1]

    def add_saved(self, weights: Sequence[Tensor | None], state: LoRAState) -> None:
        """Let adapters have tables of their own, all of which each rank has."""
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
        self.saved: SavedWeights | None = None

    def _product(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute logits, with the weights of adapters that have one of their own."""
        out = super()._product(x)
        if self.saved is None:
            return out
        assert isinstance(x, Tensor)
        return self.saved.replace_products_(out, x)

    @property
    def saved_numbers(self) -> int:
        """The numbers of an adapter's own weight in an adapter slot, on this rank."""
        shard = ids_of_rank(self.out_features, self._vocab_size, self._parallel)
        return shard.length * self.in_features

    def add_saved(self, weights: Sequence[Tensor | None], state: LoRAState) -> None:
        """Let adapters have weights of their own, of which each rank has the rows of its ids."""
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
        """Yield the weight; of B each rank has the rows that it has of W."""
        shard = ids_of_rank(self.out_features, self._vocab_size, self._parallel)
        divided = self._parallel.size > 1
        yield LoRATarget(path, LoRAPart(0, shard.length), rows=shard if divided else None)


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
    shard = ids_of_rank(len(weight), vocab_size, parallel)
    return WeightSlot.plain(name, weight[: shard.length], shard=shard)


def ids_of_rank(rows: int, vocab_size: int, parallel: TensorParallel) -> Shard:
    """Return the token ids of which a rank that has `rows` of a table has vectors."""
    start = min(parallel.rank * rows, vocab_size)
    return Shard(0, vocab_size, ((start, min(start + rows, vocab_size)),))


def _clear_padding(weight: Tensor, vocab_size: int, parallel: TensorParallel) -> None:
    """Set the rows for no id to zero, as no checkpoint fills them."""
    real = max(vocab_size - parallel.rank * len(weight), 0)
    if real < len(weight):
        weight[real:].zero_()
