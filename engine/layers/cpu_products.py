"""Chooses how the matrix products of a model's linear layers are computed on this CPU.

There are several methods. Whether a method gives a row the same bits in every batch, and how fast
it is, depends on the shape of the weight and on the machine. So they are tried once for each shape
when a model is loaded (`models/packing.py`), and the layers then use the chosen one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.layers.cpu_product import CPUProduct, choose_product, few_keep_bits


class CPUProducts:
    """Chooses the method for the linear layers of a model on this CPU, once for each weight
    shape."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[torch.Size, torch.dtype, bool], CPUProduct] = {}
        self._few_keep_bits: dict[tuple[torch.Size, torch.dtype], bool] = {}

    def choose(self, weight: Tensor, bias: Tensor | None) -> CPUProduct:
        """Return the method for products with this weight [N, K] and bias [N], tried out on first
        use."""
        key = (weight.shape, weight.dtype, bias is not None)
        if key not in self._chosen:
            self._chosen[key] = choose_product(weight, bias)
        return self._chosen[key]

    def takes_few(self, weight: Tensor) -> bool:
        """Return whether `linear` can multiply few rows by this weight [N, K], without bias, and
        without padding them to more rows."""
        key = (weight.shape, weight.dtype)
        if key not in self._few_keep_bits:
            self._few_keep_bits[key] = few_keep_bits(weight, self.choose(weight, None))
        return self._few_keep_bits[key]

    @property
    def unsteady(self) -> list[str]:
        """The weights for which no method keeps a row's bits in every batch, such as `1024×3072 in
        float32`."""
        return [
            f"{k}×{n} in {str(dtype).removeprefix('torch.')}"
            for ((n, k), dtype, _), product in self._chosen.items()
            if product.most_rows is None  # no number of rows at once keeps the bits
        ]
