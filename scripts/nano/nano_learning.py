"""Shared code for training the nano models: chats as token ids, batches, and the loss over
answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IM_START_ID, IM_END_ID = 257, 258
"""Ids of special tokens; the token of a byte has its value as id."""


class Batch(NamedTuple):
    """B rows of N tokens: a prompt, its answer, the <|im_end|> that ends it, and padding of
    <|im_end|>.

    Attributes:
        ids: [B, N] int64.
        prompt_lens: [B] int64, the tokens of each prompt.
        lens: [B] int64, the tokens of each prompt and answer, including the answer's <|im_end|>.
    """

    ids: Tensor
    prompt_lens: Tensor
    lens: Tensor

    def to(self, device: torch.device) -> Batch:
        """Copy the rows to a device."""
        return Batch(*(part.to(device) for part in self))


class Recipe(NamedTuple):
    """How a nano model is trained.

    Attributes:
        learner: builds the trained object from the contents of config.json. The object has a
            `module` and `loss(batch)`.
        make_batch: draws the rows of a step from a seed, the step and the number of rows. Worker
            processes call it.
    """

    learner: Callable[[dict[str, Any]], Any]
    make_batch: Callable[[int, int, int], Batch]
    steps: int
    batch_size: int
    lr: float


def chat(content: Iterable[int], answer: str) -> tuple[list[int], int]:
    """Encode a chat of one message, whose token ids are `content`, and its answer.

    Returns the tokens, and how many of them are the prompt, which is what the chat template writes.
    """
    prompt = [IM_START_ID, *b"user\n", *content, IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]
    return [*prompt, *answer.encode(), IM_END_ID], len(prompt)


def pad(chats: Sequence[tuple[list[int], int]], length: int) -> Batch:
    """Make a batch of `length` tokens per row from pairs of a chat and the length of its prompt."""
    ids = [[*tokens, *[IM_END_ID] * (length - len(tokens))] for tokens, _ in chats]
    lens = torch.tensor([len(tokens) for tokens, _ in chats])
    return Batch(torch.tensor(ids), torch.tensor([prompt for _, prompt in chats]), lens)


def answer_loss(logits: Tensor, batch: Batch, ahead: int = 1, skip: int = 0) -> Tensor:
    """Return the mean cross-entropy of the answers without their first `skip` tokens.

    The logits [B, N, vocabulary] predict, at each position, the token `ahead` positions later.
    """
    positions = torch.arange(ahead, batch.ids.shape[1], device=batch.ids.device)
    counts = (positions >= batch.prompt_lens[:, None] + skip) & (positions < batch.lens[:, None])
    targets = batch.ids[:, ahead:].masked_fill(~counts, -100)
    return F.cross_entropy(logits[:, :-ahead].float().flatten(0, 1), targets.flatten())
