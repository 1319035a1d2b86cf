"""RMSNorm, which divides by the root mean square, and LayerNorm, which subtracts the mean first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import (
    PendingNorm,
    PendingParts,
    PendingSum,
    Stream,
    summed,
)
from batchgen.kernels.fp8.quantise import (
    FP8Rows,
    RoundedRows,
    quantise_rows,
    rms_norm_both,
    rms_norm_quantised,
)
from batchgen.kernels.layers.post_norm import MOST_READERS, Term
from batchgen.kernels.layers.rms_norm import rms_norm, rms_norm_of_sum
from batchgen.kernels.layers.shared_part import SharedPart


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last axis (Zhang & Sennrich 2019).

    Args:
        zero_centred: whether checkpoints hold the weight minus 1. The parameter is then the weight
            itself in float32, because 1 + w would lose digits in a narrower dtype, and the product
            with it is computed in float32.
        in_float: whether the weight and the product with it are float32.
        order: the order of the layer's values, as indices into a checkpoint's; None if equal.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        where: Placement,
        zero_centred: bool = False,
        in_float: bool = False,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._shift, self._order = int(zero_centred), order
        self._form: FP8Format | None = None
        self._keeps = False
        self.weight = empty_parameter(
            size,
            device=where.device,
            dtype=torch.float32 if zero_centred or in_float else where.dtype,
        )

    def forward(self, x: Tensor) -> Tensor | FP8Rows | RoundedRows:
        """Normalise x [..., size]. Returns the result in x's dtype, in FP8, or in both
        (`quantise_result`)."""
        if self._form is None:
            return rms_norm(x, self.weight, self.eps)
        return self._quantised(x, self._form.powers_of_two)

    def _quantised(
        self,
        x: Tensor,
        powers_of_two: bool,
        parts: Tensor | None = None,
        shared: SharedPart | None = None,
    ) -> FP8Rows | RoundedRows:
        run = rms_norm_both if self._keeps else rms_norm_quantised
        return run(
            x, self.weight, self.eps, powers_of_two=powers_of_two, parts=parts, shared=shared
        )

    def of_stream(self, stream: Stream) -> tuple[Any, Tensor]:
        """Return the norm of a residual stream [T, size], and the stream with its pending sums
        added."""
        if isinstance(stream, Tensor):
            return self(stream), stream
        if isinstance(stream, PendingNorm):
            (result,), x = norms_of_stream([self], stream)
            return result, x
        if isinstance(stream, PendingParts):
            x, (parts, shared) = stream.rows, stream.take()
            if self._form is None:
                return rms_norm_of_sum(x, parts, shared, self.weight, self.eps), x
            return self._quantised(x, self._form.powers_of_two, parts, shared), x
        normed, x = stream.normed(self.weight, self.eps)
        if self._form is None:
            return normed, x
        rows = quantise_rows(normed, powers_of_two=self._form.powers_of_two)
        return RoundedRows(normed, rows) if self._keeps else rows, x

    def add_to(self, residual: Tensor, stream: Stream, scalar: Tensor | None = None) -> PendingNorm:
        """Add the norm of a part's result [T, size] to `residual` in place and multiply the sum by
        `scalar` [1], both when the returned stream is read."""
        if not isinstance(stream, PendingNorm):
            return PendingNorm(residual, [self.term(stream)], self.eps, scalar=scalar)
        assert self._form is None and stream.eps == self.eps
        return PendingNorm(residual, stream.take(), self.eps, weight=self.weight, scalar=scalar)

    def term(self, stream: Tensor | PendingSum | PendingParts) -> Term:
        """Return the norm of a part's result [T, size] as a term of `add_post_norm`. A sum over
        ranks is computed at once."""
        assert self._form is None
        if isinstance(stream, Tensor):
            return Term(stream, self.weight)
        if isinstance(stream, PendingParts):
            x = stream.residual if isinstance(stream.residual, Tensor) else None
            return Term(x, self.weight, *stream.take())
        return Term(stream.normed(self.weight, self.eps)[0], None)

    @property
    def is_plain(self) -> bool:
        """Whether results are in the dtype of the stream, and not in FP8."""
        return self._form is None

    def quantise_result(self, form: FP8Format | None, *, keep: bool = False) -> None:
        """Let `forward` return results [T, size] in FP8; with `keep`, as `RoundedRows` (in both
        forms); with None, in their dtype again."""
        self._form, self._keeps = form, keep

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight, which is 1 in a model without a checkpoint."""
        name = f"{path}.weight"
        if not self._shift and self._order is None:
            yield WeightSlot.plain(name, self.weight, dummy=1.0)
        else:
            yield WeightSlot(self.weight, (name,), (name,), lambda w: self._own(w[name]), dummy=1.0)

    def _own(self, weight: Tensor) -> Tensor:
        """Convert a checkpoint's weight to the parameter's values. Other shapes are returned as
        they are, because the loader refuses them."""
        if weight.shape != self.weight.shape:
            return weight
        ordered = weight if self._order is None else weight[self._order]
        return ordered.to(self.weight.dtype) + self._shift


def norms_of_stream(norms: Sequence[RMSNorm], stream: Stream) -> tuple[list[Any], Tensor]:
    """Return several norms of a residual stream [T, size], each as `RMSNorm.of_stream`, and the
    stream."""
    joined: list[RMSNorm] = []
    if isinstance(stream, PendingNorm):
        eps = stream.eps
        joined = [norm for norm in norms if norm.is_plain and norm.eps == eps][:MOST_READERS]
        whole, results = stream.finish([norm.weight for norm in joined])
    else:
        whole, results = summed(stream), []
    of_joined = iter(results)
    return [next(of_joined) if norm in joined else norm(whole) for norm in norms], whole


class CentredNorm(RMSNorm):
    """An RMSNorm of x - mean(x): LayerNorm without a bias (Ba et al. 2016), computed in float32.
    Its results are never FP8, and pending sums are added before it."""

    def __init__(self, size: int, eps: float, *, where: Placement) -> None:
        super().__init__(size, eps, in_float=True, where=where)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size], in its dtype."""
        return rms_norm(x, self.weight, self.eps, centred=True)

    def of_stream(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the norm of a residual stream [T, size], and the stream with its pending sums
        added."""
        x = summed(stream)
        return self(x), x
