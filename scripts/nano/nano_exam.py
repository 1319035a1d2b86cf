"""Problems as token ids for nano_sdar, and its marks on held-out problems."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nano_diffusion import Batch, decode, diffusion_loss
from nano_problems import FORMS, Form, Problem, final_number
from nano_sdar import NanoSDAR
from nano_tokenizer import IM_END_ID
from transformers import PreTrainedTokenizerBase

SEQUENCE_LENGTH = 192
"""Tokens of a sequence: room for the longest problem and its answer, in either form."""

THRESHOLD = 0.9
"""The confidence above which a token is unmasked."""
NOISE_SEED = 1234
"""The seed of the noise of the held-out loss, which is always the same."""


@dataclass(slots=True)
class Tally:
    """Sums over answers: how many, how many of them right, and their tokens and denoise steps."""

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
        self._batches = {
            form: Batch(*(tensor.to(device) for tensor in encode(rows, form, tokenizer)))
            for form in FORMS
        }

    @torch.inference_mode()
    def grade(self, model: NanoSDAR, form: Form) -> Grade:
        """Measure the loss, with the same noise on every call, and mark the decoded answers."""
        batch = self._batches[form]
        generator = torch.Generator(batch.ids.device).manual_seed(NOISE_SEED)
        loss = diffusion_loss(model, batch, generator).item()
        decoded = decode(model, batch, THRESHOLD)
        texts = self._tokenizer.batch_decode(decoded.answers, skip_special_tokens=True)
        total, by_kind = Tally(), defaultdict[str, Tally](Tally)
        for problem, text, tokens, steps in zip(
            self._problems, texts, decoded.tokens, decoded.steps, strict=True
        ):
            right = final_number(text, form) == problem.final
            for tally in (total, by_kind[problem.kind]):
                tally.add(right, tokens, steps)
        return Grade(loss, total, dict(by_kind))


def encode(rows: Iterable[Problem], form: Form, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Encode problems with their answers as a batch on the CPU, of N = SEQUENCE_LENGTH."""
    # The template is rendered only once: with one token per byte, a text can be encoded in pieces.
    message = [{"role": "user", "content": "\0"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    head, tail = (tokenizer.encode(part, add_special_tokens=False) for part in text.split("\0"))
    # With 800,000 rows, a tensor for every row would take most of the time.
    ids, prompt_lens, lens = array("q"), [], []
    for problem in rows:
        prompt = [*head, *problem.request(form).encode(), *tail]
        tokens = [*prompt, *problem.answer(form).encode(), IM_END_ID]
        assert len(tokens) <= SEQUENCE_LENGTH, problem
        ids.extend(tokens)
        ids.extend([IM_END_ID] * (SEQUENCE_LENGTH - len(tokens)))
        prompt_lens.append(len(prompt))
        lens.append(len(tokens))
    canvas = torch.frombuffer(ids, dtype=torch.int64).view(-1, SEQUENCE_LENGTH)
    return Batch(canvas, torch.tensor(prompt_lens), torch.tensor(lens))
