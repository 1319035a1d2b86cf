"""What the engine returns for its rows: tokens, columns with a value per token, counts per row."""

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
    """A column with one value per token, declared beside the code that computes it."""

    name: str  # the column's name in `RequestOutput.columns` and in the Parquet files
    dtype: np.dtype[Any]  # the dtype of its elements
    tail_shape: tuple[int, ...] = ()  # the shape of one token's value; `()` is a scalar
    # `output` columns have one value for each generated token, and a strategy puts them into
    # `StepOutput.columns`. `tail` columns have one for each token that the row's last step yielded
    # behind its last one: what tail_X has are the token ids or the column X there. `edits` columns
    # have one for each token that was replaced before it was yielded; of a step they are as
    # `EditBuffer` takes them. `context` columns have one value for each token that the model has
    # read (the prompt and all generated or given tokens but the last), and a layer of the model
    # writes them with `ForwardContext.record`. `answer` columns have one value for each token of a
    # given answer, and the sampler puts them into `StepOutput.columns`. `choice` columns have one
    # value for each choice of a row's constraint, and the job makes them. `row` columns have one
    # value for the whole row, which is pooled from the hidden states of the tokens that were read.
    scope: Scope = "output"
    # Further facts, as pairs of a name and a text, that readers of the output files need to
    # understand the values, such as which layers they are of.
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RowCount:
    """One integer per row that says what the row cost, declared beside the code that counts it. A
    strategy lists its counts in `Strategy.counts` and puts what each step adds to them into
    `StepOutput.counts`. The sums arrive in `RequestOutput.counts` and in the output files."""

    name: str  # the count's name in `RequestOutput.counts`, and the column's in the Parquet files
    meaning: str  # one phrase that explains it to readers of the output files


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced for its B rows, with at most W tokens per row."""

    num_tokens: Tensor  # [B] int32, how many of the W tokens the step produced for each row
    token_ids: Tensor  # [B, W] int64; entries past `num_tokens` are undefined
    # [B] bool, the rows whose logits hold NaN or infinity. They end after `num_tokens` tokens.
    failed: Tensor
    # Maps the name of each column of output scope to [B, W, *tail], a value for each token; entries
    # past `num_tokens` are undefined.
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    # Maps the name of a `RowCount` to what this step adds to it. A tensor [B] of integers is added
    # as it is. A tensor [B, W] gives a number for each token, and only those of tokens that the row
    # keeps are added, because a stop may cut some off.
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    # Maps names to values [B, ...] that only `Strategy.observe` reads, on the host.
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    # How many of a row's newest tokens may have no entry in the cache of some model after this
    # step. It is 1 if only the newest token has none; the next forward reads that token.
    unread_tokens: int = 1
    # [B] bool, the rows whose constraint allows no token that the other sampling options leave.
    # They end after `num_tokens` tokens, and none of them is in `failed`. None if no row of the
    # step has a constraint.
    conflicts: Tensor | None = None

    @property
    def broken(self) -> Tensor:
        """[B] bool, the rows that end after `num_tokens` because they failed or had a conflict."""
        return self.failed if self.conflicts is None else self.failed | self.conflicts

    def with_counts(self, **counts: Tensor) -> StepOutput:
        """Return the same step with these counts besides those that it has."""
        return replace(self, counts={**self.counts, **counts})

    def index_select(self, rows: npt.NDArray[np.int64]) -> StepOutput:
        """Return the step of the rows with these indices [N], in this order."""
        index = upload(rows, torch.int64, self.token_ids.device)

        def chosen(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor[index] for name, tensor in values.items()}

        return StepOutput(
            self.num_tokens[index],
            self.token_ids[index],
            self.failed[index],
            chosen(self.columns),
            chosen(self.counts),
            chosen(self.observed),
            self.unread_tokens,
            None if self.conflicts is None else self.conflicts[index],
        )

    @classmethod
    def empty(cls, device: torch.device) -> StepOutput:
        """Return a step that has no rows."""
        none = torch.zeros((0, 1), dtype=torch.int64, device=device)
        return cls(none[:, 0].int(), none, none[:, 0].bool())


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
        """[B] bool, the rows that end after `num_tokens` because they failed or had a conflict."""
        return self.failed if self.conflicts is None else self.failed | self.conflicts


_Key = tuple[str, str]
"""The field of `StepOutput` that a tensor belongs to, and its name there."""


class HostCopy:
    """A copy of a `StepOutput` to the host, which starts at once and is waited for only in `wait`.
    All its tensors are packed into one, so there is a single copy."""

    def __init__(self, step: StepOutput) -> None:
        named: dict[_Key, Tensor] = {
            ("step", "num_tokens"): step.num_tokens,
            ("step", "token_ids"): step.token_ids,
            ("step", "failed"): step.failed,
        }
        if step.conflicts is not None:
            named["step", "conflicts"] = step.conflicts
        # The field is part of the key, so a column may have the same name as a field or a count.
        for kind in ("columns", "counts", "observed"):
            named |= {(kind, name): values for name, values in getattr(step, kind).items()}
        self._unread_tokens = step.unread_tokens
        # The widest elements come first, so that each part starts at a multiple of its own size of
        # element.
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
    """The bytes of a tensor, one after another."""
    # A tensor of one element is contiguous to torch whatever its strides are, but only a last
    # stride of 1 lets it be viewed as bytes.
    flat = values.contiguous().as_strided((values.numel(),), (1,))
    return flat.view(torch.uint8)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


@dataclass(frozen=True, slots=True)
class Begun:
    """What a request has generated from some token on, before it has ended. If that is the first
    token, another engine can go on from there."""

    token_ids: list[int]
    # Maps the name of each requested column to its values [N, *tail], one for each of these tokens.
    # Columns of context scope have those of the prompt before them, and none for the last token.
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    # Maps the name of each of the strategy's counts to its value from the first token on.
    counts: Mapping[str, int] = field(default_factory=dict)


class RequestError(ValueError):
    """A request cannot be served. The job makes an error row of it and goes on.

    Attributes:
        type: one word for programs, such as `prompt_too_long`; the message is for people.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: Any  # that of `add_request`, any hashable
    prompt_token_ids: list[int]  # the tokens of the prompt
    token_ids: list[int]  # all generated tokens, including the EOS or stop id that ended the row
    text: str  # the generated tokens decoded without special tokens, and cut before a stop string
    # `stop` (EOS, a stop id or a stop string), `length` (the most tokens were reached),
    # `constraint_conflict` (the constraint allows no token that the other parameters leave),
    # `scored` (the row had an answer whose tokens were all scored), `read` (the row was to be read
    # alone, and all its tokens were) or `error`. A job whose model writes Harmony makes `tool_call`
    # and `no_answer` of some that are `stop` to the engine.
    finish_reason: FinishReason
    # The stop string, or the text of the stop id, that ended the row; else None.
    stop: str | None = None
    # The error if finish_reason is `error`; tokens generated before it are kept.
    error: RequestError | None = None
    # Maps the name of each requested column to its values [N, *tail]. N is the number of generated
    # tokens; for a column of context scope it is the number of all tokens, prompt included, less
    # one, or of all if the row was to be read alone; for one of answer scope it is the number of
    # the answer's tokens. A column of row scope has one value [*tail].
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    # Maps the name of each of the strategy's counts to its value for this row.
    counts: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0  # the number of prompt tokens that came from the prefix cache
    # How often the row lost its cache entries to others and was recomputed.
    num_preemptions: int = 0
    # Whether the text is complete by its constraint; None if there is none.
    constraint_satisfied: bool | None = None
    answer_token_ids: list[int] | None = None  # the given answer's tokens; None if there is none
    # Whether a replay has the log-probabilities with which the tokens were drawn, if the model is
    # the one that drew them; None if nothing is replayed.
    replay_exact: bool | None = None
