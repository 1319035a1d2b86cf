"""Linear layers. Projections of one input share a merged weight, so they are one matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import TensorParallel
from batchgen.kernels.layers.cpu_product import CPUProduct, choose_product, few_keep_bits
from batchgen.kernels.layers.linear import MOST_ROWS, add_linear_, linear, pack_weight


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter; the loader fills every parameter exactly once."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


class CPUProducts:
    """Chooses how the linear layers of a model compute on this CPU, once for each weight shape."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[torch.Size, torch.dtype, bool], CPUProduct] = {}
        self._few: dict[tuple[torch.Size, torch.dtype], bool] = {}

    def choose(self, weight: Tensor, bias: Tensor | None) -> CPUProduct:
        """Return how products with this weight [N, K] and bias [N] are computed, trying them out
        if the shape is new."""
        key = (weight.shape, weight.dtype, bias is not None)
        if key not in self._chosen:
            self._chosen[key] = choose_product(weight, bias)
        return self._chosen[key]

    def takes_few(self, weight: Tensor) -> bool:
        """Return whether `linear` need not fill up few rows for a weight [N, K] without a bias."""
        key = (weight.shape, weight.dtype)
        if key not in self._few:
            self._few[key] = few_keep_bits(weight, self.choose(weight, None))
        return self._few[key]

    @property
    def unsteady(self) -> list[str]:
        """The weights for which no way of computing gives a row the same bits in every batch.

        Each is named by its in and out features and its dtype, as in `1024×3072 in float32`.
        """
        return [
            f"{k}×{n} in {str(dtype).removeprefix('torch.')}"
            for ((n, k), dtype, _), product in self._chosen.items()
            if product.most_rows is None
        ]


class Linear(nn.Module):
    """The linear layer y = x Wᵀ + b, with or without the bias b."""

    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if bias else None
        self._most_rows: int | None = MOST_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """Compute [T, out_features] from [T, in_features]."""
        return linear(x, self.weight, self.bias, self._most_rows)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add x Wᵀ + b to `residual` [T, out_features] in place and return it."""
        return add_linear_(residual, x, self.weight, self.bias, self._most_rows)

    def pack(self, products: CPUProducts) -> None:
        """Convert the loaded weight to the layout that was chosen for this CPU.

        After that it cannot be loaded again. On a GPU the weight stays as it is.

        Args:
            products: chooses how to compute; shared by all layers of a model.
        """
        if self.weight.device.type != "cpu" or self.weight.is_mkldnn:
            return
        product = products.choose(self.weight, self.bias)
        self._most_rows = product.most_rows
        if product.packed:
            packed = pack_weight(self.weight)
            del self.weight  # A Parameter cannot be replaced by a tensor of another layout.
            self.weight = packed


class RowParallelLinear(Linear):
    """A linear layer whose in features are divided between the ranks of tensor parallelism.

    Each rank has the columns of W for its own features of x; the sum over all ranks is x Wᵀ + b.

    Args:
        in_features: the length of x over all ranks, which the number of ranks divides.
        out_features: the length of the result.
        bias: whether there is a bias b, which rank 0 adds.
        lane: which memory the ranks' parts are summed in (`TensorParallel.add_sum`).
        parallel: the ranks.
        device: where the parameters are created.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        lane: int,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._shard, self._lane, self._parallel = parallel.shard(1, in_features), lane, parallel
        super().__init__(self._shard.length, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's part [T, out_features] of the sum from its features of x."""
        bias = self.bias if self._parallel.rank == 0 else None
        return linear(x, self.weight, bias, self._most_rows)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add the sum over all ranks to `residual` [T, out_features] in place and return it."""
        if self._parallel.size == 1:
            return super().add_to(residual, x)
        space = self._parallel.space(len(x), len(residual[0]), residual, self._lane)
        if space is None or self.bias is not None:
            return self._parallel.add_sum(residual, self(x), self._lane)
        torch.mm(x, self.weight.t(), out=space)
        return self._parallel.add_sum(residual, space, self._lane)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the weight, whose columns are divided, and of the bias."""
        shard = None if self._parallel.size == 1 else self._shard
        yield WeightSlot.plain(f"{path}.weight", self.weight, shard=shard)
        if self.bias is not None:
            yield WeightSlot.plain(f"{path}.bias", self.bias)


class MergedLinear(Linear):
    """A linear layer y = x Wᵀ + b whose weight W stacks several named projections of x.

    A checkpoint may hold each projection in a tensor of its own, or all of them in one tensor under
    the name of this module. Both can be loaded.

    Args:
        in_features: the length of x.
        parts: maps the name of each projection in checkpoints to its number of output features on
            this rank, in the order in which the output has them.
        bias: whether the projections have a bias.
        arrange: maps the names of projections whose output features stand in another order in
            checkpoints to what puts them in order: it takes a checkpoint's weight or bias, with the
            features on the first axis, and returns one of the same shape.
        shards: maps the names of projections whose output features are divided between ranks to
            those of this rank, in the order of checkpoints.
        device: where the parameters are created.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
        arrange: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, device=device, dtype=dtype)
        self.parts = dict(parts)
        self._arrange = dict(arrange or {})
        self._shards = dict(shards or {})

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield a weight slot for each projection, and one for all of them together."""
        parent = path.rpartition(".")[0]
        for kind, parameter in self.named_parameters(recurse=False):
            names = [f"{parent}.{part}.{kind}" for part in self.parts]
            slices = parameter.split(list(self.parts.values()))
            for part, name, values in zip(self.parts, names, slices, strict=True):
                arranged, shard = self._arranged(part, name), self._shards.get(part)
                yield WeightSlot(values, (name,), (name,), arranged, shard=shard)
            if not self._arrange:
                whole = f"{path}.{kind}"
                shard = self._whole_shard() if self._shards else None
                yield WeightSlot(parameter, tuple(names), (whole,), shard=shard)

    def _whole_shard(self) -> Shard:
        """Return this rank's features of a tensor in which all projections stand, one after the
        other."""
        start, ranges = 0, []
        for part, own in self.parts.items():
            shard = self._shards.get(part, Shard(0, own, ((0, own),)))
            ranges += [(start + first, start + end) for first, end in shard.ranges]
            start += shard.size
        return Shard(0, start, tuple(ranges))

    def _arranged(self, part: str, name: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        """Return what makes the values of a projection from the checkpoint's tensor of this name;
        None if they stand there as they are."""
        arrange = self._arrange.get(part)
        return None if arrange is None else lambda tensors: arrange(tensors[name])
