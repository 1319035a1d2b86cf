"""The states of rows on the device, for models with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.cache.specs import StateSpec, zeros


class StateCache(NamedTuple):
    """What one recurrent layer keeps, by state slot. Slot 0 is scratch, for rows that pad a batch.

    Attributes:
        state: maps the name of each part of the state to [S, *shape], its value in all S slots.
        records: maps the name of each record to [2, R, W, *shape]: what the W tokens of a decode
            step do to the state. Only the first R slots, which rows can have, keep records. A step
            reads one of the two halves and writes the other.
        folds: [R] int32, the number of records of each slot that the next decode step folds.
        half: [R] int32, the half that holds those records.
    """

    state: Mapping[str, Tensor]
    records: Mapping[str, Tensor]
    folds: Tensor
    half: Tensor


class RowStates:
    """The states of all rows of one model, over all its layers, by state slot.

    One slot's state is contiguous over all layers, so one operation copies it. The number of
    records that the next step folds stays on the device, because the host learns how many tokens
    were accepted only after it has launched the next step.

    Args:
        specs: what the recurrent layers keep, in the order of the layers.
        num_rows: the number of slots for rows, without the scratch slot.
        num_checkpoints: the number of slots behind those, which hold states for the prefix cache.
        width: the most tokens of one row in a decode step.
        device: the model's device.

    Attributes:
        layers: what each recurrent layer keeps, in the order of `specs`.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_rows: int,
        num_checkpoints: int,
        width: int,
        device: torch.device,
    ) -> None:
        size = sum(spec.state_bytes for spec in specs)
        self._pool = zeros((1 + num_rows + num_checkpoints, size), torch.uint8, device)
        self._folds = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self._half = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self.layers: list[StateCache] = []
        start = 0
        for spec in specs:
            records = {
                name: torch.zeros(
                    (2, 1 + num_rows, width, *tensor.shape), dtype=tensor.dtype, device=device
                )
                for name, tensor in spec.records.items()
            }
            state = spec.views(self._pool, start)
            self.layers.append(StateCache(state, records, self._folds, self._half))
            start += spec.state_bytes

    def begin(self, slots: Tensor) -> None:
        """Drop the records of these slots [B] int64, whose rows are prefilled next."""
        self._folds.index_fill_(0, slots, 0)

    def advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        """Let the next decode step fold the tokens that were accepted in the step just decided.

        Args:
            slots: [B] int64, the state slots of the step's rows.
            num_tokens: [B], the number of tokens that the step produced for each row. It equals the
                number of tokens the step read that stay: the newest token and the accepted drafts.
        """
        self._folds.index_copy_(0, slots, num_tokens.int())
        self._half.index_copy_(0, slots, 1 - self._half[slots])

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy whole states between slots, for all layers at once.

        Args:
            sources: [N], the slots to copy from.
            targets: [N], the slots to copy to. None of them may be among the sources.
        """
        # One by one, because an indexed copy of all would need as much memory again.
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._pool[target].copy_(self._pool[source])
