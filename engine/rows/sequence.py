"""A row that is being generated, as the host knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.base.outputs import FinishReason, OutputColumn, RequestError
from batchgen.engine.caches.context_columns import ContextRows
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """What a row does: it waits to be admitted, runs and owns blocks of the cache, or has ended."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class ColumnBuffer:
    """A growing array [n, *tail] of a column's values, with amortised O(1) time per append."""

    def __init__(self, column: OutputColumn) -> None:
        self._column = column
        self._tail = tuple(slice(size) for size in column.tail_shape)
        self._data = np.empty((16, *column.tail_shape), column.dtype)
        self._length = 0

    def extend(self, rows: npt.NDArray[Any]) -> None:
        """Append the values of n tokens.

        Args:
            rows: [n, *tail]. The tail may be larger than the column's, because a batch's tensors
                are as wide as the widest row asks for; the excess is cut off.
        """
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

    def array(self) -> npt.NDArray[Any]:
        """Return a copy of the values, [n, *tail]."""
        return self._data[: self._length].copy()


@dataclass(eq=False)
class Sequence:
    """A request as a row of tokens, with its columns and what it owns of the caches.

    `token_ids` holds only committed tokens, prompt first, and never a placeholder. While the row
    decodes, its newest tokens are in the `RowTable`. The models have read the first
    `num_computed_tokens` tokens, or will have once the launched forwards have run; what they keep
    of them is in the blocks of `block_table`. Those blocks may hold more tokens than that: their
    remaining KV slots are reserved.

    Attributes:
        request_id: the caller's name for the request.
        token_ids: the prompt and the generated tokens.
        params: what the request asks for.
        stop: the rule by which the row ends.
        requested_columns: the columns that the request asks for.
        status: whether the row waits, runs or has ended.
        place: the row's index in the `RowTable` while it decodes; None otherwise.
        matcher: the state of the row's constraint after its output so far; None if it has no
            constraint, and after its end.
        block_table: the row's blocks of the paged cache, in order.
        state_slot: the row's state slot, in models with recurrent layers; 0 if it has none.
        restore_from: the state slot of a checkpoint that the row starts from, until it is copied.
        branch_tokens: the number of the row's first tokens whose blocks were in the prefix cache at
            its admission, but without a checkpoint after them. Its prefill writes one there,
            because more than one row has these tokens.
        block_hashes: the prefix cache's digests of the row's first full blocks.
        num_computed_tokens: the number of tokens at the row's beginning that the models have read.
        num_published_blocks: the number of the row's first blocks that other rows may share.
        num_prefill_tokens: the number of known tokens that are read before the row decodes.
        prefill_yields: the row's prefill ends with a generated token.
        num_shared_tokens: the number of computed tokens that came from the prefix cache at the
            row's latest admission.
        num_cached_tokens: the number of prompt tokens that came from the prefix cache at the row's
            first admission.
        num_preemptions: how often the row lost its cache entries to other rows.
        counts: maps the name of each of the strategy's counts to its value when the row last left
            the decoding rows.
        context: the values of the row's columns of context scope that were read so far.
        finish_reason: why the row ended; None before.
        stop_text: the stop string, or the text of the stop id, that ended the row.
        error: the error that ended the row.
        constraint_satisfied: the output is complete by the row's constraint; set at its end.
        context_columns: the names of the requested columns of context scope.
        columns: maps the name of each requested column of output scope to its values, one for each
            generated token.
        num_prompt_tokens: the number of tokens in the prompt.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    stop: StopRule
    requested_columns: tuple[OutputColumn, ...]
    status: SequenceStatus = SequenceStatus.WAITING
    place: int | None = None
    matcher: Matcher | None = None
    block_table: list[int] = field(default_factory=list)
    state_slot: int = 0
    restore_from: int | None = None
    branch_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    num_prefill_tokens: int = 0
    prefill_yields: bool = True
    num_shared_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    context: ContextRows = field(default_factory=ContextRows)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    error: RequestError | None = None
    constraint_satisfied: bool = False
    context_columns: tuple[str, ...] = field(init=False)
    columns: dict[str, ColumnBuffer] = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.token_ids)
        requested = self.requested_columns
        self.columns = {c.name: ColumnBuffer(c) for c in requested if c.scope == "output"}
        self.context_columns = tuple(c.name for c in requested if c.scope == "context")

    @property
    def num_tokens(self) -> int:
        """The number of committed tokens in `token_ids`, prompt included."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """The number of generated tokens in `token_ids`."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def resumed(self) -> bool:
        """Whether the row has generated tokens before it is admitted again after a preemption."""
        return self.num_generated > 0

    @property
    def max_tokens(self) -> int:
        """The most tokens that the row can have, prompt and output together."""
        return self.num_prompt_tokens + self.stop.max_new_tokens

    def append(self, token_ids: list[int], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Commit new tokens with their columns.

        The forward that produced the last token has read all tokens before it, so
        `num_computed_tokens` becomes the number of those.

        Args:
            token_ids: n tokens.
            columns: maps the name of each column of output scope to its values [n, *tail].
        """
        self.token_ids.extend(token_ids)
        self.num_computed_tokens = self.num_tokens - 1
        for name, buffer in self.columns.items():
            buffer.extend(columns[name])
            assert len(buffer) == self.num_generated, f"column {name} lost step with the tokens"

    def fail(self, error: RequestError) -> None:
        """End the row with an error; tokens that it has generated are kept."""
        self.error = error
        self.finish("error", None)

    def finish(self, reason: FinishReason, stop_text: str | None) -> None:
        """End the row.

        Args:
            reason: why it ends.
            stop_text: the stop string, or the text of the stop id, if the reason is `stop`.
        """
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_text = stop_text
        if self.matcher is not None:
            # A stop string cuts the text, so the text is not what the matcher has checked.
            whole = self.stop.text_before_stop is None and reason != "error"
            self.constraint_satisfied = whole and self.matcher.satisfied
            self.matcher = None
