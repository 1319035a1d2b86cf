"""The update cycle of speculative decoding, and all that it keeps between steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.execution.batched import Batched, row
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.transfer import Download, upload
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch
from batchgen.engine.strategy import JoiningRows, Limits
from batchgen.kernels.speculation.drafts import advance, place_drafts
from batchgen.kernels.speculation.ngram import NgramIndex
from batchgen.strategies.ar_spec.controller import Acceptance
from batchgen.strategies.base.step_inputs import StepInputs

_POOL_ROWS = 4
"""Rows whose tokens a pool keeps, for each that decodes."""


@dataclass(frozen=True)
class SpecRows(Batched):
    """What speculation adds to B rows.

    Attributes:
        slots: [B] on the host, where each row's tokens stand in the token store.
        slots_there: [B] int64, the same.
        limits: [B] int64, the last position that each row can have. A step that was launched before
            its row was known to have ended stays within the row's blocks by it.
        steps: [B] int32, forwards that yielded the row's tokens so far.
        hidden: [B, hidden_size], of the model where it yielded the newest token; [B, 0] unless the
            proposer needs it.
    """

    slots: npt.NDArray[np.int64] = row()
    slots_there: Tensor = row()
    limits: Tensor = row()
    steps: Tensor = row()
    hidden: Tensor = row()


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a proposer thinks comes next for B rows.

    Attributes:
        token_ids: [B, k] int64 in the vocabulary; past the counts, anything.
        counts: [B] int32, 0 to k.
        probs: [B, k, V] float32, the law that each draft was drawn from; None for point masses.
    """

    token_ids: Tensor
    counts: Tensor
    probs: Tensor | None = None


