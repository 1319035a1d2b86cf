"""The base class of decoding paradigms, and the models that they run; they are in `strategies/`."""

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
"""The name, among a strategy's models, of the model whose tokens are wanted."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The source of a separate model beside the target: a checkpoint that an option names."""

    option: str
    # The option's value, a hub name or a path; None if the user gave none.
    path: str | None
    # What the model is needed for, as the end of the sentence "OPTION is null, but …".
    purpose: str


@dataclass(frozen=True, slots=True)
class Head:
    """The source of a model that is part of the target and continues from its hidden states."""

    # One of `ModelConfig.heads`.
    name: str
    # What asks for the head, as the beginning of the sentence "PURPOSE needs …".
    purpose: str
    # What a user of a model without the head can do.
    instead: str


@dataclass(frozen=True, slots=True)
class ModelRole:
    """One of the models that a strategy runs; the engine builds a runner for each."""

    # Every number of tokens per row that a decode forward can have, ascending. The sizes of
    # caches and CUDA graphs follow from it.
    widths: tuple[int, ...]
    # The most rows that a decode forward has for each row of the batch.
    forward_rows: int = 1
    # What the model keeps in a KV slot depends on this many tokens behind the slot's own: 1
    # for a head that reads the next token beside a hidden state.
    tokens_ahead: int = 0
    # Where the model comes from; None means the target itself.
    source: Checkpoint | Head | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that bound the state which a paradigm keeps."""

    max_rows: int
    max_model_len: int
    vocab_size: int
    device: torch.device


class Strategy(Pacing, ABC):
    """A decoding paradigm: it decides what a forward reads and which tokens come out of it.

    A subclass must give `name`, `step_inputs` and `decide`. The defaults of everything else are
    those of one token per row and step, with every option allowed and nothing kept but the rows.

    A decode step calls `step_inputs.reindex`, `propose`, `forward`, `decide` and
    `step_inputs.step_decode`, in this order. A prefill runs the target's forward. If the prefill of
    some rows is complete, it calls `first_tokens` for those that it yields a token for, then
    `prefilled`, and `step_inputs.merge_prefill` for the complete rows. A mixed step does both, with
    one forward for all tokens.

    Attributes:
        name: the paradigm's name in the configuration.
        columns: the columns of output scope that it can produce besides the sampler's.
        counts: what it counts for each row.
        decoding: the class of options that a row may have of its own
            (`RequestParams.decoding`); None if there are none.
    """

    name: str
    columns: tuple[OutputColumn, ...] = ()
    counts: tuple[RowCount, ...] = ()
    decoding: type | None = None

    # Each step

    @property
    @abstractmethod
    def step_inputs(self) -> StepInputs:
        """Everything that the paradigm keeps of its rows between steps."""

    @property
    def proposes_from_guide(self) -> bool:
        """Whether `propose` uses the matchers of constrained rows. If so, the engine reads all
        earlier steps before `propose`, and not only before `decide`."""
        return False

    @property
    def depends_on_drafts(self) -> bool:
        """Whether tokens depend on how drafts came about, and not only on what they are."""
        return False

    @property
    def by_schedule(self) -> frozenset[str]:
        """The counts and columns, by name, that depend on the rows beside a row, on clocks or on
        preemption. All others depend on the row alone."""
        return frozenset()

    def propose(self, batch: DecodeBatch) -> None:
        """Complete the inputs of the step's forward, for example with drafts."""

    def forward(
        self, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        """Run the step's forward of the target. Returns the forward's output for the decoding rows,
        and for the prefill if there is one.

        Args:
            prefill: prompt tokens to read beside the decoding rows; None if there are none. They
                come only with batches of width 1.
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
                far; None if there are none.
        """

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        """Decide one token for each row from the logits that end its prefill."""
        mask = None if rows.guide is None else rows.guide.mask(output.logits)
        return sample_tokens(output.divided, rows.sampling, output.positions + 1, mask=mask)

    def prefilled(
        self, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None, newest: Tensor
    ) -> None:
        """Take note that the target has read a prefill's tokens.

        Args:
            inputs: the prefill's T tokens, as the forward read them. If the strategy
                `needs_hidden`, every row of the batch has some.
            hidden: [T, hidden_size], the tokens' hidden states; None unless `needs_hidden`.
            newest: [J] int64, for each row of `batch.completing` the token behind those that the
                target has read: the one that the prefill yielded, or the newest one known.
        """

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Look at the results of a decode step of B rows, once the host has read them; `current`
        [B] are the rows that have not left since the step was launched."""

    # Once, before the first step

    @classmethod
    def decoding_of_row(cls, values: Mapping[str, Any]) -> object:
        """Make the options that a row has of its own (`RequestParams.decoding`) of their values by
        name. Raises ValueError, which names the option, if one cannot be honoured."""
        raise ValueError(f"rows of strategy {cls.name} have no options of their own")

    @property
    def models(self) -> Mapping[str, ModelRole]:
        """The models that the strategy runs, by name; `TARGET` is among them."""
        return {TARGET: ModelRole(widths=(1,))}

    @property
    def needs_hidden(self) -> bool:
        """Whether the strategy needs the target's hidden states of all tokens that it reads."""
        return False

    def block_length(self, model: ModelConfig) -> int:
        """Return the number of positions in a block of the model's attention, which is causal over
        blocks and full inside a block; 1 is ordinary causal attention. Raises ValueError if the
        model is not made for the paradigm; the message says what to do."""
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
        """Return the most prompt and output tokens of a row together, at most the `longest` that
        model and user allow. Raises ValueError if no row could have any token."""
        return longest

    def check(self, params: RequestParams, *, replays: bool = False) -> None:
        """Check that the strategy can honour these parameters. Raises ValueError if it cannot; the
        message names the option. If an answer is scored, `replays` says whether it has steps."""
        if replays:
            raise ValueError(
                "a step map says in which order a diffusion model unmasked an answer, and strategy "
                f"{self.name} reads it from left to right: leave prompt.answer_step_map_column out"
            )

    def is_exact(
        self, trajectory: Trajectory, num_prompt_tokens: int, params: RequestParams
    ) -> bool:
        """Return whether the replay of a trajectory behind a prompt of `num_prompt_tokens` reads in
        every step what was read when the tokens were drawn. Only called if `check` allows replays.

        Raises:
            RequestError: bad_step_map, for steps that no row can have had.
        """
        raise NotImplementedError

    def allocate(self, limits: Limits) -> None:
        """Allocate what it keeps on the device, before the caches take the rest."""

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        """Receive the runners of its models, by name."""

    # What the job shows

    def stats(self) -> Mapping[str, Any]:
        """Return what metrics.json says of all steps so far: numbers, texts, lists, mappings."""
        return {}

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        """Return lines for the table at the end of a job, each a name and a value.

        Args:
            counts: maps the name of each of the strategy's counts to its sum over the job's rows.
            stats: the result of `stats` for this run; empty if the run computed nothing.
        """
        return []

    def remark(self, counts: Mapping[str, int]) -> str | None:
        """Return a sentence for the user if the strategy's options did not suit the job, judged by
        its `counts` as for `summary`; else None."""
        return None
