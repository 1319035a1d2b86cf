"""Columns: what is known about every generated token, from the step that computes it to the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.execution.transfer import Download, upload

FinishReason = Literal["stop", "length", "constraint_conflict", "error"]
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
        failed: [B] bool, rows whose logits are not numbers; they produced nothing after num_tokens.
        columns: name → [B, W, *tail]; entries past `num_tokens` are undefined.
        num_drafts: [B] int32, proposed to each row; None if the step was without drafts.
        commits: [B] bool, rows whose forward could yield nothing: it made KV final that the tokens
            before it had left open; None where there is no such thing.
        unread_tokens: after the step, newest tokens of each row without KV in some model's cache,
            at most.
        conflicts: [B] bool, rows whose constraint allowed no token that was left; they produced
            nothing after num_tokens, and none of them is in failed. None if no row has a
            constraint.
    """

    num_tokens: torch.Tensor
    token_ids: torch.Tensor
    failed: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_drafts: torch.Tensor | None = None
    commits: torch.Tensor | None = None
    unread_tokens: int = 1
    conflicts: torch.Tensor | None = None

    @property
    def broken(self) -> torch.Tensor:
        """[B] bool, rows that cannot go on after num_tokens."""
        return self.failed if self.conflicts is None else self.failed | self.conflicts

    def index_select(self, rows: npt.NDArray[np.int64]) -> StepOutput:
        """Of these rows, in this order."""
        index = upload(rows, torch.int64, self.token_ids.device)
        return StepOutput(
            self.num_tokens[index],
            self.token_ids[index],
            self.failed[index],
            {name: values[index] for name, values in self.columns.items()},
            None if self.num_drafts is None else self.num_drafts[index],
            None if self.commits is None else self.commits[index],
            self.unread_tokens,
            None if self.conflicts is None else self.conflicts[index],
        )

    @classmethod
    def empty(cls, device: torch.device) -> StepOutput:
        """Of no rows."""
        none = torch.zeros((0, 1), dtype=torch.int64, device=device)
        return cls(none[:, 0].int(), none, none[:, 0].bool())


@dataclass(frozen=True, slots=True)
class HostOutput:
    """A StepOutput on the host; the same shapes, as numpy arrays."""

    num_tokens: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    columns: Mapping[str, npt.NDArray[Any]]
    num_drafts: npt.NDArray[np.int32] | None = None
    commits: npt.NDArray[np.bool_] | None = None
    unread_tokens: int = 1
    conflicts: npt.NDArray[np.bool_] | None = None

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """As of `StepOutput`."""
        return self.failed if self.conflicts is None else self.failed | self.conflicts


class HostCopy:
    """A StepOutput on its way to the host: one copy into pinned memory, which nobody waits for
    before `wait`.
    """

    def __init__(self, step: StepOutput) -> None:
        named = {
            "num_tokens": step.num_tokens,
            "token_ids": step.token_ids,
            "failed": step.failed,
            **step.columns,
        }
        self._unread_tokens = step.unread_tokens
        if step.num_drafts is not None:
            named["num_drafts"] = step.num_drafts
        if step.commits is not None:
            named["commits"] = step.commits
        if step.conflicts is not None:
            named["conflicts"] = step.conflicts
        # Widest elements first, so that each part starts at a multiple of its element's size.
        parts = sorted(named.items(), key=lambda item: -item[1].itemsize)
        self._layout = [(name, _numpy_dtype(values.dtype), values.shape) for name, values in parts]
        packed = torch.cat([values.contiguous().view(torch.uint8).flatten() for _, values in parts])
        self._download = Download(packed)

    def wait(self) -> HostOutput:
        buffer, start = self._download.wait(), 0
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, dtype, shape in self._layout:
            size = dtype.itemsize * shape.numel()
            arrays[name] = buffer[start : start + size].view(dtype).reshape(shape)
            start += size
        return HostOutput(
            num_tokens=arrays.pop("num_tokens"),
            token_ids=arrays.pop("token_ids"),
            failed=arrays.pop("failed"),
            num_drafts=arrays.pop("num_drafts", None),
            commits=arrays.pop("commits", None),
            conflicts=arrays.pop("conflicts", None),
            columns=arrays,
            unread_tokens=self._unread_tokens,
        )


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


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
        finish_reason: `stop` (EOS, stop id or stop string), `length`, `constraint_conflict` (the
            constraint allows no token that the other parameters leave) or `error`.
        stop: the stop string, or the text of the stop id, that ended the row.
        error: why, if finish_reason is `error`; what was generated before it is kept.
        columns: name → [num_generated, *tail], as asked for in the sampling parameters.
        constraint_satisfied: the text is complete by its constraint; None if it has none.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_preemptions: how often the row lost its KV to others and was recomputed.
        num_forwards: of the model, that yielded its tokens or made their KV final.
        num_commit_forwards: of those, how many only made KV final.
        num_draft_tokens: proposed for it, in all those forwards.
        num_accepted_tokens: of its tokens, how many were drafts.
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
    num_forwards: int = 0
    num_commit_forwards: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    constraint_satisfied: bool | None = None
