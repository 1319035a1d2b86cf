"""Turns a row that has ended into a finished request, a `RequestOutput`. `Requests.output` calls
this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import decode
from batchgen.engine.sampling.sampler_columns import of_answer
from batchgen.engine.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def request_output(
    seq: Sequence, strategy: Strategy, tokenizer: PreTrainedTokenizerBase | None
) -> RequestOutput:
    """Return the finished request of a row that has ended. Without a tokenizer its text is
    empty."""
    assert seq.finish_reason is not None
    token_ids = seq.token_ids[seq.num_prompt_tokens :]
    if seq.trajectory is not None:
        return _replayed(seq, strategy)
    if seq.stop.text_before_stop is not None:
        text = seq.stop.text_before_stop
    elif tokenizer is None:
        text = ""
    else:
        # A stop id ends the row and is not part of its text.
        text_ids = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
        text = decode(tokenizer, text_ids)
    return RequestOutput(
        request_id=seq.request_id,
        prompt_token_ids=seq.token_ids[: seq.answer_start],
        token_ids=token_ids,
        text=text,
        finish_reason=seq.finish_reason,
        stop=seq.stop_text,
        error=seq.error,
        columns=_columns(seq),
        counts={count.name: seq.counts.get(count.name, 0) for count in strategy.counts},
        num_cached_tokens=seq.num_cached_tokens,
        num_preemptions=seq.num_preemptions,
        constraint_satisfied=(None if seq.params.constraint is None else seq.constraint_satisfied),
        answer_token_ids=(seq.token_ids[seq.answer_start :] if seq.num_answer_tokens else None),
    )


def _replayed(seq: Sequence, strategy: Strategy) -> RequestOutput:
    """Return the finished request of a row that has replayed a trajectory."""
    assert seq.trajectory is not None and seq.finish_reason in ("length", "error")
    num_prompt = seq.num_prompt_tokens
    is_exact = strategy.is_exact(seq.trajectory, num_prompt, seq.params)
    return RequestOutput(
        request_id=seq.request_id,
        prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
        token_ids=[],
        text="",
        finish_reason="scored" if seq.error is None else "error",
        error=seq.error,
        columns=_columns(seq),
        counts={count.name: seq.counts.get(count.name, 0) for count in strategy.counts},
        num_cached_tokens=seq.num_cached_tokens,
        num_preemptions=seq.num_preemptions,
        answer_token_ids=list(seq.trajectory.token_ids),
        replay_exact=is_exact and seq.trajectory.same_distribution,
    )


def _columns(seq: Sequence) -> dict[str, npt.NDArray[Any]]:
    """Return the columns that a row asked for, by name.

    Columns of context scope have one value for each token that a forward has read. That is every
    token but the last one, or every token if the row was only read (for an embedding).
    """
    columns = {name: buffer.array() for name, buffer in seq.columns.items()}
    if seq.trajectory is not None:
        columns = of_answer(columns)
    columns |= seq.tail
    for column in seq.requested_columns:
        if column.scope == "context":
            columns[column.name] = values = seq.context.array(column)
            num_read = seq.num_tokens if seq.num_pooled_tokens else seq.num_tokens - 1
            # A row may fail before its first forward.
            ran = seq.error is None or seq.num_computed_tokens
            assert len(values) == num_read or not ran
    return columns
