"""The decoding rows as the host knows them, with one array for each fact about them.

So a step works on whole arrays and needs no Python loop over all rows. Loops run only over rows
that join, leave, or have stop strings, a constraint or a full log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.base.outputs import HostOutput, RequestError
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.sequence import Sequence

Places = npt.NDArray[np.int64]
"""The places of some rows in the RowTable, [R] int64."""

_LOG_TOKENS = 64
"""The most committed tokens of a row that the table holds before they move to its Sequence."""


class RowTable:
    """The decoding rows, in C places. A row has the same place from when the last chunk of its
    prefill is scheduled until it ends, is preempted or is aborted.

    Steps are launched before earlier ones are read. So the result of a step names each row by its
    place and by the epoch that the place had at the launch. When a row leaves, the epoch of its
    place changes, and results that are still on their way for it are dropped.

    Args:
        capacity: C, the most rows that decode at once.
        counts: the names of the strategy's row counts (`RowCount`).

    Attributes:
        num_committed: how many generated tokens were committed since the start, of all rows.
        totals: the sum of each count over all rows since the start, by its name.
        occupied: [C] bool, whether a row has the place. The arrays below, except `epochs`, are
            undefined at other places.
        epochs: [C] int64, how many rows have left the place.
        num_tokens: [C] int64, the number of committed tokens, prompt included.
        launched: [C] int64, the number of steps that were launched for the row and not read yet,
            without prefills that yield no token.
        pending: [C] int64, the most tokens that those steps can yield.
        prompt_lens: [C] int64, the number of prompt tokens.
        max_tokens: [C] int64, the most prompt and output tokens that the row can have.
        exact: [C] bool, whether the row always gets `max_tokens` long, as nothing can stop it.
        shared: [C] int64, how many tokens of the row were found in the prefix cache.
        reserved: [C] int64, how many tokens the blocks of the row have room for.
    """

    def __init__(self, capacity: int, counts: Iterable[str] = ()) -> None:
        self.num_committed = 0
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
        self._counts = {name: np.zeros(capacity, np.int64) for name in counts}
        self.totals = dict.fromkeys(self._counts, 0)
        self._unread = np.zeros(capacity, np.int64)  # newest tokens that some model may not know
        self._logged = np.zeros(capacity, np.int64)
        self._log = np.zeros((capacity, _LOG_TOKENS), np.int64)
        self._column_logs: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return len(self._seqs) - len(self._free)

    def __getitem__(self, place: int) -> Sequence:
        seq = self._seqs[place]
        assert seq is not None
        return seq

    @property
    def rows(self) -> list[Sequence]:
        """The rows that have a place, in the order of their places."""
        return [seq for seq in self._seqs if seq is not None]

    def add(self, seq: Sequence, reserved: int) -> None:
        """Give a place to a row of whose prefill the last chunk is scheduled, and set `seq.place`.
        `reserved` is how many tokens its blocks have room for."""
        place = self._free.pop()
        self._seqs[place] = seq
        self.occupied[place] = True
        seq.place = place
        self.num_tokens[place] = seq.num_tokens
        self.launched[place] = self.pending[place] = int(seq.prefill_yields)
        self._unread[place] = max(1, seq.num_tokens - seq.num_prefill_tokens)
        self.prompt_lens[place] = seq.num_prompt_tokens
        self.max_tokens[place] = seq.max_tokens
        self.exact[place] = seq.stop.exact_length
        self.shared[place] = seq.num_shared_tokens
        self.reserved[place] = reserved
        self._first_stop[place] = seq.num_prompt_tokens + seq.stop.min_new_tokens
        ids = list(seq.stop.stop_ids)
        missing = len(ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[place] = -1
        self._stop_ids[place, : len(ids)] = ids
        self._has_strings[place] = bool(seq.stop.strings)
        self._constrained[place] = seq.matcher is not None
        for values in self._counts.values():
            values[place] = 0

    def guide(self, places: Places) -> Guide | None:
        """The guide of a batch of the rows at these places [B]; None if none of them has a
        constraint."""
        rows = np.flatnonzero(self._constrained[places]).tolist()
        return Guide(len(places), {row: self[places[row]] for row in rows}) if rows else None

    def remove(self, seq: Sequence) -> None:
        """Free the place of a row, and move its last committed tokens, its counts and the number
        of tokens that the models have read to its Sequence."""
        place = seq.place
        assert place is not None and self._seqs[place] is seq
        self._flush(place)
        seq.num_computed_tokens = max(seq.num_tokens - int(self._unread[place]), 0)
        for name, values in self._counts.items():
            seq.counts[name] = seq.counts.get(name, 0) + int(values[place])
        self._seqs[place] = seq.place = None
        self.occupied[place] = False
        self.epochs[place] += 1
        self._free.append(place)

    def ends_by_length(self, places: Places, least_tokens: int = 1) -> npt.NDArray[np.bool_]:
        """Tell which rows surely reach their last token by the steps that are launched already.

        Args:
            places: [B], the places of the rows.
            least_tokens: how many tokens every step yields for a row at least.

        Returns:
            [B] bool.
        """
        coming = least_tokens * self.launched[places]
        ends: npt.NDArray[np.bool_] = self.num_tokens[places] + coming >= self.max_tokens[places]
        return ends

    def commit(
        self, places: Places, epochs: npt.NDArray[np.int64], step: HostOutput
    ) -> list[Sequence]:
        """Commit the tokens of a step, and end the rows that it brought to a stop, to their
        length, to a conflict with their constraint or to broken logits.

        Tokens behind a row's first stop are dropped with their columns and counts. So is all that
        the step yielded for rows that left since it was launched.

        Args:
            places: [B], the places of the step's rows.
            epochs: [B], the epochs of those places when the step was launched.
            step: what the step produced for the B rows.

        Returns:
            the rows that ended. They keep their places until `remove`.
        """
        index = np.flatnonzero(self.epochs[places] == epochs)
        places = places[index]
        self.launched[places] -= 1
        self.pending[places] -= step.token_ids.shape[1]
        counts, by_id, ended = self._stops(places, step.token_ids[index], step.num_tokens[index])
        strings: dict[int, str] = {}
        for i in np.flatnonzero(self._has_strings[places]).tolist():
            seq = self[places[i]]
            generated = int(self.num_tokens[places[i]]) - seq.num_prompt_tokens
            new = step.token_ids[index[i], : counts[i]].tolist()
            found = seq.stop.find_string(new, generated)
            if found is None:
                continue
            if by_id[i] and found[0] == counts[i]:
                # If a stop id itself spells a stop string, the row ends by the id.
                seq.stop.text_before_stop = None
                continue
            counts[i], strings[i] = found
            ended[i] = True
        # A step without tokens may have left a diffusion block unfinished. The tokens that the
        # matcher took tentatively in that block must stay, and `commit` would take them back.
        for i in np.flatnonzero(self._constrained[places] & (counts > 0)).tolist():
            matcher = self[places[i]].matcher
            assert matcher is not None
            matcher.commit(step.token_ids[index[i], : counts[i]].tolist())
        self._append(places, index, counts, step)
        self.num_committed += int(counts.sum())
        self._count(places, index, counts, step)
        finished = []
        conflicts = np.zeros_like(ended) if step.conflicts is None else step.conflicts[index]
        for i in np.flatnonzero(ended | step.failed[index] | conflicts).tolist():
            seq = self[places[i]]
            self._flush(places[i])
            # It is checked first whether a row ended, because broken logits behind its last token
            # do not matter.
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
        self, places: Places, token_ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Cut the new tokens [R, W] of R rows, of which `counts` [R] count, at their first stop id
        or at their length.

        Returns:
            [R] each: how many of its new tokens a row keeps, whether it ends with a stop id,
            whether it ends at all.
        """
        width = token_ids.shape[1]
        totals = self.num_tokens[places, None] + np.arange(1, width + 1)
        stop_ids = self._stop_ids[places]
        is_stop = (token_ids[:, :, None] == stop_ids[:, None, :]).any(-1)
        is_stop &= totals >= self._first_stop[places, None]
        ends = is_stop | (totals >= self.max_tokens[places, None])
        ends &= np.arange(width) < counts[:, None]
        ended = ends.any(-1)
        first = ends.argmax(-1)
        kept = np.where(ended, first + 1, counts)
        return kept, is_stop[np.arange(len(places)), first] & ended, ended

    def _append(
        self,
        places: Places,
        index: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> None:
        """Write the first `counts` [R] tokens of R rows, with their columns, to the logs at
        `places` [R]. `index` [R] holds the rows' indices in the step. A log that would overflow is
        moved to its Sequence first."""
        for name, values in step.columns.items():
            self._fit_log(name, values)
        for start in range(0, step.token_ids.shape[1], _LOG_TOKENS):
            new = np.clip(counts - start, 0, _LOG_TOKENS)
            for place in places[self._logged[places] + new > _LOG_TOKENS].tolist():
                self._flush(place)
            rows, offsets = np.nonzero(np.arange(_LOG_TOKENS) < new[:, None])
            into, source = places[rows], index[rows]
            offset = self._logged[into] + offsets
            self._log[into, offset] = step.token_ids[source, start + offsets]
            for name, values in step.columns.items():
                # The log may be wider than the column is in this batch.
                tail = (slice(size) for size in values.shape[2:])
                index_of: tuple[Any, ...] = (into, offset, *tail)
                self._column_logs[name][index_of] = values[source, start + offsets]
            self._logged[places] += new
            self.num_tokens[places] += new

    def _count(
        self,
        places: Places,
        index: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> None:
        """Add what the step counts to the rows' counts and to the totals. If it has a value for
        each token, those of the tokens that the row keeps are added. Arguments as of `_append`."""
        self._unread[places] = step.unread_tokens
        for name, values in step.counts.items():
            added = values[index].astype(np.int64)
            if added.ndim == 2:
                kept = np.arange(added.shape[1]) < counts[:, None]
                added = np.where(kept, added, 0).sum(1)
            self._counts[name][places] += added
            self.totals[name] += int(added.sum())

    def _fit_log(self, name: str, values: npt.NDArray[Any]) -> None:
        """Make the log of a column, or widen it, to take values [B, W, *tail]. In a batch, the tail
        of a column is as wide as its widest row asks (`top_logprobs`)."""
        log, tail = self._column_logs.get(name), values.shape[2:]
        if log is None:
            self._column_logs[name] = np.zeros((*self._log.shape, *tail), values.dtype)
        elif any(have < need for have, need in zip(log.shape[2:], tail, strict=True)):
            more = [
                (0, max(0, need - have)) for have, need in zip(log.shape[2:], tail, strict=True)
            ]
            self._column_logs[name] = np.pad(log, [(0, 0), (0, 0), *more])

    def _flush(self, place: int) -> None:
        """Move the logged tokens of a row and their columns to its Sequence."""
        count = int(self._logged[place])
        if not count:
            return
        seq = self[place]
        columns = {name: self._column_logs[name][place, :count] for name in seq.columns}
        seq.append(self._log[place, :count].tolist(), columns)
        self._logged[place] = 0


def _not_numbers(seq: Sequence) -> RequestError:
    """The error of a row whose next token had NaN or infinite logits."""
    return RequestError(
        "non_finite_logits",
        f"the model gave NaN or infinite logits at token {seq.num_tokens}: its weights are "
        "damaged, or it needs dtype bfloat16 or float32",
    )
