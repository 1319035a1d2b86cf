"""Columns: what is known about every generated token, from the step that computes it to the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

FinishReason = Literal["stop", "length", "error"]
Scope = Literal["output", "context"]


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One per-token column, declared beside the code that computes it.

    Attributes:
        name: of the column in `RequestOutput.columns` and in the Parquet files.
        dtype: of its elements.
        tail_shape: of one token's value; `()` is a scalar.
        scope: `output` has a row per generated token, `context` one per token that went through
            the model (prompt + output[:-1]).
    """

    name: str
    dtype: np.dtype[Any]
    tail_shape: tuple[int, ...] = ()
    scope: Scope = "output"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced for each of its B rows, at most W tokens a row.

    Attributes:
        num_tokens: [B] int32, how many of the W tokens of each row are produced.
        token_ids: [B, W] int64.
        failed: [B] bool, rows whose logits are not numbers; they produced nothing.
        columns: name → [B, W, *tail]; entries past `num_tokens` are undefined.
    """

    num_tokens: torch.Tensor
    token_ids: torch.Tensor
    failed: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def to_host(self) -> StepOutput:
        return StepOutput(
            self.num_tokens.cpu(),
            self.token_ids.cpu(),
            self.failed.cpu(),
            {name: values.cpu() for name, values in self.columns.items()},
        )


class RequestError(ValueError):
    """A request that cannot be served; the job makes an error row of it and goes on.

    `type` is one word for programs (`prompt_too_long`, `template_error`, …); the message is for
    people.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: as given to `add_request`.
        token_ids: all generated ids, with the EOS or stop id that ended the row.
        text: decoded without special tokens and cut before a stop string.
        finish_reason: `stop` (EOS, stop id or stop string), `length` or `error`.
        stop: the stop string, or the text of the stop id, that ended the row.
        error: why, if finish_reason is `error`; what was generated before it is kept.
        columns: name → [num_generated, *tail], as asked for in the sampling parameters.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_preemptions: how often the row lost its KV to others and was recomputed.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop: str | None = None
    error: RequestError | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
