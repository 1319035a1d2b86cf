"""What the engine returns for its rows: tokens, columns with a value per token, and counts per
row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import Download, upload

FinishReason = Literal[
    "stop", "length", "constraint_conflict", "scored", "read", "error", "tool_call", "no_answer"
]
"""Why a row ended; `RequestOutput.finish_reason` explains each."""
Scope = Literal["output", "edits", "tail", "context", "answer", "choice", "row"]
"""Which tokens a column has values for; `OutputColumn.scope` explains each."""


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column with one value per token, declared next to the code that computes it."""

    name: str  # the column's name in `RequestOutput.columns` and in the Parquet files
    dtype: np.dtype[Any]  # the dtype of its elements
    tail_shape: tuple[int, ...] = ()  # the shape of one token's value; `()` is a scalar
    # Which tokens the column has values for, and who computes them:
    # `output`: each generated token. A strategy puts the values into `StepOutput.columns`.
    # `tail`: each token that the row's last step yielded after the row's last token. The column
    # tail_X has the values of the column X (or the token ids) there.
    # `edits`: each token that was replaced before it was yielded, in the layout of `EditBuffer`.
    # `context`: each token that the model has read: the prompt, and all generated or given tokens
    # but the last. A layer writes the values with `ForwardContext.record`.
    # `answer`: each token of a given answer. The sampler puts the values into `StepOutput.columns`.
    # `choice`: each choice of a row's constraint. The job computes the values.
    # `row`: the whole row, one value, pooled from the hidden states of its tokens.
    scope: Scope = "output"
    # Facts that readers of the output files need to understand the values, as pairs of a name and a
    # text: for example, which layers the values are from.
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RowCount:
    """An integer per row that says what the row cost, declared next to the code that counts it.

    A strategy lists its counts in `Strategy.counts` and puts each step's contribution into
    `StepOutput.counts`. The sums arrive in `RequestOutput.counts` and in the output files.
    """

    name: str  # the name in `RequestOutput.counts`, and of the column in the Parquet files
    meaning: str  # one phrase that explains it to readers of the output files


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step for its B rows, with at most W tokens per row."""

    num_tokens: Tensor  # [B] int32, how many of the W tokens the step produced for each row
    token_ids: Tensor  # [B, W] int64; entries past `num_tokens` are undefined
    # [B] bool, the rows whose logits hold NaN or infinity. They end after `num_tokens` tokens.
    failed: Tensor
    # Maps the name of each column of output scope to [B, W, *tail], a value for each token; entries
    # past `num_tokens` are undefined.
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    # Maps the name of a `RowCount` to this step's contribution. A tensor [B] of integers is added
    # as it is. A tensor [B, W] has a number for each token; only those of tokens that the row keeps
    # are added, because a stop may cut off some.
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    # Maps names to values [B, ...] that only `Strategy.observe` reads, on the host.
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    # How many of a row's newest tokens may be missing in some model's cache after this step. It is
    # 1 if only the newest token is missing, which the next forward reads.
    unread_tokens: int = 1
    # [B] bool, the rows whose constraint excludes every token that the other sampling options
    # allow. They end after `num_tokens` tokens, and none of them is in `failed`. None if no row of
    # the step has a constraint.
    conflicts: Tensor | None = None

    @property
    def broken(self) -> Tensor:
        """The rows that end after `num_tokens` tokens because they failed or had a conflict, [B]
        bool."""
        return self.failed if self.conflicts is None else self.failed | self.conflicts

    def with_counts(self, **counts: Tensor) -> StepOutput:
        """Return a copy of the step with additional counts."""
        return replace(self, counts={**self.counts, **counts})

    def index_select(self, rows: npt.NDArray[np.int64]) -> StepOutput:
        """Return the step's rows at the indices `rows` [N], in this order."""
        index = upload(rows, torch.int64, self.token_ids.device)

        def select(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor[index] for name, tensor in values.items()}

        return StepOutput(
            self.num_tokens[index],
            self.token_ids[index],
            self.failed[index],
            select(self.columns),
            select(self.counts),
            select(self.observed),
            self.unread_tokens,
            None if self.conflicts is None else self.conflicts[index],
        )

    @classmethod
    def empty(cls, device: torch.device) -> StepOutput:
        """Return a step without rows."""
        no_tokens = torch.zeros((0, 1), dtype=torch.int64, device=device)
        return cls(no_tokens[:, 0].int(), no_tokens, no_tokens[:, 0].bool())


@dataclass(frozen=True, slots=True)
class HostOutput:
    """A `StepOutput` on the host: the same fields with the same shapes, as numpy arrays."""

    num_tokens: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    columns: Mapping[str, npt.NDArray[Any]]
    counts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    observed: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    unread_tokens: int = 1
    conflicts: npt.NDArray[np.bool_] | None = None

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """The rows that end after `num_tokens` tokens because they failed or had a conflict, [B]
        bool."""
        return self.failed if self.conflicts is None else self.failed | self.conflicts


