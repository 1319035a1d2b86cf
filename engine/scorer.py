"""Scores given tokens: their log-probabilities, by the logits of a prefill's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.scheduled_batch import PrefillBatch, ScoreBatch
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampler import score_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs


class Scorer:
    """Scores the tokens of answers that prefills read, a few at a time, so that the memory of their
    logits does not depend on how many there are.

    Args:
        runner: the runner of the target.
        most: the most tokens that are scored at once.
    """

    def __init__(self, runner: ModelRunner, most: int) -> None:
        self._runner, self._most = runner, most

    def score(
        self, batch: PrefillBatch, output: ModelOutput | None
    ) -> Iterator[tuple[ScoreBatch, StepOutput]]:
        """Score what a prefill reads of answers, before the next forward. `output` is that of its
        forward, with the hidden states of all tokens if the batch scores any."""
        if not batch.scored:
            return
        assert output is not None and output.hidden is not None
        rows, device = batch.scored, self._runner.device
        seqs = [batch.seqs[row.row] for row in rows]
        counts = np.array([row.end - row.first for row in rows], np.int64)
        owners = np.repeat(np.arange(len(rows)), counts)
        firsts = np.array([row.first for row in rows], np.int64)
        places = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
        positions = np.repeat(firsts, counts) + places
        # Where the token before each of them stands among all tokens of the forward.
        begins = np.cumsum(batch.lengths) - batch.lengths - batch.starts
        sources = positions - 1 + np.repeat(begins[[row.row for row in rows]], counts)
        token_ids = [
            i
            for row, seq in zip(rows, seqs, strict=True)
            for i in seq.token_ids[row.first : row.end]
        ]
        given, there, hidden = upload(
            np.stack((token_ids, positions, sources)), torch.int64, device
        ).unbind()
        slots = np.array([row.slot for row in rows], np.int64)
        epochs = np.array([row.epoch for row in rows], np.int64)
        sampling = sampling_inputs(seqs, device)
        for start in range(0, len(owners), self._most):
            part = slice(start, start + self._most)
            step = score_tokens(
                self._runner.compute_logits(output.hidden[hidden[part]]),
                sampling.index_select(owners[part]),
                there[part],
                given[part],
            )
            here, of_row = np.unique(owners[part], return_counts=True)
            yield ScoreBatch(slots[here], epochs[here], of_row), step


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
