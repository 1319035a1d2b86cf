"""The base class of decoding paradigms, `Strategy`, and the declarations of the models that they
run.

The paradigms themselves are in `strategies/`, one folder each. The engine calls them only through
this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.interface.trajectory import Trajectory
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.sampling.sampler import sample_tokens
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.pacing import Pacing
from batchgen.engine.step_inputs import JoiningRows, StepInputs

TARGET = "target"
"""The name of the target model among a strategy's models: the model whose tokens are generated."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The source of a separate model, such as a draft model: a checkpoint that an option of the
    strategy names."""

    option: str
    # The option's value, a hub name or a path; None if the user gave none.
    path: str | None
    # What the model is needed for, as the end of the sentence "OPTION is null, but …".
    purpose: str


@dataclass(frozen=True, slots=True)
class Head:
    """The source of a model that is part of the target's checkpoint and continues from the target's
    hidden states."""

    # One of `ModelConfig.heads`.
    name: str
    # What asks for the head, as the beginning of the sentence "PURPOSE needs …".
    purpose: str
    # What a user can do if the model has no such head.
    instead: str


@dataclass(frozen=True, slots=True)
class ModelRole:
    """One of the models that a strategy runs; the engine builds a runner for each."""

    # The numbers of tokens per row that a decode forward can have, ascending. The sizes of caches
    # and CUDA graphs follow from them.
    widths: tuple[int, ...]
    # The most rows in a decode forward for each row of the batch.
    forward_rows: int = 1
    # The cached value of a token depends on this many tokens after it: 1 for a head that reads the
    # next token together with a hidden state.
    tokens_ahead: int = 0
    # Where the model comes from; None means the target itself.
    source: Checkpoint | Head | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that determine the size of a strategy's state."""

    max_rows: int
    max_model_len: int
    vocab_size: int
    device: torch.device