class SpecStepInputs(StepInputs):
    """Each row's next forward reads its newest token and the drafts that follow it.

    Attributes:
        acceptance: how many of the drafts held lately.
        draft_lag: newest tokens of a row that a draft model has not read, at most.
        hidden: [B · W, hidden_size] of the step under way, if the proposer needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.acceptance = Acceptance()
        self.draft_lag = 1
        self.hidden: Tensor | None = None
        self._store: NgramIndex | None = None
        self._free_slots: deque[int] = deque()
        self._rows: SpecRows | None = None
        self._drafts: Drafts | None = None
        self._on_host: tuple[Download, Download] | None = None
        self._wide: ModelInputs | None = None
        self._repeated: dict[int, SamplingInputs] = {}

    def allocate(
        self, limits: Limits, min_n: int, max_n: int, pool: bool, *, indexed: bool
    ) -> None:
        """Room for the tokens of all rows; those that ended stay until their room is needed.

        Args:
            indexed: n-grams are looked up; else only the tokens are of use.
        """
        slots = limits.max_rows * (_POOL_ROWS if pool else 1)
        self._store = NgramIndex.allocate(
            slots,
            limits.max_model_len,
            min_n,
            max_n,
            pool,
            limits.device,
            most_entries=None if indexed else 1,
        )
        self._free_slots = deque(range(slots))

    @property
    def store(self) -> NgramIndex:
        """The tokens of the rows, by `rows.slots`."""
        assert self._store is not None, "allocate comes first"
        return self._store

    @property
    def rows(self) -> SpecRows:
        assert self._rows is not None, "no row was prefilled yet"
        return self._rows

    @property
    def drafts(self) -> Drafts | None:
        """Of the step under way."""
        return self._drafts

    @property
    def drafts_on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """[B, k] and [B], token ids and counts of the drafts, if `set_drafts` had them sent."""
        assert self._on_host is not None, "nobody asked for them"
        token_ids, counts = self._on_host
        return token_ids.wait(), counts.wait()

    @property
    def model_inputs(self) -> ModelInputs:
        return self.newest if self._wide is None else self._wide

    def positions_ahead(self, width: int) -> Tensor:
        """[B, width]: the position of each row's newest token and those after it, none past the
        row's last."""
        positions = self.newest.positions.unsqueeze(1)
        ahead = positions + torch.arange(width, device=positions.device)
        return ahead.minimum(self.rows.limits.unsqueeze(1))

    def repeated(self, width: int) -> SamplingInputs:
        """The sampling rows of `width` positions of each row."""
        if width not in self._repeated:
            self._repeated[width] = self.sampling.repeat(width)
        return self._repeated[width]

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        device, count = newest.device, len(rows.seqs)
        slots = np.array([self._free_slots.popleft() for _ in range(count)], np.int64)
        limits = [seq.max_tokens - 1 for seq in rows.seqs]
        there = upload(np.stack([slots, np.array(limits), rows.context_lens]), torch.int64, device)
        steps = [seq.num_forwards + seq.prefill_yields for seq in rows.seqs]
        self._store_prompts(rows, there[0])
        # One launch more than storing them with the prompts, but the host does not know them yet.
        ones = torch.ones_like(newest, dtype=torch.int32)
        self.store.append(there[0], there[2], newest.unsqueeze(1), ones)
        self._add_rows(rows, newest)
        hidden = newest.new_empty((count, 0)) if rows.hidden is None else rows.hidden
        steps_there = upload(steps, torch.int32, device)
        new = SpecRows(slots, there[0], there[1], steps_there, hidden)
        self._rows = new if self._rows is None else SpecRows.concat([self._rows, new])
        self._repeated.clear()

    def _store_prompts(self, rows: JoiningRows, slots: Tensor) -> None:
        """All that the rows' tokens were before the prefill's."""
        lens = rows.context_lens
        token_ids = np.zeros((len(lens), int(lens.max())), np.int64)
        for ids, seq, length in zip(token_ids, rows.seqs, lens.tolist(), strict=True):
            ids[:length] = seq.token_ids[:length]
        there = upload(token_ids, torch.int64, slots.device)
        counts = upload(lens, torch.int64, slots.device)
        self.store.reset(slots)
        self.store.append(slots, torch.zeros_like(slots), there, counts)

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        super().keep_rows(keep)
        slots = self.rows.slots
        self._free_slots.extend(np.setdiff1d(slots, slots[keep]).tolist())
        self._rows = self.rows.index_select(keep) if len(keep) else None
        self._repeated.clear()

    def reindex(self, batch: DecodeBatch) -> None:
        super().reindex(batch)
        self._drafts = self._wide = None

    def set_drafts(self, drafts: Drafts, *, send: bool = False) -> None:
        """The next forward reads them, and each verified position counts those before it.

        Args:
            send: the host needs them too, while the forward runs.
        """
        rows, k = self.newest, drafts.token_ids.shape[1]
        input_ids, positions, counts = place_drafts(
            rows.input_ids, drafts.token_ids, drafts.counts, rows.positions, self.rows.limits
        )
        self._drafts = replace(drafts, counts=counts)
        self._on_host = (Download(drafts.token_ids), Download(counts)) if send else None
        query_lens = np.full_like(rows.query_lens, 1 + k)
        self._wide = replace(rows, input_ids=input_ids, positions=positions, query_lens=query_lens)
        if self.sampling.any_penalties:
            all_of_them = torch.full_like(counts, k)
            self.sampling.append(drafts.token_ids, all_of_them, rows.positions + 1)

    def step_decode(self, step: StepOutput) -> None:
        inputs, rows = self.newest, self.rows
        starts = inputs.positions + 1
        self._sampling = self.sampling.append(step.token_ids, step.num_tokens, starts)
        self.store.append(rows.slots_there, starts, step.token_ids, step.num_tokens)
        input_ids, positions, steps = advance(
            step.token_ids, step.num_tokens, inputs.positions, rows.limits, rows.steps
        )
        self._newest = replace(inputs, input_ids=input_ids, positions=positions)
        hidden = rows.hidden
        if self.hidden is not None:
            wide = self.hidden.view(len(steps), -1, self.hidden.shape[1])
            last = (step.num_tokens - 1).clamp(min=0).long()
            hidden = wide[torch.arange(len(last), device=last.device), last]
        self._rows = replace(rows, steps=steps, hidden=hidden)
