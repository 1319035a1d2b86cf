"""How the matrix products of a model's linear layers are computed on this CPU.

Several ways give a row the same bits in every batch or do not, and their speed depends on the shape
of the weight and on the machine. So they are tried once for each shape when a model is loaded
(`models/packing.py`), and the layers then compute as was chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.layers.cpu_product import CPUProduct, choose_product, few_keep_bits


class CPUProducts:
    """Chooses how the linear layers of a model compute on this CPU, once for each weight shape."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[torch.Size, torch.dtype, bool], CPUProduct] = {}
        self._few: dict[tuple[torch.Size, torch.dtype], bool] = {}

    def choose(self, weight: Tensor, bias: Tensor | None) -> CPUProduct:
        """Return how products with this weight [N, K] and bias [N] are computed, once tried out."""
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
        """The weights whose rows' bits depend on the batch anyhow, as `1024×3072 in float32`."""
        return [
            f"{k}×{n} in {str(dtype).removeprefix('torch.')}"
            for ((n, k), dtype, _), product in self._chosen.items()
            if product.most_rows is None
        ]
