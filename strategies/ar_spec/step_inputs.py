"""The state of speculative decoding between steps: the newest token of each row, and the *token
store*, which holds all tokens of the rows and the n-gram index for drafts. `ARSpecStrategy` owns
it. Methods without a docstring are those of `StepInputs`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.batched import Batched, row
from batchgen.engine.device.transfer import Download, upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.step_inputs import JoiningRows, StepInputs
from batchgen.engine.strategy import Limits
from batchgen.kernels.speculation.drafts import advance, place_drafts
from batchgen.kernels.speculation.ngram import NgramIndex
from batchgen.strategies.ar_spec.controller import Acceptance
from batchgen.strategies.counts import NUM_FORWARDS

_POOL_ROWS = 4
"""With `ngram_pool`, the store keeps the tokens of this many rows per row that can decode at
once."""


@dataclass(frozen=True)
class SpecRows(Batched):
    """The state of B rows in speculative decoding, in addition to that of every strategy."""

    # [B] int64 on the host, the row's index in the token store.
    store_rows_on_host: npt.NDArray[np.int64] = row()
    store_rows: Tensor = row()  # [B] int64, the same indices on the device
    # [B] int64, the last position that each row can have. It keeps steps within the row's blocks if
    # the row has ended and the host did not know it at the launch.
    limits: Tensor = row()
    steps: Tensor = row()  # [B] int32, how many forwards have yielded tokens for the row
    # [B, hidden_size], the MTP head's hidden state from which the next draft is drawn; [B, 0]
    # without an MTP head.
    hidden: Tensor = row()


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of B rows: the tokens that a proposer expects next."""

    token_ids: Tensor  # [B, k] int64, the drafts of each row, padded with any valid ids
    counts: Tensor  # [B] int32, how many drafts each row has, 0 to k
    # [B, k, V] float32, the distribution that each draft was drawn from; None if drafts were not
    # drawn from distributions.
    probs: Tensor | None = None


