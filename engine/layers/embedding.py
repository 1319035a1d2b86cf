"""The embedding of token ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import empty_parameter
from batchgen.kernels.layers.embedding import embedding


class Embedding(nn.Module):
    """A table that holds a vector of hidden_size values for each token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up the vectors [T, hidden_size] of token ids [T] int64."""
        return embedding(input_ids, self.weight)