class Strategy(Pacing, ABC):
    """A decoding paradigm: decides what a forward reads and which tokens it yields.

    A subclass must define `name`, `step_inputs` and `decide`. All other defaults describe a
    paradigm of one token per row and step, which allows every option and keeps no state but the
    rows.

    A decode step calls `step_inputs.reindex`, `propose`, `forward`, `decide` and
    `step_inputs.step_decode`, in this order.

    A prefill runs the target's forward. Then it calls `first_tokens` for the rows whose prefill
    yields a token, `prefilled`, and `step_inputs.merge_prefill` for the rows whose prefill is
    complete.

    A mixed step does both, with one forward for all tokens.

    Attributes:
        name: the paradigm's name in the configuration.
        columns: the columns of output scope that the paradigm can produce, besides the sampler's.
        counts: the numbers that the paradigm counts for each row.
        decoding: the class of the options that can be set per row (`RequestParams.decoding`); None
            if there are none.
    """

    name: str
    columns: tuple[OutputColumn, ...] = ()
    counts: tuple[RowCount, ...] = ()
    decoding: type | None = None

    # Each step

    @property
    @abstractmethod
    def step_inputs(self) -> StepInputs:
        """The state that the paradigm keeps of its rows between steps."""

    @property
    def proposes_from_guide(self) -> bool:
        """Whether `propose` uses the matchers of constrained rows. If so, the engine reads all
        earlier steps before `propose` instead of before `decide`."""
        return False

    @property
    def depends_on_drafts(self) -> bool:
        """Whether a row's tokens depend on how its drafts were made, and not only on which drafts
        they are."""
        return False

    @property
    def by_schedule(self) -> frozenset[str]:
        """The names of the counts and columns that depend on the other rows of a batch, on clocks
        or on preemption. All other counts and columns depend on the row alone."""
        return frozenset()

    def propose(self, batch: DecodeBatch) -> None:
        """Complete the inputs of the step's forward, for example with drafts."""

    def forward(
        self, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        """Run the target's forward of a step. Returns its output for the decoding rows, and for the
        prefill if there is one.

        Args:
            prefill: prompt tokens to read together with the decoding rows; None if there are none.
                Only steps of width 1 have a prefill.
        """
        inputs = self.step_inputs.model_inputs
        if prefill is None:
            return runner.decode(inputs), None
        return runner.mixed(inputs, prefill)

    @abstractmethod
    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """Decide the rows' tokens and columns from the logits of a decode forward.

        Args:
            guide: makes the masks of the constrained rows, whose matchers have read all tokens so
                far; None if no row is constrained.
        """

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        """Decide the first token of each row from the logits at the end of its prefill."""
        mask = None if rows.guide is None else rows.guide.mask(output.logits)
        return sample_tokens(output.divided, rows.sampling, output.positions + 1, mask=mask)

    def prefilled(
        self, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None, newest: Tensor
    ) -> None:
        """Receive the tokens and hidden states of a prefill after the target's forward.

        Args:
            inputs: the prefill's T tokens, as the forward read them. If the strategy
                `needs_hidden`, every row of the batch has at least one.
            hidden: [T, hidden_size], the tokens' hidden states; None unless `needs_hidden`.
            newest: [J] int64, for each of the J rows of `batch.completing` the token that follows
                what the target has read: the token that the prefill yielded, or else the newest
                known one.
        """

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Receive the results of a decode step of B rows after the host has read them.

        Args:
            current: [B], the rows that have not left since the step was launched.
        """

    # Once, before the first step

    @classmethod
    def decoding_of_row(cls, values: Mapping[str, Any]) -> object:
        """Make the options of one row (`RequestParams.decoding`) from their values by name. Raises
        ValueError, naming the option, if one cannot be honoured."""
        raise ValueError(f"rows of strategy {cls.name} have no options of their own")

    @property
    def models(self) -> Mapping[str, ModelRole]:
        """The models that the strategy runs, by name; `TARGET` is among them."""
        return {TARGET: ModelRole(widths=(1,))}

    @property
    def needs_hidden(self) -> bool:
        """Whether the strategy reads the target's hidden states of all tokens."""
        return False

    def block_length(self, model: ModelConfig) -> int:
        """Return the block length of the model's attention, which is causal between blocks and full
        inside a block; 1 is ordinary causal attention.

        Raises:
            ValueError: the strategy cannot run the model; the message says which one can.
        """
        if model.canvas_length is not None:
            raise ValueError(
                f"{model.architecture} denoises canvases of {model.canvas_length} tokens, so "
                f"strategy {self.name} cannot run it; use strategy=canvas"
            )
        if model.diffusion is not None:
            raise ValueError(
                f"{model.architecture} is a diffusion model: its logits are of masked tokens, not "
                f"of next ones, so strategy {self.name} cannot run it; use strategy=dllm"
            )
        return 1

    def model_len(self, longest: int, model: ModelConfig) -> int:
        """Return the most prompt and output tokens that a row can have together. Raises ValueError
        if no row could have any token.

        Args:
            longest: the limit that model and user set.
        """
        return longest

    def check(self, params: RequestParams, *, replays: bool = False) -> None:
        """Raise ValueError, naming the option, if the strategy cannot honour these parameters.
        `replays` says whether the request scores a trajectory: an answer with its step map."""
        if replays:
            raise ValueError(
                "a step map says in which order a diffusion model unmasked an answer, and strategy "
                f"{self.name} reads it from left to right: leave prompt.answer_step_map_column out"
            )

    def is_exact(
        self, trajectory: Trajectory, num_prompt_tokens: int, params: RequestParams
    ) -> bool:
        """Return whether the replay of a trajectory is exact: whether each forward reads what the
        forward read that drew the trajectory's tokens. Only called if `check` allows replays.

        Raises:
            RequestError: `bad_step_map`, for steps that no row can have had.
        """
        raise NotImplementedError

    def allocate(self, limits: Limits) -> None:
        """Allocate the strategy's own state on the device. Called before the caches take the
        remaining memory."""

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        """Receive the runners of the strategy's models, by name."""

    # What the job shows

    def stats(self) -> Mapping[str, Any]:
        """Return statistics of all steps so far for metrics.json: numbers, texts, lists,
        mappings."""
        return {}

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        """Return lines for the table at the end of a job, each a name and a value.

        Args:
            counts: maps the name of each of the strategy's counts to its sum over the job's rows.
            stats: the result of `stats` for this run; empty if the run computed nothing.
            num_tokens: the number of tokens that the job's rows generated.
        """
        return []

    def remark(self, counts: Mapping[str, int]) -> str | None:
        """Return advice for the user, as a sentence, if the strategy's options did not suit the
        job; else None. `counts` is as for `summary`."""
        return None
