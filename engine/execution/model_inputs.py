"""What one forward reads: tokens, where they stand, and where their rows' KV lives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.execution.batched import Batched, row, token


@dataclass(frozen=True)
class ModelInputs(Batched):
    """The tokens of B rows, one row after another, T in all.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, absolute position of each token in its row.
        block_tables: [B, N] int64, the row's KV blocks in order; unused entries are block 0, the
            scratch block that no row owns.
        query_lens: [B] int64 on the host, tokens of each row in this forward.
        context_lens: [B] int64 on the host, tokens of each row in the KV cache after this forward,
            or a bound above that: attention masks by position.
    """

    input_ids: Tensor = token()
    positions: Tensor = token()
    block_tables: Tensor = row()
    query_lens: npt.NDArray[np.int64] = row()
    context_lens: npt.NDArray[np.int64] = row()

    @classmethod
    def on_scratch(
        cls, query_lens: npt.NDArray[np.int64], num_blocks: int, device: torch.device
    ) -> ModelInputs:
        """Rows of so many tokens that own the scratch block only, with tables of num_blocks.

        All tokens stand at position 0, so they read and write nothing of any row.
        """
        tokens = torch.zeros(int(query_lens.sum()), dtype=torch.int64, device=device)
        tables = torch.zeros((len(query_lens), num_blocks), dtype=torch.int64, device=device)
        return cls(tokens, tokens.clone(), tables, query_lens, np.ones_like(query_lens))

    def pad_tokens(self, multiple: int, beside: int = 0) -> ModelInputs:
        """With one more row, on the scratch block, if T with the tokens beside is no multiple."""
        missing = -(len(self.input_ids) + beside) % multiple
        if not missing:
            return self
        padding = ModelInputs.on_scratch(np.array([missing]), 1, self.input_ids.device)
        return ModelInputs.concat([self, padding])