_Key = tuple[str, str]
"""The field of `StepOutput` that a tensor belongs to, and its name there."""


class HostCopy:
    """A copy of a `StepOutput` to the host. The copy starts at once, and only `wait` waits for it.
    All tensors are packed into one, so that there is a single copy."""

    def __init__(self, step: StepOutput) -> None:
        named: dict[_Key, Tensor] = {
            ("step", "num_tokens"): step.num_tokens,
            ("step", "token_ids"): step.token_ids,
            ("step", "failed"): step.failed,
        }
        if step.conflicts is not None:
            named["step", "conflicts"] = step.conflicts
        # The field is part of the key, because a column may have the same name as a field or a
        # count.
        for kind in ("columns", "counts", "observed"):
            named |= {(kind, name): values for name, values in getattr(step, kind).items()}
        self._unread_tokens = step.unread_tokens
        # The widest elements come first, so that each part is aligned to its own element size.
        parts = sorted(named.items(), key=lambda item: -item[1].itemsize)
        self._layout = [(key, _numpy_dtype(values.dtype), values.shape) for key, values in parts]
        self._download = Download(torch.cat([_bytes(values) for _, values in parts]))

    def wait(self) -> HostOutput:
        """Wait for the copy and return the step."""
        buffer, start = self._download.wait(), 0
        kinds: dict[str, dict[str, npt.NDArray[Any]]] = {
            "step": {}, "columns": {}, "counts": {}, "observed": {}
        }  # fmt: skip
        for (kind, name), dtype, shape in self._layout:
            size = dtype.itemsize * shape.numel()
            kinds[kind][name] = buffer[start : start + size].view(dtype).reshape(shape)
            start += size
        return HostOutput(
            num_tokens=kinds["step"]["num_tokens"],
            token_ids=kinds["step"]["token_ids"],
            failed=kinds["step"]["failed"],
            conflicts=kinds["step"].get("conflicts"),
            columns=kinds["columns"],
            counts=kinds["counts"],
            observed=kinds["observed"],
            unread_tokens=self._unread_tokens,
        )


def _bytes(values: Tensor) -> Tensor:
    """Return a tensor's bytes as a flat uint8 tensor."""
    # torch regards a tensor of one element as contiguous whatever its strides, but can view it as
    # bytes only if its last stride is 1.
    flat = values.contiguous().as_strided((values.numel(),), (1,))
    return flat.view(torch.uint8)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


@dataclass(frozen=True, slots=True)
class Begun:
    """What an unfinished request has generated from some token on. If that is the first output
    token, another engine can continue the request."""

    token_ids: list[int]
    # Maps the name of each requested column to its values [N, *tail], one for each of these tokens.
    # Columns of context scope also have values for the prompt tokens before them, and none for the
    # last token.
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    # Maps the name of each of the strategy's counts to its value since the first token.
    counts: Mapping[str, int] = field(default_factory=dict)


class RequestError(ValueError):
    """A request that cannot be served. The job writes an error row for it and continues.

    Attributes:
        type: one word for programs, such as `prompt_too_long`; the message is for people.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: Any  # the id passed to `add_request`
    prompt_token_ids: list[int]  # the tokens of the prompt
    token_ids: list[int]  # all generated tokens, including the EOS or stop id that ended the row
    text: str  # the generated tokens decoded without special tokens, and cut before a stop string
    # Why the request finished:
    # `stop`: EOS, a stop id or a stop string.
    # `length`: the limit of tokens was reached.
    # `constraint_conflict`: the constraint excludes every token that the other parameters allow.
    # `scored`: all tokens of the given answer were scored.
    # `read`: all tokens were read, of a row that generates none.
    # `error`: see `error`.
    # A job whose model writes Harmony turns some `stop` into `tool_call` or `no_answer`.
    finish_reason: FinishReason
    # The stop string, or the text of the stop id, that ended the row; else None.
    stop: str | None = None
    # The error if finish_reason is `error`; tokens generated before it are kept.
    error: RequestError | None = None
    # Maps the name of each requested column to its values [N, *tail]. N is the number of generated
    # tokens. For a column of context scope, N is the number of all tokens including the prompt,
    # less one unless the row generated nothing. For a column of answer scope, N is the number of
    # the answer's tokens. A column of row scope has one value [*tail].
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    # Maps the name of each of the strategy's counts to its value for this row.
    counts: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0  # the number of prompt tokens that came from the prefix cache
    # How often the row lost its cache entries to other rows and was computed again.
    num_preemptions: int = 0
    # Whether the text is complete by its constraint; None without a constraint.
    constraint_satisfied: bool | None = None
    answer_token_ids: list[int] | None = None  # the given answer's tokens; None if there is none
    # Whether a replay computes the log-probabilities with which the tokens were drawn, assuming
    # that the same model drew them; None if nothing was replayed.
    replay_exact: bool | None = None
