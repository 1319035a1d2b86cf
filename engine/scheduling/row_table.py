"""The decoding rows as the host knows them: one array per fact, so that a step costs no loop over
rows. Loops run over the rows that change only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.constraint.guide import Guide
from batchgen.engine.outputs import HostOutput, RequestError
from batchgen.engine.sequence import Sequence

Slots = npt.NDArray[np.int64]

_MOST_FORWARDS = 64
_LOG_TOKENS = 64
"""New tokens that a row keeps here before they move to its Sequence."""


class RowTable:
    """Decoding rows by slot. A slot is a row's place from its first token until it leaves.

    Steps are launched before earlier ones are read. A result belongs to (slot, epoch); when a row
    leaves, its slot's epoch changes, and what is still on its way for it is dropped.

    Attributes:
        num_committed: generated tokens since the start.
        num_drafts, num_accepted: draft tokens proposed, and committed, since the start.
        forwards_per_yield: how often it took i forwards to yield tokens (those that only made KV
            final do not count), at [i], or at least so many at the end.
        occupied: [C] bool, the slots in use. What follows is undefined elsewhere.
        epochs: [C] int64.
        num_tokens: [C] int64, committed tokens, those of the prompt included.
        launched: [C] int64, steps launched and not read; each yields at least one token.
        pending: [C] int64, tokens that those steps yield at most.
        prompt_lens: [C] int64.
        max_tokens: [C] int64, prompt and output tokens at most.
        exact: [C] bool, rows that get exactly that long.
        shared: [C] int64, tokens whose KV the row found in the prefix cache.
        reserved: [C] int64, tokens that the row's KV blocks hold.
    """

    def __init__(self, capacity: int) -> None:
        self.num_committed = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self.forwards_per_yield = np.zeros(_MOST_FORWARDS + 1, np.int64)
        self.occupied = np.zeros(capacity, np.bool_)
        self.epochs = np.zeros(capacity, np.int64)
        self.num_tokens = np.zeros(capacity, np.int64)
        self.launched = np.zeros(capacity, np.int64)
        self.pending = np.zeros(capacity, np.int64)
        self.prompt_lens = np.zeros(capacity, np.int64)
        self.max_tokens = np.zeros(capacity, np.int64)
        self.exact = np.zeros(capacity, np.bool_)
        self.shared = np.zeros(capacity, np.int64)
        self.reserved = np.zeros(capacity, np.int64)
        self._seqs: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._first_stop = np.zeros(capacity, np.int64)  # num_tokens from which stops count
        self._stop_ids = np.full((capacity, 1), -1, np.int64)
        self._has_strings = np.zeros(capacity, np.bool_)
        self._constrained = np.zeros(capacity, np.bool_)
        self._forwards = np.zeros(capacity, np.int64)
        self._commits = np.zeros(capacity, np.int64)
        self._since_yield = np.zeros(capacity, np.int64)
        self._drafts = np.zeros(capacity, np.int64)
        self._accepted = np.zeros(capacity, np.int64)
        self._unread = np.zeros(capacity, np.int64)
        self._logged = np.zeros(capacity, np.int64)
        self._log = np.zeros((capacity, _LOG_TOKENS), np.int64)
        self._column_logs: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return len(self._seqs) - len(self._free)

    def __getitem__(self, slot: int) -> Sequence:
        seq = self._seqs[slot]
        assert seq is not None
        return seq

    @property
    def rows(self) -> list[Sequence]:
        return [seq for seq in self._seqs if seq is not None]

    def add(self, seq: Sequence, reserved: int) -> None:
        """Take in a row whose prefill is launched; its blocks hold `reserved` tokens."""
        slot = self._free.pop()
        self._seqs[slot] = seq
        self.occupied[slot] = True
        seq.slot = slot
        self.num_tokens[slot] = seq.num_tokens
        self.launched[slot] = self.pending[slot] = int(seq.prefill_yields)
        self._unread[slot] = 1
        self.prompt_lens[slot] = seq.num_prompt_tokens
        self.max_tokens[slot] = seq.max_tokens
        self.exact[slot] = seq.stop.exact_length
        self.shared[slot] = seq.num_shared_tokens
        self.reserved[slot] = reserved
        self._first_stop[slot] = seq.num_prompt_tokens + seq.stop.min_new_tokens
        ids = list(seq.stop.stop_ids)
        missing = len(ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(ids)] = ids
        self._has_strings[slot] = bool(seq.stop.strings)
        self._constrained[slot] = seq.matcher is not None
        self._forwards[slot] = self._commits[slot] = self._since_yield[slot] = 0
        self._drafts[slot] = self._accepted[slot] = 0

    def guide(self, slots: Slots) -> Guide | None:
        """Of the constrained ones among these rows."""
        rows = np.flatnonzero(self._constrained[slots]).tolist()
        return Guide(len(slots), {row: self[slots[row]] for row in rows}) if rows else None

    def remove(self, seq: Sequence) -> None:
        """Move what is known of the row to its Sequence and free its slot."""
        slot = seq.slot
        assert slot is not None and self._seqs[slot] is seq
        self._flush(slot)
        seq.num_computed_tokens = max(seq.num_tokens - int(self._unread[slot]), 0)
        seq.num_forwards += int(self._forwards[slot])
        seq.num_commit_forwards += int(self._commits[slot])
        seq.num_draft_tokens += int(self._drafts[slot])
        seq.num_accepted_tokens += int(self._accepted[slot])
        self._seqs[slot] = seq.slot = None
        self.occupied[slot] = False
        self.epochs[slot] += 1
        self._free.append(slot)

    def ends_by_length(self, slots: Slots, least_tokens: int = 1) -> npt.NDArray[np.bool_]:
        """Rows that the launched steps bring to their last token.

        Args:
            least_tokens: that every step yields.
        """
        coming = least_tokens * self.launched[slots]
        ends: npt.NDArray[np.bool_] = self.num_tokens[slots] + coming >= self.max_tokens[slots]
        return ends

    def commit(
        self, slots: Slots, epochs: npt.NDArray[np.int64], step: HostOutput
    ) -> list[Sequence]:
        """Take in a step of the rows that had these slots and epochs when it was launched.

        Tokens after a row's first stop are dropped, with their columns.

        Returns:
            The rows that ended. They keep their slots until `remove`.
        """
        index = np.flatnonzero(self.epochs[slots] == epochs)
        slots = slots[index]
        self.launched[slots] -= 1
        self.pending[slots] -= step.token_ids.shape[1]
        counts, by_id, ended = self._stops(slots, step.token_ids[index], step.num_tokens[index])
        strings: dict[int, str] = {}
        for i in np.flatnonzero(self._has_strings[slots]).tolist():
            seq = self[slots[i]]
            generated = int(self.num_tokens[slots[i]]) - seq.num_prompt_tokens
            new = step.token_ids[index[i], : counts[i]].tolist()
            found = seq.stop.find_string(new, generated)
            if found is None:
                continue
            if by_id[i] and found[0] == counts[i]:
                seq.stop.text_before_stop = None  # a stop id goes before a string of its token
                continue
            counts[i], strings[i] = found
            ended[i] = True
        # A step without tokens may be one within a block, whose tentative tokens stay.
        for i in np.flatnonzero(self._constrained[slots] & (counts > 0)).tolist():
            matcher = self[slots[i]].matcher
            assert matcher is not None
            matcher.commit(step.token_ids[index[i], : counts[i]].tolist())
        self._append(slots, index, counts, step)
        self.num_committed += int(counts.sum())
        self._count(slots, index, counts, step)
        finished = []
        conflicts = np.zeros_like(ended) if step.conflicts is None else step.conflicts[index]
        for i in np.flatnonzero(ended | step.failed[index] | conflicts).tolist():
            seq = self[slots[i]]
            self._flush(slots[i])
            # A row that ended does not depend on what its step read behind its end.
            if i in strings:
                seq.finish("stop", strings[i])
            elif by_id[i]:
                seq.finish("stop", seq.stop.stop_ids[seq.token_ids[-1]])
            elif ended[i]:
                seq.finish("length", None)
            elif conflicts[i]:
                seq.finish("constraint_conflict", None)
            else:
                seq.fail(_not_numbers(seq))
            finished.append(seq)
        return finished

    def _stops(
        self, slots: Slots, token_ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Cut each row's tokens [R, W] at its first stop id or at its length.

        Returns:
            [R] each: how many of its tokens a row keeps, whether the last of them is a stop id,
            whether the row ends.
        """
        width = token_ids.shape[1]
        totals = self.num_tokens[slots, None] + np.arange(1, width + 1)
        stop_ids = self._stop_ids[slots]
        is_stop = (token_ids[:, :, None] == stop_ids[:, None, :]).any(-1)
        is_stop &= totals >= self._first_stop[slots, None]
        ends = is_stop | (totals >= self.max_tokens[slots, None])
        ends &= np.arange(width) < counts[:, None]
        ended = ends.any(-1)
        first = ends.argmax(-1)
        kept = np.where(ended, first + 1, counts)
        return kept, is_stop[np.arange(len(slots)), first] & ended, ended

    def _append(
        self,
        slots: Slots,
        index: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> None:
        for name, values in step.columns.items():
            self._fit_log(name, values)
        for start in range(0, step.token_ids.shape[1], _LOG_TOKENS):
            new = np.clip(counts - start, 0, _LOG_TOKENS)
            for slot in slots[self._logged[slots] + new > _LOG_TOKENS].tolist():
                self._flush(slot)
            rows, offsets = np.nonzero(np.arange(_LOG_TOKENS) < new[:, None])
            into, source = slots[rows], index[rows]
            place = self._logged[into] + offsets
            self._log[into, place] = step.token_ids[source, start + offsets]
            for name, values in step.columns.items():
                # A log may be wider than this batch's widest row.
                tail = (slice(size) for size in values.shape[2:])
                index_of: tuple[Any, ...] = (into, place, *tail)
                self._column_logs[name][index_of] = values[source, start + offsets]
            self._logged[slots] += new
            self.num_tokens[slots] += new

    def _count(
        self,
        slots: Slots,
        index: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> None:
        """What the tokens cost."""
        self._forwards[slots] += 1
        self._since_yield[slots] += 1
        if step.commits is not None:
            self._commits[slots] += step.commits[index]
            self._since_yield[slots] -= step.commits[index]
        yielded = slots[counts > 0]
        taken = np.minimum(self._since_yield[yielded], _MOST_FORWARDS)
        self.forwards_per_yield += np.bincount(taken, minlength=_MOST_FORWARDS + 1)
        self._since_yield[yielded] = 0
        self._unread[slots] = step.unread_tokens
        if step.num_drafts is not None:
            drafts = step.num_drafts[index]
            # The last token of a step was drawn, those before it were drafts; a stop may cut it,
            # and a row that could not go on has none.
            accepted = np.minimum(counts, step.num_tokens[index] - ~step.broken[index])
            self._drafts[slots] += drafts
            self._accepted[slots] += accepted
            self.num_drafts += int(drafts.sum())
            self.num_accepted += int(accepted.sum())

    def _fit_log(self, name: str, values: npt.NDArray[Any]) -> None:
        """Room for a column's values [B, W, *tail]; a batch's tail is its widest row's."""
        log, tail = self._column_logs.get(name), values.shape[2:]
        if log is None:
            self._column_logs[name] = np.zeros((*self._log.shape, *tail), values.dtype)
        elif any(have < need for have, need in zip(log.shape[2:], tail, strict=True)):
            more = [
                (0, max(0, need - have)) for have, need in zip(log.shape[2:], tail, strict=True)
            ]
            self._column_logs[name] = np.pad(log, [(0, 0), (0, 0), *more])

    def _flush(self, slot: int) -> None:
        count = int(self._logged[slot])
        if not count:
            return
        seq = self[slot]
        columns = {name: self._column_logs[name][slot, :count] for name in seq.columns}
        seq.append(self._log[slot, :count].tolist(), columns)
        self._logged[slot] = 0


def _not_numbers(seq: Sequence) -> RequestError:
    return RequestError(
        "non_finite_logits",
        f"the model gave NaN or infinite logits at token {seq.num_tokens}: its weights are "
        "damaged, or it needs dtype bfloat16 or float32",
    )
