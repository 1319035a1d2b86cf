"""A row of the engine on the host: `Sequence`, the state of one request from its arrival to its
end.

`Requests` makes a `Sequence` for each request. The scheduler and the block manager update it, and
`request_output` turns it into the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.caches.context_columns import ContextRows
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.interface.outputs import Begun, FinishReason, OutputColumn, RequestError
from batchgen.engine.interface.trajectory import Trajectory
from batchgen.engine.rows.pooling import PooledValue
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image_span import ImageRun, ImageSpan, rope_shift, runs_of

TAIL = "tail_"
"""The prefix of the names of columns of tail scope."""


class ColumnBuffer:
    """A growing array [n, *tail] of a column's values, with amortised O(1) time per append."""

    def __init__(self, column: OutputColumn) -> None:
        self._column = column
        self._tail = tuple(slice(size) for size in column.tail_shape)
        self._data = np.empty((16, *column.tail_shape), column.dtype)
        self._length = 0

    def extend(self, rows: npt.NDArray[Any]) -> None:
        """Append the values [n, *tail] of n tokens. The tail may be larger than the column's,
        because a batch's tensors are as wide as its widest row; the excess is cut off."""
        end = self._length + len(rows)
        if end > len(self._data):
            grown = np.empty(
                (max(end, 2 * len(self._data)), *self._data.shape[1:]), self._data.dtype
            )
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._data[self._length : end] = rows[(slice(None), *self._tail)]
        self._length = end

    def __len__(self) -> int:
        return self._length

    def array(self, start: int = 0) -> npt.NDArray[Any]:
        """Return a copy of the values from token `start` on, [n - start, *tail]."""
        return self._data[start : self._length].copy()


class EditBuffer(ColumnBuffer):
    """The edits of a row, [E, 4]: position in the output, step, old id and new id of each edit."""

    def __init__(self, column: OutputColumn) -> None:
        super().__init__(column)
        self._records: list[npt.NDArray[Any]] = []

    def extend(self, rows: npt.NDArray[Any]) -> None:
        """Append the edits of n tokens, [n, K, 3]: step, old id and new id of each edit, the newest
        first. Entries with step 0 are unused."""
        token, number = np.nonzero(rows[:, ::-1, 0])
        edits = rows[:, ::-1][token, number]
        self._records.append(np.column_stack((token + self._length, edits)))
        self._length += len(rows)

    def array(self, start: int = 0) -> npt.NDArray[Any]:
        """Return the edits of the tokens from `start` on."""
        records = np.concatenate([np.empty((0, 4), np.int64), *self._records])
        return records[records[:, 0] >= start].astype(self._column.dtype)


