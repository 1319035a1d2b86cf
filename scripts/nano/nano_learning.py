"""What the nano models share: tokens of a chat, batches, the loss of answers, first weights."""

from __future__ import annotations

import math
from argparse import Namespace
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

PAD_ID, IM_START_ID, IM_END_ID = range(256, 259)
VOCAB_SIZE = 264
"""Rows of the embedding: at most 263 tokens, and unused ones to a multiple of 8 (tensor cores)."""
HEAD_DIM = 64
TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": IM_END_ID,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
"""What config.json says alike of all of them, and of their language models."""


class Batch(NamedTuple):
    """B rows of N tokens: a prompt, its answer, the <|im_end|> that ends it, padding of <|im_end|>.

    Attributes:
        ids: [B, N] int64.
        prompt_lens: [B] int64, tokens of each prompt.
        lens: [B] int64, tokens of each prompt and answer, with the answer's first <|im_end|>.
        positions: [3, B, N] int64, rotary positions, if the rows may have pictures.
        pixels: for each picture of a row [B, height, width, 3] uint8.
    """

    ids: Tensor
    prompt_lens: Tensor
    lens: Tensor
    positions: Tensor | None = None
    pixels: tuple[Tensor, ...] = ()


class Learner(Protocol):
    """A model in training."""

    config: dict[str, Any]
    files: dict[str, Any]
    """What its folder has beside config.json, by the names of the JSON files."""
    facts: dict[str, Any]
    """What training.json says of it."""
    module: Any

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Compute what training makes small; what is random comes from `generator`."""
        ...


class Task(Protocol):
    """What a model learns from and is graded by."""

    tokenizer: PreTrainedTokenizerFast

    def draw(self, device: torch.device) -> None:
        """Draw the training rows; called before a GPU is in use, as processes may be forked."""
        ...

    def batch(self, step: int, progress: float, generator: torch.Generator) -> Batch:
        """Choose the rows of a step; `progress` grows from 0 to 1 over the run."""
        ...

    def grade(self, folder: Path, count: int) -> dict[str, dict[str, Any]]:
        """Grade answers to `count` held-out problems, by groups of problems."""
        ...

    def write_eval_set(self, folder: Path) -> None:
        """Write the held-out problems as a data set."""
        ...

    def close(self) -> None:
        """End what draws rows."""
        ...


class Recipe(NamedTuple):
    """How a model is made: the classes and the settings, each an option of the command line."""

    learner: Callable[[Namespace], Learner]
    task: Callable[[Namespace, Any], Task]
    settings: dict[str, int | float | bool]


def chat(content: Iterable[int], answer: str) -> tuple[list[int], int]:
    """Encode a chat of one message, whose content is given as tokens, and its answer.

    Returns the tokens, and how many of them are the prompt, which is what the chat template writes.
    """
    prompt = [IM_START_ID, *b"user\n", *content, IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]
    return [*prompt, *answer.encode(), IM_END_ID], len(prompt)


def pad(rows: Iterable[tuple[list[int], int]], length: int) -> list[npt.NDArray[np.int16]]:
    """Pad chats to a length; returns `ids` [B, N], `prompt_lens` [B] and `lens` [B]."""
    # With 800,000 rows, an array for every row would take most of the time.
    ids, prompt_lens, lens = array("h"), array("h"), array("h")
    for tokens, prompt in rows:
        if len(tokens) > length:
            raise ValueError(f"a row has {len(tokens)} tokens, and there is room for {length}")
        ids.extend([*tokens, *[IM_END_ID] * (length - len(tokens))])
        prompt_lens.append(prompt)
        lens.append(len(tokens))
    canvas, *others = (np.frombuffer(each, np.int16) for each in (ids, prompt_lens, lens))
    return [canvas.reshape(-1, length), *others]


def answer_targets(batch: Batch, ahead: int = 1, first: Tensor | None = None) -> Tensor:
    """Return the token that stands `ahead` behind each position, [B, N - ahead]; -100 where it is
    outside of the answer or before position `first` [B]."""
    first = batch.prompt_lens if first is None else first
    positions = torch.arange(ahead, batch.ids.shape[1], device=batch.ids.device)
    counts = (positions >= first[:, None]) & (positions < batch.lens[:, None])
    return batch.ids[:, ahead:].masked_fill(~counts, -100)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of `answer_targets`, from logits [B, N, vocabulary]."""
    return F.cross_entropy(logits[:, : targets.shape[1]].float().flatten(0, 1), targets.flatten())


def tally(rights: Sequence[bool]) -> dict[str, Any]:
    """Count answers, and the share of right ones."""
    return {"rows": len(rights), "accuracy": round(sum(rights) / len(rights), 4)}


def draw_weights(
    module: nn.Module,
    seed: int,
    layers: Callable[[str], int],
    std: Callable[[str, Tensor], float] = lambda name, weight: 0.02,
) -> None:
    """Draw all matrices. As in GPT-2, those that write to a residual stream begin smaller in a
    deeper model, so that the stream keeps its size; `layers` tells the depth by a weight's name."""
    generator = torch.Generator().manual_seed(seed)
    last = (
        "o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj",
        "attn.proj.weight", "mlp.linear_fc2.weight",
    )  # fmt: skip
    for name, weight in module.named_parameters():
        if name.endswith("conv1d.weight"):  # as PyTorch's own convolutions begin
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator=generator)
        elif weight.dim() > 1:
            scale = math.sqrt(2 * layers(name)) if name.endswith(last) else 1
            nn.init.normal_(weight, std=std(name, weight) / scale, generator=generator)
        elif name.endswith("dt_bias"):
            # Heads begin with decays from 1/1000 to 1/5 per token, so that some remember long.
            rate = torch.logspace(-3, math.log10(0.2), len(weight))
            weight.data.copy_(rate.expm1().log())
        elif name.endswith(("A_log", "bias")):
            nn.init.zeros_(weight)
