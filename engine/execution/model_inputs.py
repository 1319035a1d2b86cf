"""The inputs of one forward: tokens, their positions, and where their rows keep keys, values and
states.

`prefill_inputs` and the strategies' `StepInputs` make `ModelInputs` from the scheduler's batches.
`ModelRunner` passes them to the layers. Models with recurrent layers keep a *state* of each row in
a *state slot*; a *snapshot* is a copy of a state for the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.batched import Batched, row, token

SNAPSHOTS = 2
"""The most snapshots of its state that one row can leave in one prefill."""


@dataclass(frozen=True)
class ModelInputs(Batched):
    """The T tokens of B rows in one forward, row after row."""

    input_ids: Tensor = token()  # [T] int64, the tokens
    positions: Tensor = token()  # [T] int64, the absolute position of each token in its row
    # [B, N] int64, the blocks of each row in the paged cache, in order. Unused entries are 0, the
    # scratch block that no row owns.
    block_tables: Tensor = row()
    # [B] int64 on the host, the number of tokens of each row in this forward.
    query_lens: npt.NDArray[np.int64] = row()
    # [B] int64 on the host, the number of tokens of each row in the paged cache after this forward,
    # or an upper bound. A bound is enough, because attention masks by position.
    context_lens: npt.NDArray[np.int64] = row()
    # [B] int64, the state slot of each row; 0 is scratch. None for a model without recurrent
    # layers.
    state_slots: Tensor | None = row(optional=True)
    # [B, SNAPSHOTS, 2] int64, the snapshots that a prefill takes: after how many of the row's
    # tokens in this forward, and the state slot to write to. Unused entries are 0. None without
    # snapshots, as in every decode step.
    snapshots: Tensor | None = row(optional=True)
    # [B] int64 on the host, how many of each row's last tokens are computed with the rounding of
    # decode steps, and how many such tokens earlier prefills of the row have read; None if there
    # are none.
    replayed: npt.NDArray[np.int64] | None = row(optional=True)
    replayed_before: npt.NDArray[np.int64] | None = row(optional=True)
    # [T, hidden_size], the target's hidden states that an MTP head reads; None for other models.
    hidden: Tensor | None = token(optional=True)
    # [B] int64, what is added to the positions of a decoding row's tokens, which follow all images,
    # to get their rotary positions. None in prefills, and for models without separate rotary
    # positions (`turns_apart`).
    rope_shifts: Tensor | None = row(optional=True)
    # [T, 3] int64, the rotary positions of a prefill's tokens by time, image row and image column,
    # or [T]. None if they equal the tokens' positions.
    rope_positions: Tensor | None = token(optional=True)
    # [T] int64, the position of the last token that each token of a prefill attends to, in layers
    # in which the tokens of an image attend to each other; None if that is each token itself.
    last_seen: Tensor | None = token(optional=True)
    # [B, N] int64, like `block_tables` for layers with a window. Entries of blocks to which no
    # token of this forward attends are arbitrary. None for a model without such layers.
    window_tables: Tensor | None = row(optional=True)
    # [B] int64, the adapter slot of each row; 0: no adapter. None for a model without adapters.
    lora_slots: Tensor | None = row(optional=True)

    @property
    def lora_slots_of_tokens(self) -> Tensor | None:
        """The adapter slot of each token [T]. All rows must have the same number of tokens."""
        if self.lora_slots is None:
            return None
        return self.lora_slots.repeat_interleave(len(self.input_ids) // self.num_rows)

    @property
    def rotary_positions(self) -> Tensor:
        """The rotary positions of the tokens, [T] or [T, 3]."""
        if self.rope_positions is not None:
            return self.rope_positions
        if self.rope_shifts is None:
            return self.positions
        wide = self.positions.view(self.num_rows, -1) + self.rope_shifts.unsqueeze(1)
        return wide.flatten()

    @classmethod
    def on_scratch(
        cls,
        query_lens: npt.NDArray[np.int64],
        num_blocks: int,
        device: torch.device,
        *,
        states: bool = False,
        snapshots: bool = False,
        replayed: bool = False,
        hidden: Tensor | None = None,
        rope_shifts: bool = False,
        rope_positions: Tensor | None = None,
        last_seen: bool = False,
        windows: bool = False,
        lora: bool = False,
    ) -> ModelInputs:
        """Make rows that own only the scratch block and the scratch state slot.

        All tokens have position 0 in the scratch block, so they change nothing of other rows.

        Args:
            query_lens: [B], the number of tokens of each row.
            num_blocks: N, the width of the block tables.
            states: whether the rows have state slots.
            snapshots: whether the rows have entries for snapshots.
            replayed: whether the rows have numbers of replayed tokens, which are 0.
            hidden: a tensor [N, hidden_size] with the size and dtype of the rows' hidden states,
                which are zeros; None for no hidden states.
            rope_shifts: whether the rows have rotary shifts, which are 0.
            rope_positions: a tensor with the axes of the tokens' rotary positions; None for no
                separate rotary positions.
            last_seen: whether the tokens have `last_seen`.
            windows: whether the rows have tables for layers with a window.
            lora: whether the rows have adapter slots.
        """
        rows = len(query_lens)
        tokens = torch.zeros(int(query_lens.sum()), dtype=torch.int64, device=device)
        tables = torch.zeros((rows, num_blocks), dtype=torch.int64, device=device)
        return cls(
            tokens,
            tokens.clone(),
            tables,
            query_lens,
            np.ones_like(query_lens),
            tokens.new_zeros(rows) if states else None,
            tokens.new_zeros((rows, SNAPSHOTS, 2)) if snapshots else None,
            np.zeros_like(query_lens) if replayed else None,
            np.zeros_like(query_lens) if replayed else None,
            None if hidden is None else hidden.new_zeros((len(tokens), hidden.shape[1])),
            tokens.new_zeros(rows) if rope_shifts else None,
            None
            if rope_positions is None
            else tokens.new_zeros((len(tokens), *rope_positions.shape[1:])),
            last_seen=tokens.clone() if last_seen else None,
            window_tables=tables.clone() if windows else None,
            lora_slots=tokens.new_zeros(rows) if lora else None,
        )

    def pad_tokens(self, multiple: int, concurrent_tokens: int = 0) -> ModelInputs:
        """Pad the tokens with a row on scratch, so that T + `concurrent_tokens` becomes a multiple
        of `multiple`."""
        missing = -(len(self.input_ids) + concurrent_tokens) % multiple
        if not missing:
            return self
        padding = ModelInputs.on_scratch(
            np.array([missing]),
            1,
            self.input_ids.device,
            states=self.state_slots is not None,
            snapshots=self.snapshots is not None,
            replayed=self.replayed is not None,
            hidden=self.hidden,
            rope_shifts=self.rope_shifts is not None,
            rope_positions=self.rope_positions,
            last_seen=self.last_seen is not None,
            windows=self.window_tables is not None,
            lora=self.lora_slots is not None,
        )
        return ModelInputs.concat([self, padding])
