"""The protocol between the engine and a decoding paradigm; the paradigms are in `strategies/`.

It has three parts, by who calls them. The scheduler calls `Pacing` (scheduling/pacing.py), and the
engine calls `Decoding` in every step. The engine and the job call `Hooks` once or from time to
time; `strategies/base/` has defaults for all of them except the name.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.base.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.base.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.scheduling.pacing import Pacing

TARGET = "target"
"""The name, among a strategy's models, of the model whose tokens are wanted."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The source of a separate model beside the target: a checkpoint that an option names.

    Attributes:
        option: the name of the strategy's option.
        path: the option's value, a hub name or a path; None if the user gave none.
        purpose: what the model is needed for, as the end of the sentence "OPTION is null, but …".
    """

    option: str
    path: str | None
    purpose: str


@dataclass(frozen=True, slots=True)
class Head:
    """The source of a model that is part of the target and continues from its hidden states.

    Attributes:
        name: the head's name, one of `ModelConfig.heads`.
        purpose: what asks for the head, as the beginning of the sentence "PURPOSE needs …".
        instead: what a user of a model without the head can do.
    """

    name: str
    purpose: str
    instead: str


@dataclass(frozen=True, slots=True)
class ModelRole:
    """One of the models that a strategy runs; the engine builds a runner for each.

    Attributes:
        widths: every number of tokens per row that a decode forward can have, ascending. The sizes
            of caches and CUDA graphs follow from it.
        forward_rows: the most rows that a decode forward has for each row of the batch.
        tokens_ahead: what the model keeps in a KV slot depends on so many tokens behind the one
            that the slot is of: 1 for a head that reads the next token beside a hidden state.
        source: where the model comes from; None means the target itself.
    """

    widths: tuple[int, ...]
    forward_rows: int = 1
    tokens_ahead: int = 0
    source: Checkpoint | Head | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that bound the state which a paradigm keeps.

    Attributes:
        max_rows: the most rows that decode at once.
        max_model_len: the most prompt and output tokens of a row together.
        vocab_size: the number of token ids of the target.
        device: the target's device.
    """

    max_rows: int
    max_model_len: int
    vocab_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class JoiningRows:
    """B rows whose prefill is complete and which decode from the next step on.

    Attributes:
        seqs: the rows as the host knows them, without the token that the prefill may yield.
        block_tables: [B, N] int64, the rows' blocks of the paged cache; unused entries are 0.
        context_lens: [B] on the host, the number of tokens of each row that the target has read.
        sampling: the sampler's inputs for the rows, as they are before the prefill's token.
        state_slots: [B] int64, the rows' state slots; None for models without recurrent layers.
        guide: makes the masks of the constrained rows; None if there are none.
    """

    seqs: abc.Sequence[Sequence]
    block_tables: Tensor
    context_lens: npt.NDArray[np.int64]
    sampling: SamplingInputs
    state_slots: Tensor | None = None
    guide: Guide | None = None

    def index_select(self, rows: npt.NDArray[np.int64]) -> JoiningRows:
        """Return the rows with these indices [N], in this order."""
        index = upload(rows, torch.int64, self.block_tables.device)
        seqs = [self.seqs[i] for i in rows]
        return JoiningRows(
            seqs,
            self.block_tables[index],
            self.context_lens[rows],
            self.sampling.index_select(rows),
            None if self.state_slots is None else self.state_slots[index],
            Guide.of(seqs),
        )


class StepState(Protocol):
    """The state of the decoding rows between steps.

    `engine/step_inputs.py` explains its members, and implements what is the same in every
    paradigm.
    """

    @property
    def model_inputs(self) -> ModelInputs: ...

    @property
    def state_slots(self) -> Tensor | None: ...

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None: ...

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None: ...

    def reindex(self, batch: DecodeBatch) -> None: ...

    def step_decode(self, step: StepOutput) -> None: ...


