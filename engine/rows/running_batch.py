"""The rows that run now, as the host knows them, with one array for each fact about them.

So a step works on whole arrays and needs no Python loop over all rows. Loops run only over rows
that join, leave, or have stop strings, a constraint or a full log. The scheduler owns the one
`RunningBatch` of an engine, and commits to it what each step yields.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import HostOutput, RequestError
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.token_logs import TokenLogs
from batchgen.engine.sampling.sampler_columns import (
    ANSWER_REST_PROBS,
    ANSWER_TOP_LOGPROBS,
    rest_probs,
)

BatchSlots = npt.NDArray[np.int64]
"""The batch slots of some rows, [R] int64."""
Mask = npt.NDArray[np.bool_]


class RunningBatch:
    """The rows that own blocks of the cache, in C *batch slots*. A row has the same slot from its
    admission until it ends, is preempted or is aborted.

    Steps are launched before earlier ones are read. So the result of a step names each row by its
    slot and by the epoch that the slot had at the launch. When a row leaves, the epoch of its slot
    changes, and results that are still on their way for it are dropped.

    Rows whose prefill is complete also stand in the strategy's `StepInputs`, in the order in which
    they joined, until their last step is launched. Those that leave before that stay there until a
    batch says which ones to keep.
    """

    def __init__(self, capacity: int, counts: Iterable[str] = ()) -> None:
        self.num_committed = 0  # generated tokens since the start, of all rows
        # The rows in `StepInputs`, in their order there.
        self.order: BatchSlots = np.empty(0, np.int64)
        self._order_epochs = np.empty(0, np.int64)
        self.occupied = np.zeros(capacity, np.bool_)  # whether a row has the slot
        self.epochs = np.zeros(capacity, np.int64)  # how many rows have left the slot
        # These arrays are undefined at slots that no row has.
        self.num_tokens = np.zeros(capacity, np.int64)  # committed ones, prompt included
        # The steps that were launched for the row and not read yet, without prefills that yield no
        # token, and the most tokens that those steps can yield.
        self.launched = np.zeros(capacity, np.int64)
        self.pending = np.zeros(capacity, np.int64)
        self.prompt_lens = np.zeros(capacity, np.int64)
        self.max_tokens = np.zeros(capacity, np.int64)  # prompt and output together
        self.exact = np.zeros(capacity, np.bool_)  # whether the row always gets `max_tokens` long
        self.shared = np.zeros(capacity, np.int64)  # tokens that the prefix cache had
        self.reserved = np.zeros(capacity, np.int64)  # tokens that its blocks have room for
        self.passed = np.zeros(capacity, np.int64)  # first blocks that its window has passed
        self._seqs: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._first_stop = np.zeros(capacity, np.int64)  # num_tokens from which stops count
        self._stop_ids = np.full((capacity, 1), -1, np.int64)
        self._has_strings = np.zeros(capacity, np.bool_)
        self._constrained = np.zeros(capacity, np.bool_)
        self._counts = {name: np.zeros(capacity, np.int64) for name in counts}
        self.totals = dict.fromkeys(self._counts, 0)  # over all rows since the start
        self._unread = np.zeros(capacity, np.int64)  # newest tokens that some model may not know
        self._logs = TokenLogs(capacity)

    def __len__(self) -> int:
        return len(self._seqs) - len(self._free)

    def __getitem__(self, slot: int) -> Sequence:
        seq = self._seqs[slot]
        assert seq is not None
        return seq

    @property
    def rows(self) -> list[Sequence]:
        """The rows, in the order of their slots."""
        return [seq for seq in self._seqs if seq is not None]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """How many tokens each of the rows has generated, as far as steps were read."""
        lengths: npt.NDArray[np.int64] = (self.num_tokens - self.prompt_lens)[self.occupied]
        return lengths

    def add(self, seq: Sequence, reserved: int) -> None:
        """Give a slot to a row that was admitted, whose blocks have room for `reserved` tokens."""
        slot = self._free.pop()
        self._seqs[slot] = seq
        self.occupied[slot] = True
        seq.batch_slot = slot
        self.num_tokens[slot] = seq.num_tokens
        self.launched[slot] = self.pending[slot] = 0
        self._unread[slot] = max(1, seq.num_tokens - seq.num_prefill_tokens)
        self.prompt_lens[slot] = seq.num_prompt_tokens
        self.max_tokens[slot] = seq.max_tokens
        self.exact[slot] = seq.stop.exact_length
        self.shared[slot] = seq.num_computed_tokens
        self.reserved[slot] = reserved
        self.passed[slot] = seq.num_passed_blocks
        self._first_stop[slot] = seq.num_prompt_tokens + seq.stop.min_new_tokens
        ids = list(seq.stop.stop_ids)
        missing = len(ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(ids)] = ids
        self._has_strings[slot] = bool(seq.stop.strings)
        self._constrained[slot] = seq.matcher is not None
        for values in self._counts.values():
            values[slot] = 0

    def end_prefill(self, seq: Sequence, reserved: int) -> None:
        """Take note that the last chunk of a row's prefill is scheduled, and that the row's blocks
        have room for `reserved` tokens."""
        slot = seq.batch_slot
        assert slot is not None
        self.reserved[slot] = reserved
        self.launched[slot] = self.pending[slot] = seq.prefill_yields

    def present(self) -> Mask:
        """[B] bool, which of the rows in `order` have not left."""
        mask: Mask = self.epochs[self.order] == self._order_epochs
        return mask

    def join(self, seqs: Rows[Sequence]) -> npt.NDArray[np.int64] | None:
        """Let rows whose prefill is complete stand behind those in `order`, and drop those that
        have left, as the `StepInputs` must. Returns the ascending indices in `order` of the rows
        that stayed; None if all did."""
        present = self.present()
        keep = None if present.all() else np.flatnonzero(present)
        stay = self.order if keep is None else self.order[keep]
        joined = np.array([seq.batch_slot for seq in seqs], np.int64)
        self.order = np.append(stay, joined)
        self._order_epochs = self.epochs[self.order]
        return keep

    def decode(self, keep: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64] | None:
        """Take note that the rows at the indices `keep` of `order` read `width` tokens in the next
        step, and drop all others. Returns `keep`, or None if it is all of them."""
        moved = len(keep) < len(self.order)
        self.order = self.order[keep]
        self._order_epochs = self.epochs[self.order]
        self.launched[self.order] += 1
        self.pending[self.order] += width
        return keep if moved else None

    def guide(self, slots: BatchSlots) -> Guide | None:
        """The guide of a batch of the rows at these slots [B]; None if none has a constraint."""
        rows = np.flatnonzero(self._constrained[slots]).tolist()
        return Guide(len(slots), {row: self[slots[row]] for row in rows}) if rows else None

    def remove(self, seq: Sequence) -> None:
        """Free the slot of a row, and move its last committed tokens, its counts and the number of
        tokens that the models have read to its Sequence."""
        slot = seq.batch_slot
        assert slot is not None and self._seqs[slot] is seq
        counts = self.flush(seq)
        if not seq.is_prefilling:
            seq.num_computed_tokens = max(seq.num_tokens - int(self._unread[slot]), 0)
        seq.counts = counts
        self._seqs[slot] = seq.batch_slot = None
        self.occupied[slot] = False
        self.epochs[slot] += 1
        self._free.append(slot)

    def flush(self, seq: Sequence) -> dict[str, int]:
        """Move the newest committed tokens of a row to its Sequence. Returns the row's counts."""
        slot = seq.batch_slot
        assert slot is not None
        self._logs.flush(slot, seq)
        return {n: seq.counts.get(n, 0) + int(values[slot]) for n, values in self._counts.items()}

    def ends_by_length(self, slots: BatchSlots, least_tokens: int = 1) -> Mask:
        """[B] bool, which of the rows at these slots [B] surely reach their last token by the steps
        that are launched already, if every step yields at least `least_tokens`."""
        coming = least_tokens * self.launched[slots]
        ends: Mask = self.num_tokens[slots] + coming >= self.max_tokens[slots]
        return ends

    def commit(
        self, slots: BatchSlots, epochs: npt.NDArray[np.int64], step: HostOutput
    ) -> list[Sequence]:
        """Commit the tokens of a step, and end the rows that it brought to a stop, to their length,
        to a conflict with their constraint or to broken logits.

        Tokens behind a row's first stop are dropped with their columns and counts, and so is all
        that the step yielded for rows that left since it was launched. Returns the rows that ended.
        They keep their slots until `remove`.

        Args:
            slots: [B], the batch slots of the step's rows.
            epochs: [B], the epochs of those slots when the step was launched.
        """
        index = np.flatnonzero(self.epochs[slots] == epochs)
        slots = slots[index]
        self.launched[slots] -= 1
        self.pending[slots] -= step.token_ids.shape[1]
        counts, by_id, ended = self._stops(slots, step.token_ids[index], step.num_tokens[index])
        strings = self._find_strings(slots, step.token_ids[index], counts, by_id, ended)
        # A step without tokens may have left a diffusion block unfinished. The tokens that the
        # matcher took tentatively in that block must stay, and `commit` would take them back.
        for i in np.flatnonzero(self._constrained[slots] & (counts > 0)).tolist():
            matcher = self[slots[i]].matcher
            assert matcher is not None
            matcher.commit(step.token_ids[index[i], : counts[i]].tolist())
        self._logs.append(self._seqs, slots, index, counts, step)
        self.num_tokens[slots] += counts
        self.num_committed += int(counts.sum())
        self._count(slots, index, counts, step)
        finished = []
        conflicts = np.zeros_like(ended) if step.conflicts is None else step.conflicts[index]
        for i in np.flatnonzero(ended | step.failed[index] | conflicts).tolist():
            seq = self[slots[i]]
            self._logs.flush(slots[i], seq)
            if seq.tail:
                cut = slice(counts[i], step.num_tokens[index[i]])
                columns = {name: values[index[i], cut] for name, values in step.columns.items()}
                seq.keep_tail(step.token_ids[index[i], cut], columns)
            # Whether a row ended is checked first, because broken logits behind its last token do
            # not matter.
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

    def commit_states(
        self,
        slots: BatchSlots,
        epochs: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> list[Sequence]:
        """Give rows what the next hidden states yield that they are scored or pooled by, unless
        they left since the step was launched. Returns the rows that have all of it.

        Args:
            slots: [B], the batch slots of the rows.
            epochs: [B], the epochs of those slots when the step was launched.
            counts: [B], how many of the step's R rows belong to each of them, in order.
        """
        finished, ends = [], counts.cumsum()
        for i in np.flatnonzero(self.epochs[slots] == epochs).tolist():
            rows = slice(ends[i] - counts[i], ends[i])
            seq = self[slots[i]]
            columns = {name: values[rows, 0] for name, values in step.columns.items()}
            if (number := seq.params.top_logprobs) > 0:
                best = columns[ANSWER_TOP_LOGPROBS][:, :number]
                columns[ANSWER_REST_PROBS.name] = rest_probs(best)
            seq.take_states(columns, int(counts[i]))
            seq.num_broken_states += int(step.failed[rows].sum())
            if seq.next_state == seq.num_prefill_tokens:
                if seq.num_broken_states:
                    seq.fail(_not_numbers(seq))
                else:
                    seq.finish("scored" if seq.num_answer_tokens else "read", None)
                finished.append(seq)
        return finished

    def _stops(
        self, slots: BatchSlots, token_ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], Mask, Mask]:
        """Cut the new tokens [R, W] of R rows, of which `counts` [R] count, at their first stop id
        or at their length. Returns, [R] each: how many of its new tokens a row keeps, whether it
        ends with a stop id, whether it ends at all."""
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

    def _find_strings(
        self,
        slots: BatchSlots,
        token_ids: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        by_id: Mask,
        ended: Mask,
    ) -> dict[int, str]:
        """Cut the new tokens at the first stop string, too: `counts` and `ended` are changed."""
        strings: dict[int, str] = {}
        for i in np.flatnonzero(self._has_strings[slots]).tolist():
            seq = self[slots[i]]
            generated = int(self.num_tokens[slots[i]]) - seq.num_prompt_tokens
            match = seq.stop.find_string(token_ids[i, : counts[i]].tolist(), generated)
            if match is None:
                continue
            if by_id[i] and match[0] == counts[i]:
                # If a stop id itself spells a stop string, the row ends by the id.
                seq.stop.text_before_stop = None
                continue
            counts[i], strings[i] = match
            ended[i] = True
        return strings

    def _count(
        self,
        slots: BatchSlots,
        index: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> None:
        """Add what the step counts to the rows' counts and to the totals. If it has a value for
        each token, those of the first `counts` [R] tokens are added, which the rows keep."""
        self._unread[slots] = step.unread_tokens
        for name, values in step.counts.items():
            added = values[index].astype(np.int64)
            if added.ndim == 2:
                kept = np.arange(added.shape[1]) < counts[:, None]
                added = np.where(kept, added, 0).sum(1)
            self._counts[name][slots] += added
            self.totals[name] += int(added.sum())


def _not_numbers(seq: Sequence) -> RequestError:
    """The error of a row of which a token had NaN or infinite logits."""
    where, what = f"token {seq.num_tokens}", "logits"
    if seq.num_answer_tokens:
        where = f"{seq.num_broken_states} of the answer's {seq.num_answer_tokens} tokens"
    elif seq.num_pooled_tokens:
        where = f"{seq.num_broken_states} of the prompt's {seq.num_prompt_tokens} tokens"
        what = "hidden states"
    return RequestError(
        "non_finite_logits",
        f"the model computed NaN or infinite {what} at {where}: its weights are damaged, or it "
        "needs dtype bfloat16 or float32",
    )
