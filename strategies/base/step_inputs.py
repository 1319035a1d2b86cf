"""The state of the decoding rows between steps, and what every paradigm does alike with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.transfer import upload
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch
from batchgen.engine.strategy import JoiningRows


class StepInputs(ABC):
    """All state of a paradigm that lives between steps, on the device.

    Prefill: forward → `merge_prefill`. Decode: `reindex` → forward → `step_decode`. Its rows are
    those of the last decode batch, then those prefilled since, in order. Nothing here waits for the
    device: a step's tokens become the next one's inputs without the host having seen them.
    """

    def __init__(self) -> None:
        self._newest: ModelInputs | None = None
        self._sampling: SamplingInputs | None = None

    @property
    def newest(self) -> ModelInputs:
        """The rows with the newest token of each."""
        assert self._newest is not None, "no row was prefilled yet"
        return self._newest

    @property
    def model_inputs(self) -> ModelInputs:
        """What the next decode forward reads."""
        return self.newest

    @property
    def sampling(self) -> SamplingInputs:
        assert self._sampling is not None, "no row was prefilled yet"
        return self._sampling

    @abstractmethod
    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        """Add rows whose prefill is complete.

        Args:
            newest: [B] int64, the token that each goes on from.
        """

    @abstractmethod
    def step_decode(self, step: StepOutput) -> None:
        """Advance all rows by the tokens that they produced."""

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        """Drop all rows but these, which are in order."""
        if len(keep):
            self._newest = self.newest.index_select(keep)
            self._sampling = self.sampling.index_select(keep)
        else:
            self._newest = self._sampling = None

    def reindex(self, batch: DecodeBatch) -> None:
        """Drop the rows that left and extend the block tables of those that stay."""
        if batch.keep is not None:
            self.keep_rows(batch.keep)
        self._newest = replace(self.newest, context_lens=batch.context_lens)
        if batch.new_blocks:
            tables = self.newest.block_tables
            new = np.array(batch.new_blocks, np.int64)
            width = 1 + int(new[:, 1].max())
            if width > tables.shape[1]:
                # Doubled, so that the copy is rare; entries not in use name the scratch block.
                tables = F.pad(tables, (0, 2 * width - tables.shape[1]))
            rows, columns, blocks = upload(new, torch.int64, tables.device).unbind(1)
            tables[rows, columns] = blocks
            self._newest = replace(self.newest, block_tables=tables)

    def _add_rows(self, rows: JoiningRows, newest: Tensor) -> None:
        """Rows whose next forward begins with their newest token."""
        positions = upload(rows.context_lens, torch.int64, newest.device)
        inputs = ModelInputs(
            input_ids=newest,
            positions=positions,
            block_tables=rows.block_tables,
            query_lens=np.ones_like(rows.context_lens),
            context_lens=rows.context_lens + 1,
        )
        sampling = rows.sampling.append(
            newest.unsqueeze(1), torch.ones_like(newest, dtype=torch.int32), positions
        )
        if self._newest is None or self._sampling is None:
            self._newest, self._sampling = inputs, sampling
        else:
            self._newest = ModelInputs.concat([self._newest, inputs])
            self._sampling = SamplingInputs.concat([self._sampling, sampling])