class Decoding(Protocol):
    """What the engine calls in every step.

    A decode step calls `step_inputs.reindex`, `propose`, `forward`, `decide` and
    `step_inputs.step_decode`, in this order. A prefill runs the target's forward. If the prefill of
    some rows is complete, it calls `first_tokens` for those that it yields a token for. Then it
    calls `Hooks.prefilled`, and `step_inputs.merge_prefill` for the complete rows. A mixed step
    does both, with one forward for all tokens.
    """

    @property
    def step_inputs(self) -> StepState:
        """Everything that the paradigm keeps of its rows between steps."""

    @property
    def proposes_from_guide(self) -> bool:
        """Whether `propose` uses the matchers of constrained rows. If so, the engine reads all
        earlier steps before `propose`, and not only before `decide`."""

    def propose(self, batch: DecodeBatch) -> None:
        """Complete the inputs of the step's forward, for example with drafts."""

    def forward(
        self, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        """Run the step's forward.

        Args:
            runner: the target's runner.
            prefill: prompt tokens to read beside the decoding rows; None if there are none. They
                come only with batches of width 1.

        Returns:
            The forward's output for the decoding rows, and for the prefill if there is one.
        """

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """Decide the rows' tokens and columns from the logits of a decode forward.

        Args:
            output: the forward's output, in the order of the rows.
            guide: makes the masks of the constrained rows, whose matchers have read all tokens so
                far; None if there are none.
        """

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        """Decide one token for each row from the logits that end its prefill."""


class Hooks(Protocol):
    """What the engine and the job call once or from time to time.

    Attributes:
        name: the paradigm's name in the configuration.
        columns: the columns of output scope that it can produce besides the sampler's.
        counts: what it counts for each row.
    """

    name: str
    columns: tuple[OutputColumn, ...]
    counts: tuple[RowCount, ...]

    @property
    def models(self) -> Mapping[str, ModelRole]:
        """The models that the strategy runs, by name; `TARGET` is among them."""

    @property
    def needs_hidden(self) -> bool:
        """Whether the strategy needs the target's hidden states of all tokens that it reads."""

    def block_length(self, model: ModelConfig) -> int:
        """Return the number of positions in a block of the model's attention.

        Attention is causal over blocks and full inside a block; 1 is ordinary causal attention.

        Raises:
            ValueError: the model is not made for the paradigm; the message says what to do.
        """

    def model_len(self, longest: int, model: ModelConfig) -> int:
        """Return the most prompt and output tokens of a row together.

        Args:
            longest: the number that the model and the user allow.
            model: the target's configuration.

        Raises:
            ValueError: no row could have any token.
        """

    def check(self, params: SamplingParams) -> None:
        """Check that the strategy can honour these parameters.

        Raises:
            ValueError: it cannot; the message names the option.
        """

    def allocate(self, limits: Limits) -> None:
        """Allocate what it keeps on the device; called once, before the caches take the rest."""

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        """Receive the runners of its models, by name; called once, before the first step."""

    def prefilled(
        self, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None, newest: Tensor
    ) -> None:
        """Take note that the target has read a prefill's tokens.

        Args:
            batch: the prefill.
            inputs: its T tokens, as the forward read them. If the strategy `needs_hidden`, every
                row of the batch has some.
            hidden: [T, hidden_size], the tokens' hidden states; None unless `needs_hidden`.
            newest: [J] int64, for each row of `batch.completing` the token behind those that the
                target has read: the one that the prefill yielded, or the newest one known.
        """

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Look at the results of a decode step, once the host has read them.

        Args:
            step: the results for B rows.
            current: [B] bool, the rows that have not left since the step was launched.
        """

    def stats(self) -> Mapping[str, Any]:
        """Return what metrics.json says of all steps so far: numbers, texts, and lists and mappings
        of them."""

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        """Return lines for the table at the end of a job, each a name and a value.

        Args:
            counts: maps the name of each of the strategy's counts to its sum over all rows of the
                job.
            stats: the result of `stats` for this run; empty if the run computed nothing.
            num_tokens: the number of tokens that the job generated.
        """

    def remark(self, counts: Mapping[str, int]) -> str | None:
        """Return a sentence for the user if the strategy's options did not suit the job; else None.

        Args:
            counts: as for `summary`.
        """


class Strategy(Pacing, Decoding, Hooks, Protocol):
    """A decoding paradigm: it decides what a forward reads and which tokens come out of it."""
