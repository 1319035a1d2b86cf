"""The marks of a nano model on held-out problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from nano_batch import Batch, Decoded, encode
from nano_problems import FORMS, Form, Problem, final_number
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

NOISE_SEED = 1234
"""The seed of the noise of the held-out loss, which is always the same."""


class Learner(Protocol):
    """A model with what it learns by and how it answers."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Compute what training makes small; what is random comes from `generator`."""
        ...

    def held_out_loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Compute nats per token of the answers."""
        ...

    def decode(self, batch: Batch) -> Decoded:
        """Answer the prompts of a batch."""
        ...


@dataclass(slots=True)
class Tally:
    """Sums over answers: how many, how many of them right, and their tokens and steps.

    A step is a forward that brought tokens.
    """

    rows: int = 0
    right: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, right: bool, tokens: int, steps: int) -> None:
        self.rows += 1
        self.right += right
        self.tokens += tokens
        self.steps += steps

    @property
    def accuracy(self) -> float:
        """The share of the answers with the right number."""
        return self.right / self.rows

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    def to_json(self) -> dict[str, float]:
        figures = {"accuracy": self.accuracy, "tokens_per_step": self.tokens_per_step}
        return {"rows": self.rows, **{name: round(x, 4) for name, x in figures.items()}}


@dataclass(frozen=True, slots=True)
class Grade:
    """How well the model did on the problems in one form.

    Attributes:
        loss: nats per token of the answers.
        all: the tally of all problems.
        by_kind: the tallies of the kinds of problems.
    """

    loss: float
    all: Tally
    by_kind: dict[str, Tally]

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} accuracy {self.all.accuracy:.3f} "
            f"tokens/step {self.all.tokens_per_step:.2f}"
        )

    def to_json(self) -> dict[str, Any]:
        kinds = {kind: tally.to_json() for kind, tally in sorted(self.by_kind.items())}
        return {"loss": self.loss, **self.all.to_json(), "by_kind": kinds}


class Exam:
    """A test of the model on held-out problems, each in both forms."""

    def __init__(
        self, rows: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, device: torch.device
    ) -> None:
        self._problems, self._tokenizer = rows, tokenizer
        self._batches = {form: encode(rows, form, tokenizer).to(device) for form in FORMS}

    @torch.inference_mode()
    def grade(self, learner: Learner, form: Form) -> Grade:
        """Measure the loss, with the same noise on every call, and mark the decoded answers."""
        batch = self._batches[form]
        generator = torch.Generator(batch.ids.device).manual_seed(NOISE_SEED)
        loss = learner.held_out_loss(batch, generator).item()
        decoded = learner.decode(batch)
        texts = self._tokenizer.batch_decode(decoded.answers, skip_special_tokens=True)
        total, by_kind = Tally(), defaultdict[str, Tally](Tally)
        for problem, text, tokens, steps in zip(
            self._problems, texts, decoded.tokens, decoded.steps, strict=True
        ):
            right = final_number(text, form) == problem.final
            for tally in (total, by_kind[problem.kind]):
                tally.add(right, tokens, steps)
        return Grade(loss, total, dict(by_kind))
