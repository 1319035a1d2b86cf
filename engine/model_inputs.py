"""What one forward reads: tokens, where they stand, and where their rows' KV lives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
        query_lens: [B] int64 on the host, tokens of each row in this forward.
        context_lens: [B] int64 on the host, tokens of each row in the KV cache after this forward,
            or a bound above that: attention masks by position.
    """

    input_ids: Tensor = token()
    positions: Tensor = token()
    block_tables: Tensor = row()
    query_lens: npt.NDArray[np.int64] = row()
    context_lens: npt.NDArray[np.int64] = row()

    def pad_tokens(self, multiple: int, beside: int = 0) -> ModelInputs:
        """With one more row of dummy tokens if T, and the tokens beside it, are not a multiple; it
        owns the scratch block only.

        Its tokens all stand at position 0, so they read and write nothing of any row.
        """
        missing = -(len(self.input_ids) + beside) % multiple
        if not missing:
            return self
        zeros = torch.zeros(missing, dtype=torch.int64, device=self.input_ids.device)
        padding = ModelInputs(zeros, zeros, zeros[:1, None], np.array([missing]), np.array([1]))
        return ModelInputs.concat([self, padding])
