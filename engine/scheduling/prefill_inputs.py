"""Makes the tensors that a prefill's forward reads from the batch that the scheduler has planned.

`StepLauncher` calls `prefill_inputs` for each step with a prefill. It and `StateReader` also use
the functions that upload block tables and slots.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import SNAPSHOTS, ModelInputs
from batchgen.engine.execution.model_runner import PrefillInputs
from batchgen.engine.rows.scheduled_batch import PrefillBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.vision.image_span import last_seen, rope_positions


def prefill_inputs(
    batch: PrefillBatch,
    device: torch.device,
    states: bool,
    all_hidden: bool,
    windows: bool,
    lora: bool,
    steps_from: Callable[[Sequence], int] | None,
) -> PrefillInputs | None:
    """Make the inputs of a scheduled prefill's forward.

    Rows whose tokens are all in the prefix cache are left out. Returns None if no row has tokens to
    compute.

    Args:
        states: whether the model has recurrent layers.
        all_hidden: whether the strategy needs the hidden states of all tokens. They are also
            returned if some row is scored or pooled.
        windows: whether the models have layers with a sliding window.
        lora: whether the model has adapters.
        steps_from: returns how many of a row's first tokens a prefill computes in its own way; the
            tokens after them are computed as in decode steps. None: a prefill computes all tokens
            in its own way.
    """
    nonempty = np.flatnonzero(batch.lengths)
    if not len(nonempty):
        return None
    seqs = [batch.seqs[i] for i in nonempty]
    lengths = np.array(batch.lengths, np.int64)[nonempty]
    starts = np.array(batch.starts, np.int64)[nonempty]
    ends = starts + lengths
    input_ids: list[int] = []
    for seq, start, end in zip(seqs, starts.tolist(), ends.tolist(), strict=True):
        input_ids += seq.token_ids[start:end]
    # Positions count up within a row: the repeated term moves each row's count to its own start.
    positions = np.arange(len(input_ids)) + np.repeat(ends - lengths.cumsum(), lengths)
    inputs = ModelInputs(
        upload(input_ids, torch.int64, device),
        upload(positions, torch.int64, device),
        upload(block_tables(seqs), torch.int64, device),
        lengths,
        ends,
        state_slots(seqs, device) if states else None,
        _snapshots(batch, nonempty, device) if batch.snapshots else None,
        *_replayed(seqs, starts, ends, steps_from),
        rope_positions=_rope_positions(seqs, starts.tolist(), ends.tolist(), device),
        window_tables=upload(window_tables(seqs), torch.int64, device) if windows else None,
        last_seen=_last_seen(seqs, starts.tolist(), ends.tolist(), device),
        lora_slots=lora_slots(seqs, device) if lora else None,
    )
    yielding = [i for i in batch.completing if batch.seqs[i].prefill_yields]
    rows = np.searchsorted(nonempty, np.array(yielding, np.int64)).astype(np.int64)
    return PrefillInputs(inputs, rows, all_hidden or bool(batch.state_rows))


def _snapshots(batch: PrefillBatch, rows: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Make `ModelInputs.snapshots` [B, SNAPSHOTS, 2] for the B rows of the batch at the indices
    `rows`."""
    table = np.zeros((len(batch.seqs), SNAPSHOTS, 2), np.int64)
    used = np.zeros(len(batch.seqs), np.int64)
    for row, length, state_slot in batch.snapshots:
        table[row, used[row]] = length, state_slot
        used[row] += 1
    return upload(table[rows], torch.int64, device)


def _replayed(
    seqs: abc.Sequence[Sequence],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    steps_from: Callable[[Sequence], int] | None,
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """Make `ModelInputs.replayed` and `replayed_before`, [B] each, for rows that read their tokens
    from `starts` to `ends` [B]."""
    if steps_from is None:
        return None, None
    first = np.array([steps_from(seq) for seq in seqs], np.int64)
    counts: npt.NDArray[np.int64] = np.maximum(ends - np.maximum(starts, first), 0)
    if not counts.any():
        return None, None
    return counts, np.maximum(starts - first, 0)


def state_slots(seqs: abc.Sequence[Sequence], device: torch.device) -> Tensor:
    """Upload the rows' state slots, [B] int64."""
    return upload([seq.state_slot for seq in seqs], torch.int64, device)


def lora_slots(seqs: abc.Sequence[Sequence], device: torch.device) -> Tensor:
    """Upload the rows' adapter slots, [B] int64."""
    return upload([seq.lora_slot for seq in seqs], torch.int64, device)


def rope_shifts(seqs: abc.Sequence[Sequence], device: torch.device) -> Tensor:
    """Upload the rows' `ModelInputs.rope_shifts`, [B] int64."""
    return upload([seq.rope_shift for seq in seqs], torch.int64, device)


def _rope_positions(
    seqs: abc.Sequence[Sequence], starts: list[int], ends: list[int], device: torch.device
) -> Tensor | None:
    """Make `ModelInputs.rope_positions` of rows that read the tokens from `starts` to `ends`."""
    # All images of a model have axes, or none has.
    has_axes = any(span.has_axes for seq in seqs for span in seq.spans[:1])
    if not has_axes and not any(seq.rope_offset for seq in seqs):
        return None
    if not has_axes:
        ranges = zip(seqs, starts, ends, strict=True)
        parts = [np.arange(start, end) + seq.rope_offset for seq, start, end in ranges]
        return upload(np.concatenate(parts), torch.int64, device)
    rows = zip(seqs, starts, ends, strict=True)
    parts = [rope_positions(seq.spans, start, end) for seq, start, end in rows]
    return upload(np.concatenate(parts), torch.int64, device)


def _last_seen(
    seqs: abc.Sequence[Sequence], starts: list[int], ends: list[int], device: torch.device
) -> Tensor | None:
    """Make `ModelInputs.last_seen` of rows that read the tokens from `starts` to `ends`."""
    rows = list(zip(seqs, starts, ends, strict=True))
    if not any(run.start < end and start < run.end for seq, start, end in rows for run in seq.runs):
        return None
    parts = [last_seen(seq.runs, start, end) for seq, start, end in rows]
    return upload(np.concatenate(parts), torch.int64, device)


def block_tables(seqs: abc.Sequence[Sequence]) -> npt.NDArray[np.int64]:
    """Return the rows' block tables [B, N] on the host; unused entries are 0, the scratch block."""
    return _zero_padded([seq.block_table for seq in seqs])


def window_tables(seqs: abc.Sequence[Sequence]) -> npt.NDArray[np.int64]:
    """Return the rows' block tables [B, N] of layers with a sliding window, on the host. Entries
    are 0 where unused, and for blocks that the window has passed."""
    return _zero_padded([seq.window_table for seq in seqs])


def _zero_padded(rows: abc.Sequence[list[int]]) -> npt.NDArray[np.int64]:
    """Return lists as the rows of an array, padded with zeros."""
    tables = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables
