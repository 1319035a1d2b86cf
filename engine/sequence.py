"""One row being generated, as the host knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.outputs import FinishReason, OutputColumn, RequestError
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.stopping import StopRule


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class ColumnBuffer:
    """A growing array [n, *tail] with room to spare, so that appending a token is O(1)."""

    def __init__(self, column: OutputColumn) -> None:
        self._column = column
        self._tail = tuple(slice(size) for size in column.tail_shape)
        self._data = np.empty((16, *column.tail_shape), column.dtype)
        self._length = 0

    def extend(self, rows: npt.NDArray[Any]) -> None:
        """Append rows [n, *wider tail]: a batch's tensors are as wide as its widest row asks."""
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
        return self._data[: self._length].copy()


@dataclass(eq=False)
class Sequence:
    """Token history, columns and KV ownership of one request.

    `token_ids` holds committed tokens only, prompt first; no placeholder ever enters it. While the
    row decodes, `RowTable` counts its tokens and holds the newest. The KV of its first
    `num_computed_tokens` tokens is, or will be once the launched forwards have run, in the blocks
    of `block_table`, which may reach further: those slots are reserved.

    Attributes:
        slot: its place in the RowTable while it decodes.
        matcher: where its output stands in its constraint; None if it has none, and at its end.
        columns: requested output columns, one buffer each, a row per generated token.
        stop: when the row ends.
        block_hashes: prefix-cache digests of its first full blocks.
        num_published_blocks: of its blocks, how many others may share.
        num_prefill_tokens: of its known tokens, those that are read before it decodes.
        prefill_yields: its prefill ends with a token.
        num_shared_tokens: of its computed tokens, those found in the prefix cache.
        num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
        num_forwards, num_commit_forwards, num_draft_tokens, num_accepted_tokens: as in
            `RequestOutput`, up to when the row last decoded.
        constraint_satisfied: its output is complete by its constraint; known at its end.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    stop: StopRule
    requested_columns: tuple[OutputColumn, ...]
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    matcher: Matcher | None = None
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    num_prefill_tokens: int = 0
    prefill_yields: bool = True
    num_shared_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_forwards: int = 0
    num_commit_forwards: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    error: RequestError | None = None
    constraint_satisfied: bool = False
    columns: dict[str, ColumnBuffer] = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.token_ids)
        self.columns = {column.name: ColumnBuffer(column) for column in self.requested_columns}

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def resumed(self) -> bool:
        """It has tokens of its own already: it lost its KV to others."""
        return self.num_generated > 0

    @property
    def max_tokens(self) -> int:
        """Prompt and output tokens at most; the row's KV never needs more."""
        return self.num_prompt_tokens + self.stop.max_new_tokens

    def append(self, token_ids: list[int], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Commit new tokens with their columns [n, *tail].

        The KV of everything before the last token is computed once the forward that produced it
        is done, so that is what `num_computed_tokens` becomes.
        """
        self.token_ids.extend(token_ids)
        self.num_computed_tokens = self.num_tokens - 1
        for name, buffer in self.columns.items():
            buffer.extend(columns[name])
            assert len(buffer) == self.num_generated, f"column {name} lost step with the tokens"

    def fail(self, error: RequestError) -> None:
        self.error = error
        self.finish("error", None)

    def finish(self, reason: FinishReason, stop_text: str | None) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_text = stop_text
        if self.matcher is not None:
            # A stop string cuts the text, so it is not what the matcher saw.
            whole = self.stop.text_before_stop is None and reason != "error"
            self.constraint_satisfied = whole and self.matcher.satisfied
            self.matcher = None
