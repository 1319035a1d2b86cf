"""Computes from the hidden states of a prefill what rows that generate nothing want: the scores of
given tokens, and pooled values such as embeddings. `StepLauncher` calls this after each prefill."""

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
    """Scores the tokens of answers, and pools rows that are only read, by the hidden states of a
    prefill. It takes a few at a time, so that the memory of their logits does not depend on how
    many there are.

    Args:
        runner: the runner of the target.
        limit: the most hidden states that are taken at once.
    """

    def __init__(self, runner: ModelRunner, limit: int) -> None:
        self._runner, self._most = runner, limit

    def read(
        self, batch: PrefillBatch, output: ModelOutput | None
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Take the wanted hidden states of a prefill, before the next forward. `output` is that of
        its forward, with the hidden states of all tokens if the batch wants any."""
        for of_answers in (True, False):
            rows = [
                row
                for row in batch.state_rows
                if bool(batch.seqs[row.row].num_answer_tokens) is of_answers
            ]
            if rows:
                assert output is not None and output.hidden is not None
                make = self._scored if of_answers else self._pooled
                yield from make(batch, rows, output.hidden)

    def _scored(
        self, batch: PrefillBatch, rows: list[StateRow], hidden: Tensor
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Score the tokens behind these, each by the hidden state of the token before it."""
        seqs, device = [batch.seqs[row.row] for row in rows], self._runner.device
        owners, positions, sources = _places(batch, rows)
        token_ids = [
            i
            for row, seq in zip(rows, seqs, strict=True)
            for i in seq.token_ids[row.first + 1 : row.end + 1]
        ]
        answer_ids, there, index = upload(
            np.stack((token_ids, positions + 1, sources)), torch.int64, device
        ).unbind()
        sampling = sampling_inputs(seqs, device)
        slots = lora_slots(seqs, device) if self._runner.model.adapts_logits else None

        def scored(part: slice) -> StepOutput:
            row_slots = None if slots is None else slots[upload(owners[part], torch.int64, device)]
            logits = self._runner.compute_logits(hidden[index[part]], row_slots)
            return score_tokens(
                logits, sampling.index_select(owners[part]), there[part], answer_ids[part]
            )

        yield from self._parts(rows, owners, scored)

    def _pooled(
        self, batch: PrefillBatch, rows: list[StateRow], hidden: Tensor
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Give what is pooled of the hidden states of these tokens."""
        owners, _, sources = _places(batch, rows)
        index = upload(sources, torch.int64, self._runner.device)
        wanted = {name for row in rows for name in batch.seqs[row.row].columns}

        def pooled(part: slice) -> StepOutput:
            states, columns = hidden[index[part]], {}
            if EMBEDDING in wanted:
                columns[EMBEDDING] = states.float().unsqueeze(1)
            if CLASS_SCORES in wanted:
                columns[CLASS_SCORES] = self._runner.class_scores(states).float().unsqueeze(1)
            failed = ~states.isfinite().all(-1)
            none = torch.zeros((len(states), 1), dtype=torch.int64, device=states.device)
            return StepOutput(torch.ones_like(none[:, 0]).int(), none, failed, columns)

        yield from self._parts(rows, owners, pooled)

    def _parts(
        self,
        rows: list[StateRow],
        owners: npt.NDArray[np.int64],
        result: Callable[[slice], StepOutput],
    ) -> Iterator[tuple[StateBatch, StepOutput]]:
        """Yield the results of parts of the hidden states, whose rows `owners` names."""
        slots = np.array([row.slot for row in rows], np.int64)
        epochs = np.array([row.epoch for row in rows], np.int64)
        for start in range(0, len(owners), self._most):
            part = slice(start, start + self._most)
            here, of_row = np.unique(owners[part], return_counts=True)
            yield StateBatch(slots[here], epochs[here], of_row), result(part)


def _places(
    batch: PrefillBatch, rows: list[StateRow]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return for each wanted hidden state its row, as an index in `rows`, its token's position in
    that row, and its place among all tokens of the forward."""
    counts = np.array([row.end - row.first for row in rows], np.int64)
    owners = np.repeat(np.arange(len(rows)), counts)
    firsts = np.array([row.first for row in rows], np.int64)
    offsets = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
    positions = np.repeat(firsts, counts) + offsets
    begins = np.cumsum(batch.lengths) - batch.lengths - batch.starts
    return owners, positions, positions + np.repeat(begins[[row.row for row in rows]], counts)


def sampling_inputs(seqs: Sequence[Row], device: torch.device) -> SamplingInputs:
    """Make the sampler's inputs for rows, from what the host knows of them."""
    return SamplingInputs.build(
        params=[seq.params for seq in seqs],
        prompt_lens=[seq.answer_start for seq in seqs],
        histories=[seq.token_ids for seq in seqs],
        stop_ids=[tuple(seq.stop.stop_ids) for seq in seqs],
        capacities=[seq.max_tokens for seq in seqs],
        device=device,
        never_sampled=[seq.banned_ids for seq in seqs],
    )