class SpecStepInputs(StepInputs):
    """The newest token of each row and its drafts, which the next forward reads; and the token
    store, with all tokens of the rows and an index of their n-grams.

    Attributes:
        acceptance: how often drafts held recently.
        draft_lag: how many of a row's newest tokens a draft model may not have read yet.
        step_hidden: [B · W, hidden_size], the MTP head's hidden states after each token of the
            current step; None without an MTP head.
        joining_hidden: [J, hidden_size], the MTP head's hidden states after the newest token of
            each row that joins next; None without an MTP head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.acceptance = Acceptance()
        self.draft_lag = 1
        self.step_hidden: Tensor | None = None
        self.joining_hidden: Tensor | None = None
        self._store: NgramIndex | None = None
        self._free_store_rows: deque[int] = deque()
        self._rows: SpecRows | None = None
        # The next three are of the current step, and None if it has no drafts: the drafts, copies
        # of their ids and counts to the host, and the inputs with the drafts.
        self._drafts: Drafts | None = None
        self._on_host: tuple[Download, Download] | None = None
        self._wide: ModelInputs | None = None
        self._repeated: dict[int, SamplingInputs] = {}  # by width
        # Ids from this one on stand for image tokens in the index; None if it has none.
        self.image_ids_from: int | None = None

    def allocate(
        self, limits: Limits, min_n: int, max_n: int, pool: bool, *, indexed: bool
    ) -> None:
        """Allocate the token store. It keeps the tokens of a row that ended until another row needs
        the space.

        Args:
            min_n, max_n: the lengths of the n-grams.
            pool: whether drafts may come from other rows.
            indexed: whether n-grams are looked up at all. If not, the index is as small as
                possible.
        """
        num_store_rows = limits.max_rows * (_POOL_ROWS if pool else 1)
        self._store = NgramIndex.allocate(
            num_store_rows,
            limits.max_model_len,
            min_n,
            max_n,
            pool,
            limits.device,
            most_entries=None if indexed else 1,
        )
        self._free_store_rows = deque(range(num_store_rows))
        self._vocab_size, self._indexed = limits.vocab_size, indexed

    @property
    def store(self) -> NgramIndex:
        """The token store, in which rows have the indices `rows.store_rows`."""
        assert self._store is not None, "allocate comes first"
        return self._store

    @property
    def rows(self) -> SpecRows:
        """The speculative state of the rows."""
        assert self._rows is not None, "no row was prefilled yet"
        return self._rows

    @property
    def drafts(self) -> Drafts | None:
        """The drafts of the current step; None if it has none."""
        return self._drafts

    @property
    def drafts_on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The token ids [B, k] and counts [B] of the current step's drafts on the host. Waits for
        their copy, which `set_drafts` must have started."""
        assert self._on_host is not None, "nobody asked for them"
        token_ids, counts = self._on_host
        return token_ids.wait(), counts.wait()

    @property
    def model_inputs(self) -> ModelInputs:
        return self.newest if self._wide is None else self._wide

    def positions_ahead(self, width: int) -> Tensor:
        """Return the positions of each row's newest token and of those after it, [B, width] int64,
        limited to the last position that the row can have."""
        positions = self.newest.positions.unsqueeze(1)
        ahead = positions + torch.arange(width, device=positions.device)
        return ahead.minimum(self.rows.limits.unsqueeze(1))

    def repeated(self, width: int) -> SamplingInputs:
        """Return the sampler's inputs for `width` positions of each row. They are cached as long as
        the rows stay the same."""
        if width not in self._repeated:
            self._repeated[width] = self.sampling.repeat(width)
        return self._repeated[width]

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        """Add rows as in every strategy, and add their tokens to the token store."""
        device, count = newest.device, len(rows.seqs)
        on_host = np.array([self._free_store_rows.popleft() for _ in range(count)], np.int64)
        last_positions = [seq.max_tokens - 1 for seq in rows.seqs]
        store_rows, limits, context_lens = upload(
            np.stack([on_host, np.array(last_positions), rows.context_lens]), torch.int64, device
        )
        before = [seq.counts.get(NUM_FORWARDS.name, 0) for seq in rows.seqs]
        steps = [n + seq.prefill_yields for n, seq in zip(before, rows.seqs, strict=True)]
        self._store_prompts(rows, on_host, store_rows)
        # The newest tokens are added separately, because they are only on the device yet.
        ones = torch.ones_like(newest, dtype=torch.int32)
        self.store.append(store_rows, context_lens, newest.unsqueeze(1), ones)
        self._add_rows(rows, newest)
        hidden = self.joining_hidden
        if hidden is None:
            hidden = newest.new_empty((count, 0))
        uploaded_steps = upload(steps, torch.int32, device)
        new = SpecRows(on_host, store_rows, limits, uploaded_steps, hidden)
        self._rows = new if self._rows is None else SpecRows.concat([self._rows, new])
        self._repeated.clear()

    def _store_prompts(
        self, rows: JoiningRows, on_host: npt.NDArray[np.int64], store_rows: Tensor
    ) -> None:
        """Add the tokens that the prefill has read to the token store.

        Args:
            on_host, store_rows: [B] int64, the rows' indices in the store, on the host and on the
                device.
        """
        lens = rows.context_lens
        token_ids = np.zeros((len(lens), int(lens.max())), np.int64)
        stored_rows = zip(token_ids, rows.seqs, lens.tolist(), on_host.tolist(), strict=True)
        for ids, seq, length, store_row in stored_rows:
            ids[:length] = seq.token_ids[:length]
            if self._indexed and seq.spans:
                self._hide_images(ids, seq, store_row)
        uploaded = upload(token_ids, torch.int64, store_rows.device)
        counts = upload(lens, torch.int64, store_rows.device)
        self.store.reset(store_rows)
        self.store.append(store_rows, torch.zeros_like(store_rows), uploaded, counts)

    def _hide_images(self, ids: npt.NDArray[np.int64], seq: Sequence, store_row: int) -> None:
        """Replace each token of a row's images by an id that occurs nowhere else, so that n-grams
        with image tokens never match others."""
        first, num_ids = self._vocab_size, 2**31 - self._vocab_size
        for span in seq.spans:
            indices = np.arange(span.start, span.end) + store_row * self.store.tokens.shape[1]
            ids[span.start : span.end] = first + indices % num_ids
        self.image_ids_from = first

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        super().keep_rows(keep)
        indices = self.rows.store_rows_on_host
        self._free_store_rows.extend(np.setdiff1d(indices, indices[keep]).tolist())
        self._rows = self.rows.index_select(keep) if len(keep) else None
        self._repeated.clear()

    def reindex(self, batch: DecodeBatch) -> None:
        super().reindex(batch)
        self._drafts = self._wide = None

    def set_drafts(self, drafts: Drafts, *, send: bool = False) -> None:
        """Let the next forward read the drafts after the newest tokens, and add them to the
        sampler's history, so that penalties at a position count the drafts before it.

        Args:
            send: whether to start a copy to the host, for `drafts_on_host`.
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
            all_drafts = torch.full_like(counts, k)
            self.sampling.append(drafts.token_ids, all_drafts, rows.positions + 1)

    def step_decode(self, step: StepOutput) -> None:
        inputs, rows = self.newest, self.rows
        starts = inputs.positions + 1
        self._sampling = self.sampling.append(step.token_ids, step.num_tokens, starts)
        self.store.append(rows.store_rows, starts, step.token_ids, step.num_tokens)
        input_ids, positions, steps = advance(
            step.token_ids, step.num_tokens, inputs.positions, rows.limits, rows.steps
        )
        self._newest = replace(inputs, input_ids=input_ids, positions=positions)
        hidden = rows.hidden
        if self.step_hidden is not None:
            wide = self.step_hidden.view(len(steps), -1, hidden.shape[1])
            last = (step.num_tokens - 1).clamp(min=0).long()
            hidden = wide[torch.arange(len(last), device=last.device), last]
        self._rows = replace(rows, steps=steps, hidden=hidden)