@dataclass(eq=False)
class Sequence:
    """A request as a row of tokens, with its columns and the cache entries that it owns.

    A row waits, runs (and owns blocks of the cache), or has ended. `token_ids` are the committed
    tokens, prompt first; while the row runs, its newest tokens are in the `RunningBatch`. The
    blocks in `block_table` hold the cache entries of the first `num_computed_tokens` tokens, once
    all launched forwards have run, and reserved KV slots for further tokens.
    """

    request_id: Any
    token_ids: list[int]
    params: RequestParams
    stop: StopRule
    requested_columns: tuple[OutputColumn, ...]
    # The number of given tokens, at the end, that are an answer to score.
    num_answer_tokens: int = 0
    spans: tuple[ImageSpan, ...] = ()  # the prompt's images, in order
    banned_ids: tuple[int, ...] = ()  # tokens that are never sampled
    adapter: int = 0  # the number of the row's adapter; 0: none
    # The trajectory that the row replays: its tokens are yielded as if they were drawn, step by
    # step.
    trajectory: Trajectory | None = None
    # A number that is added to the rotary positions of all tokens, besides the shift of images. The
    # rotary tables have the angles of long rows (LongRoPE) at this offset
    # (`ModelConfig.rope_border`).
    rope_offset: int = 0
    batch_slot: int | None = None  # the slot in the `RunningBatch`, while the row runs
    lora_slot: int = 0  # the slot of the row's adapter, while the row runs; 0: none
    matcher: Matcher | None = None  # of a constrained row: has read the output so far
    # The cache entries that the row owns. State slot 0 means none.
    block_table: list[int] = field(default_factory=list)
    # The blocks of layers with a sliding window. The first `num_passed_blocks` entries are 0: no
    # later token attends to what these blocks held.
    window_table: list[int] = field(default_factory=list)
    num_passed_blocks: int = 0
    # The pages of the paged cache that the row fills with blocks of each table; 0: none.
    full_page: int = 0
    window_page: int = 0
    state_slot: int = 0
    # The state slot of the snapshot that the row starts from, until the snapshot is copied.
    restore_from: int | None = None
    # The number of first tokens whose blocks were in the prefix cache at admission, without a
    # snapshot or window tail at their end. The prefill leaves one there, because several rows share
    # these tokens.
    branch_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # digests of the first full blocks
    num_computed_tokens: int = 0
    num_published_blocks: int = 0  # the number of first blocks that other rows may share
    num_prefill_tokens: int = 0  # the number of known tokens to read before the row decodes
    prefill_yields: bool = True  # whether the prefill yields a token
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache at the first admission
    num_preemptions: int = 0
    # How many rows start before it if the waiting rows start in the order of their arrival.
    turn: int = 0
    # The strategy's counts at the time when the row last left the running rows.
    counts: dict[str, int] = field(default_factory=dict)
    context: ContextRows = field(default_factory=ContextRows)  # columns of context scope
    finish_reason: FinishReason | None = None
    stop_text: str | None = None  # the stop string, or the text of the stop id, that ended the row
    error: RequestError | None = None
    # The number of given tokens, at the end, whose hidden states are pooled into columns.
    num_pooled_tokens: int = 0
    num_states_taken: int = 0  # how many hidden states have been scored or pooled
    num_broken_states: int = 0  # how many of these, or of their logits, had NaN or infinity
    constraint_satisfied: bool = False  # whether the output is complete by the constraint
    context_columns: tuple[str, ...] = field(init=False)
    # The columns of tail scope, once the row has ended: [M, *tail] for the M tokens after its last
    # one.
    tail: dict[str, npt.NDArray[Any]] = field(init=False)
    # The columns of output, edits, answer or row scope.
    columns: dict[str, ColumnBuffer | PooledValue] = field(init=False)
    num_prompt_tokens: int = field(init=False)  # given tokens, including those of an answer
    runs: tuple[ImageRun, ...] = field(init=False)  # the runs of images whose tokens see each other

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.token_ids)
        self.runs = runs_of(self.spans)
        self.columns = self._empty_columns()
        requested = self.requested_columns
        self.context_columns = tuple(c.name for c in requested if c.scope == "context")
        empty = {c.name: np.empty((0, *c.tail_shape), c.dtype) for c in requested}
        self.tail = {c.name: empty[c.name] for c in requested if c.scope == "tail"}

    def _empty_columns(self) -> dict[str, ColumnBuffer | PooledValue]:
        separate = ("context", "tail")
        return {c.name: self._empty(c) for c in self.requested_columns if c.scope not in separate}

    def _empty(self, column: OutputColumn) -> ColumnBuffer | PooledValue:
        if column.scope == "edits":
            return EditBuffer(column)
        if column.scope != "row":
            return ColumnBuffer(column)
        assert self.params.pooling is not None
        return PooledValue(column, self.params.pooling, normalise=self.params.normalise)

    @property
    def prefix_root(self) -> bytes:
        """Bytes that rows must have in common, besides their tokens, to share cached blocks."""
        adapter = b"" if not self.adapter else b"lora %d" % self.adapter
        return adapter + (b" long" if self.rope_offset else b"")

    @property
    def rope_shift(self) -> int:
        """The rotary position of a token after all images, minus its index in the row."""
        return self.rope_offset + rope_shift(self.spans)

    def last_border(self, end: int) -> int:
        """Return the last position up to `end` where a prefill chunk may end: outside every image
        run."""
        return next((run.start for run in self.runs if run.start < end < run.end), end)

    def end_of_run(self, position: int) -> int:
        """Return the end of the image run that contains this position; `position + 1` if none
        does."""
        inside = (run.end for run in self.runs if run.start <= position < run.end)
        return next(inside, position + 1)

    def images_among(self, start: int, end: int) -> bytes:
        """Return bytes that identify the images to which tokens from `start` to `end` belong or
        attend: the images' digests and where they begin."""
        if not self.spans:
            return b""
        seen = max(end, self.end_of_run(end - 1))
        return b"".join(
            span.image.digest + (start - span.start).to_bytes(8, "little", signed=True)
            for span in self.spans
            if span.overlaps(start, seen)
        )

    @property
    def num_tokens(self) -> int:
        """The number of committed tokens in `token_ids`, including the prompt."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """The number of generated tokens in `token_ids`."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def answer_start(self) -> int:
        """The number of given tokens before the answer."""
        return self.num_prompt_tokens - self.num_answer_tokens

    @property
    def generates(self) -> bool:
        """Whether the row generates tokens, instead of being only scored or pooled."""
        return not (self.num_answer_tokens or self.num_pooled_tokens)

    @property
    def next_state(self) -> int:
        """The position of the next token whose hidden state is needed, to score a token of the
        answer or to be pooled; counts the steps that were read."""
        if self.num_answer_tokens:
            return self.answer_start - 1 + self.num_states_taken
        return self.num_prompt_tokens - self.num_pooled_tokens + self.num_states_taken

    @property
    def num_shareable_tokens(self) -> int:
        """How many of the first tokens may come from the prefix cache, because their hidden states
        are not needed."""
        if not self.generates:
            return self.next_state
        # The last token's hidden state yields the next token.
        return self.num_prefill_tokens - (1 if self.prefill_yields else 0)

    @property
    def resumed(self) -> bool:
        """Whether the row had generated tokens before its admission: because of a preemption, or in
        an earlier engine."""
        return self.num_generated > 0

    @property
    def is_prefilling(self) -> bool:
        """Whether the row runs and still has prompt tokens that no scheduled batch reads."""
        return self.batch_slot is not None and self.num_computed_tokens < self.num_prefill_tokens

    @property
    def max_tokens(self) -> int:
        """The most prompt and output tokens that the row can have together."""
        return self.num_prompt_tokens + self.stop.max_new_tokens

    @property
    def num_remaining(self) -> int:
        """The most tokens that the row can still generate."""
        return self.max_tokens - self.num_tokens

    def append(self, token_ids: list[int], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Commit n tokens with their values [n, *tail] of each column of output scope. The forward
        that produced the last of them has read all tokens before it."""
        self.token_ids.extend(token_ids)
        self.num_computed_tokens = self.num_tokens - 1
        for name, buffer in self.columns.items():
            buffer.extend(columns[name])
            assert len(buffer) == self.num_generated, f"column {name} lost step with the tokens"

    def go_on_from(self, begun: Begun) -> None:
        """Continue a new row from what an earlier engine has generated, like a preempted row."""
        self.append(begun.token_ids, begun.columns)
        self.num_computed_tokens = 0
        self.counts = dict(begun.counts)
        if self.context_columns:
            self.context = ContextRows(begun.columns, self.num_tokens - 1)

    def begin_again(self) -> None:
        """Discard everything that was generated of a row that does not run."""
        del self.token_ids[self.num_prompt_tokens :]
        self.columns, self.counts, self.context = self._empty_columns(), {}, ContextRows()
        if self.stop.decoder is not None:
            self.stop.decoder.clear()

    def take_states(self, columns: Mapping[str, npt.NDArray[Any]], count: int) -> None:
        """Receive the results of the next `count` hidden states: the values [count, *tail] of each
        column of answer or row scope."""
        for name, buffer in self.columns.items():
            buffer.extend(columns[name])
        self.num_states_taken += count

    def keep_tail(
        self, token_ids: npt.NDArray[np.int64], columns: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Store the columns of tail scope: the M tokens [M] that the last step yielded after the
        row's last token, and the columns [M, *tail] of these tokens."""
        values = {"token_ids": token_ids, **columns}
        for name, empty in self.tail.items():
            self.tail[name] = values[name.removeprefix(TAIL)].astype(empty.dtype)

    def fail(self, error: RequestError) -> None:
        """End the row with an error. Tokens that it has generated are kept."""
        self.error = error
        self.finish("error", None)

    def finish(self, reason: FinishReason, stop_text: str | None) -> None:
        """End the row. `stop_text` is the stop string, or the text of the stop id, that ended it;
        else None."""
        self.finish_reason = reason
        self.stop_text = stop_text
        if self.matcher is not None:
            # A stop string cuts the text, so the remaining text is not what the matcher has
            # checked.
            whole = self.stop.text_before_stop is None and reason != "error"
            self.constraint_satisfied = whole and self.matcher.satisfied
            self.matcher = None
