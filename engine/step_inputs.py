"""The state of the decoding rows between steps, with the operations that all strategies share.

Each strategy derives its own `StepInputs` from the class here. `StepLauncher` calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.device.batched import Batched, row
from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.sampling_inputs import SamplingInputs


@dataclass(frozen=True)
class JoiningRows(Batched):
    """B rows whose prefill is complete. They decode from the next step on."""

    # The host's rows, without the token that the prefill may have yielded.
    seqs: tuple[Sequence, ...] = row()
    # [B, N] int64, the rows' blocks of the paged cache; unused entries are 0.
    block_tables: Tensor = row()
    # [B] on the host, the number of tokens of each row that the target has read.
    context_lens: npt.NDArray[np.int64] = row()
    # The sampler's inputs for the rows, before the prefill's token is added.
    sampling: SamplingInputs = row()
    # [B] int64, the rows' state slots; None for models without recurrent layers.
    state_slots: Tensor | None = row(optional=True)
    # [B] int64, `ModelInputs.rope_shifts`; None for models that read no images.
    rope_shifts: Tensor | None = row(optional=True)
    # [B, N] int64, the rows' blocks of layers with a sliding window; None for models without such
    # layers.
    window_tables: Tensor | None = row(optional=True)
    # [B] int64, the rows' adapter slots; None for models without adapters.
    lora_slots: Tensor | None = row(optional=True)

    @cached_property
    def guide(self) -> Guide | None:
        """Makes the token masks of the constrained rows; None if no row is constrained."""
        return Guide.of(self.seqs)


class StepInputs(ABC):
    """All state that a strategy keeps between steps, on the device.

    After a prefill, `merge_prefill` adds the rows whose prompts were read to their end. In a decode
    step, `reindex` drops the rows that left, the forward reads `model_inputs`, and `step_decode`
    advances each row by its new tokens. The rows are ordered: first those of the last decode batch,
    then those that have joined since.

    Nothing here waits for the device. The tokens of a step become the inputs of the next step
    before the host has seen them.
    """

    def __init__(self) -> None:
        self._newest: ModelInputs | None = None
        self._sampling: SamplingInputs | None = None

    @property
    def newest(self) -> ModelInputs:
        """The B rows as model inputs with one token each: the row's newest token."""
        assert self._newest is not None, "no row was prefilled yet"
        return self._newest

    @property
    def model_inputs(self) -> ModelInputs:
        """The inputs of the next decode forward; by default the newest token of each row."""
        return self.newest

    @property
    def state_slots(self) -> Tensor | None:
        """[B] int64, the state slot of each row; None for models without recurrent layers."""
        return self.newest.state_slots

    @property
    def sampling(self) -> SamplingInputs:
        """The sampler's inputs for the rows."""
        assert self._sampling is not None, "no row was prefilled yet"
        return self._sampling

    @abstractmethod
    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        """Append B rows whose prefill is complete.

        Args:
            newest: [B] int64, each row's newest token: the one that the prefill yielded, or else
                the last known one.
        """

    @abstractmethod
    def step_decode(self, step: StepOutput) -> None:
        """Advance all rows by the tokens that a decode step produced for them."""

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        """Drop all rows except those at the indices `keep`, which ascend."""
        if len(keep):
            self._newest = self.newest.index_select(keep)
            self._sampling = self.sampling.index_select(keep)
        else:
            self._newest = self._sampling = None

    def reindex(self, batch: DecodeBatch) -> None:
        """Reduce the rows to those of the batch, and write newly reserved blocks into the block
        tables."""
        if batch.keep is not None:
            self.keep_rows(batch.keep)
        newest = replace(self.newest, context_lens=batch.context_lens)
        if batch.new_blocks:
            tables = _with_blocks(newest.block_tables, batch.new_blocks)
            newest = replace(newest, block_tables=tables)
        if batch.new_window_blocks:
            assert newest.window_tables is not None
            tables = _with_blocks(newest.window_tables, batch.new_window_blocks)
            newest = replace(newest, window_tables=tables)
        self._newest = newest

    def _add_rows(self, rows: JoiningRows, newest: Tensor) -> None:
        """Append B rows whose next forward begins with their newest token [B], and append that
        token to the sampler's history."""
        positions = upload(rows.context_lens, torch.int64, newest.device)
        inputs = ModelInputs(
            input_ids=newest,
            positions=positions,
            block_tables=rows.block_tables,
            query_lens=np.ones_like(rows.context_lens),
            context_lens=rows.context_lens + 1,
            state_slots=rows.state_slots,
            rope_shifts=rows.rope_shifts,
            window_tables=rows.window_tables,
            lora_slots=rows.lora_slots,
        )
        sampling = rows.sampling.append(
            newest.unsqueeze(1), torch.ones_like(newest, dtype=torch.int32), positions
        )
        if self._newest is None or self._sampling is None:
            self._newest, self._sampling = inputs, sampling
        else:
            self._newest = ModelInputs.concat([self._newest, inputs])
            self._sampling = SamplingInputs.concat([self._sampling, sampling])


def _with_blocks(tables: Tensor, new: abc.Sequence[tuple[int, int, int]]) -> Tensor:
    """Write the entries `DecodeBatch.new_blocks` into block tables [B, N]. Returns the tables,
    widened if an entry lies outside."""
    entries = np.array(new, np.int64)
    width = 1 + int(entries[:, 1].max())
    if width > tables.shape[1]:
        # The width is doubled so that tables are rarely copied. Unused entries are 0, the scratch
        # block.
        tables = F.pad(tables, (0, 2 * width - tables.shape[1]))  # on the right
    rows, columns, blocks = upload(entries, torch.int64, tables.device).unbind(1)
    tables[rows, columns] = blocks
    return tables
