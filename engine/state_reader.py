"""Computes results from a prefill's hidden states for rows that generate no tokens: the scores of
the answer's tokens, and pooled values such as embeddings.

`StepLauncher` calls `StateReader.read` after each prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.interface.hidden_columns import CLASS_SCORES, EMBEDDING
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.scheduled_batch import PrefillBatch, StateBatch, StateRow
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampler import score_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.scheduling.prefill_inputs import lora_slots


class StateReader:
    """Scores answers' tokens and pools hidden states, both from the hidden states of a prefill.

    It works in parts of `limit` hidden states, so that the memory for their logits is bounded.

    Args:
        runner: the runner of the target.
        limit: the most hidden states in a part.
    """

    def __init__(self, runner: ModelRunner, limit: int) -> None:
        self._runner, self._limit = runner, limit

    def read(
        self, batch: PrefillBatch, output: ModelOutput | None
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Yield the results of a prefill's rows that generate no tokens, part by part. Must be
        called before the next forward.

        Args:
            output: the output of the prefill's forward. It has the hidden states of all tokens if
                any row of the batch needs them.
        """
        for scores_answers in (True, False):
            rows = [
                row
                for row in batch.state_rows
                if bool(batch.seqs[row.row].num_answer_tokens) is scores_answers
            ]
            if rows:
                assert output is not None and output.hidden is not None
                compute = self._scored if scores_answers else self._pooled
                yield from compute(batch, rows, output.hidden)

    def _scored(
        self, batch: PrefillBatch, rows: list[StateRow], hidden: Tensor
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Yield the scores of the answers' tokens. Each token is scored by the hidden state of the
        token before it."""
        # Each of `rows` is a range of tokens; its `row` is the index of their row in the batch.
        seqs, device = [batch.seqs[row.row] for row in rows], self._runner.device
        row_indices, positions, sources = _state_indices(batch, rows)
        token_ids = [
            i
            for row, seq in zip(rows, seqs, strict=True)
            for i in seq.token_ids[row.first + 1 : row.end + 1]
        ]
        answer_ids, next_positions, hidden_indices = upload(
            np.stack((token_ids, positions + 1, sources)), torch.int64, device
        ).unbind()
        sampling = sampling_inputs(seqs, device)
        slots = lora_slots(seqs, device) if self._runner.model.adapts_logits else None

        def scored(part: slice) -> StepOutput:
            row_slots = (
                None if slots is None else slots[upload(row_indices[part], torch.int64, device)]
            )
            logits = self._runner.compute_logits(hidden[hidden_indices[part]], row_slots)
            return score_tokens(
                logits,
                sampling.index_select(row_indices[part]),
                next_positions[part],
                answer_ids[part],
            )

        yield from self._parts(rows, row_indices, scored)

    def _pooled(
        self, batch: PrefillBatch, rows: list[StateRow], hidden: Tensor
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Yield the pooled values of these rows."""
        row_indices, _, sources = _state_indices(batch, rows)
        hidden_indices = upload(sources, torch.int64, self._runner.device)
        requested = {name for row in rows for name in batch.seqs[row.row].columns}

        def pooled(part: slice) -> StepOutput:
            states, columns = hidden[hidden_indices[part]], {}
            if EMBEDDING in requested:
                columns[EMBEDDING] = states.float().unsqueeze(1)
            if CLASS_SCORES in requested:
                columns[CLASS_SCORES] = self._runner.class_scores(states).float().unsqueeze(1)
            failed = ~states.isfinite().all(-1)
            # A step has an entry of `columns` for each token, so every state counts as one.
            no_tokens = torch.zeros((len(states), 1), dtype=torch.int64, device=states.device)
            num_tokens = torch.ones(len(states), dtype=torch.int32, device=states.device)
            return StepOutput(num_tokens, no_tokens, failed, columns)

        yield from self._parts(rows, row_indices, pooled)

    def _parts(
        self,
        rows: list[StateRow],
        row_indices: npt.NDArray[np.int64],
        result: Callable[[slice], StepOutput],
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Yield the results of parts of S hidden states.

        Args:
            row_indices: [S], for each hidden state the index in `rows` of its row; ascending.
            result: computes the results of a slice of the hidden states.
        """
        slots = np.array([row.slot for row in rows], np.int64)
        epochs = np.array([row.epoch for row in rows], np.int64)
        for start in range(0, len(row_indices), self._limit):
            part = slice(start, start + self._limit)
            part_rows, counts = np.unique(row_indices[part], return_counts=True)
            yield StateBatch(slots[part_rows], epochs[part_rows], counts), result(part)


def _state_indices(
    batch: PrefillBatch, rows: list[StateRow]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return three arrays [S] that say where the S hidden states of these rows are: the index in
    `rows` of the state's row, the position of the state's token in that row, and the token's index
    among all tokens of the forward."""
    counts = np.array([row.end - row.first for row in rows], np.int64)
    row_indices = np.repeat(np.arange(len(rows)), counts)
    firsts = np.array([row.first for row in rows], np.int64)
    offsets = np.arange(len(row_indices)) - np.repeat(counts.cumsum() - counts, counts)
    positions = np.repeat(firsts, counts) + offsets
    # Adding this to a position in a row gives the token's index in the forward.
    position_offsets = np.cumsum(batch.lengths) - batch.lengths - batch.starts
    sources = positions + np.repeat(position_offsets[[row.row for row in rows]], counts)
    return row_indices, positions, sources


def sampling_inputs(seqs: Sequence[Row], device: torch.device) -> SamplingInputs:
    """Make the sampler's inputs for rows from the host's copy of their tokens."""
    return SamplingInputs.build(
        params=[seq.params for seq in seqs],
        prompt_lens=[seq.answer_start for seq in seqs],
        histories=[seq.token_ids for seq in seqs],
        stop_ids=[tuple(seq.stop.stop_ids) for seq in seqs],
        capacities=[seq.max_tokens for seq in seqs],
        device=device,
        never_sampled=[seq.banned_ids for seq in seqs],
    )
