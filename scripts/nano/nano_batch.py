"""Problems as token ids, and the answers that a nano model decodes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from nano_problems import Form, Problem
from nano_tokenizer import IM_END_ID
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SEQUENCE_LENGTH = 192
"""Tokens of a sequence: room for the longest problem and its answer, in either form."""


class Batch(NamedTuple):
    """Sequences of a prompt, its answer, the <|im_end|> that ends it, and padding of <|im_end|>.

    Attributes:
        ids: [B, N] int64, token ids.
        prompt_lens: [B] int64, tokens of each prompt.
        lens: [B] int64, tokens of each prompt and answer, with the answer's first <|im_end|>.
    """

    ids: Tensor
    prompt_lens: Tensor
    lens: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answers to B prompts, and what they took.

    Attributes:
        answers: the token ids of each answer, up to its first <|im_end|> or the end of the room.
        tokens: the tokens that each row generated, its first <|im_end|> included.
        steps: the forwards of each row that brought tokens; each brought at least one.
    """

    answers: list[list[int]]
    tokens: list[int]
    steps: list[int]


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


def collect(ids: Tensor, prompt_lens: Tensor, steps: list[int]) -> Decoded:
    """Cut the answers out of decoded sequences `ids` [B, N]; `steps` are those of each row."""
    answers, tokens = [], []
    for row, prompt_len in zip(ids.tolist(), prompt_lens.tolist(), strict=True):
        # A row without <|im_end|> used all of its room.
        end = row.index(IM_END_ID, prompt_len) if IM_END_ID in row[prompt_len:] else len(row)
        answers.append(row[prompt_len:end])
        tokens.append(min(end + 1, len(row)) - prompt_len)
    return Decoded(answers, tokens, steps)
