"""What one forward reads: tokens, where they stand, and where their rows' KV lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.batched import Batched, row, token


@dataclass(frozen=True)
class ModelInputs(Batched):
    """The tokens of B rows, one row after another, T in all.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, absolute position of each token in its row.
        block_tables: [B, N] int64, the row's KV blocks in order; unused entries are block 0, the
            scratch block that no row owns.
        query_lens: B host ints, tokens of each row in this forward.
        context_lens: B host ints, tokens of each row in the KV cache after this forward, or a
            bound above that: attention masks by position.
    """

    input_ids: Tensor = token()
    positions: Tensor = token()
    block_tables: Tensor = row()
    query_lens: tuple[int, ...] = row()
    context_lens: tuple[int, ...] = row()

    def pad_tokens(self, multiple: int) -> ModelInputs:
        """With one more row of dummy tokens if T is not a multiple; it owns the scratch block only.

        Its tokens all stand at position 0, so they read and write nothing of any row.
        """
        missing = -len(self.input_ids) % multiple
        if not missing:
            return self
        zeros = torch.zeros(missing, dtype=torch.int64, device=self.input_ids.device)
        return ModelInputs.concat(
            [self, ModelInputs(zeros, zeros, zeros[:1, None], (missing,), (1,))]
        )

    def slots(self, block_size: int) -> Tensor:
        """[T] int64, index of each token's place in the KV cache: block · block_size + offset."""
        device = self.positions.device
        rows = torch.repeat_interleave(
            torch.arange(self.num_rows, device=device),
            torch.tensor(self.query_lens, device=device),
            output_size=len(self.positions),
        )
        blocks = self.block_tables[rows, self.positions // block_size]
        return blocks * block_size + self.positions % block_size
