"""The mode cpu of bench_engine.py: the engine beside generate of transformers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "check"))
from real_rows import MODEL, chat_ids, read_texts


def transformers_answers(
    model: Any, prompts: list[list[int]], new_tokens: int, batch_size: int, eos: int
) -> list[list[int]]:
    """Generate with left padding, as the documentation of transformers shows; tokens behind a row's
    end do not count."""
    answers: list[list[int]] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        width = max(map(len, batch))
        output = model.generate(
            torch.tensor([[eos] * (width - len(p)) + p for p in batch]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch]),
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            pad_token_id=eos,
            eos_token_id=eos,
        )
        for row in output[:, width:].tolist():
            answers.append(row[: row.index(eos) + 1] if eos in row else row)
    return answers


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, help="JSONL")
    parser.add_argument("--field", default="question")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16, help="of transformers")
    parser.add_argument("--rounds", type=int, default=2)


def run_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the tokens per second of batchgen and of transformers' generate on a CPU.

    Both answer chat prompts greedily in float32 on 2 threads. They run in turn, round by round, so
    that a slow phase of the machine affects both.
    """
    from transformers import AutoModelForCausalLM

    from batchgen import LLM
    from batchgen import SamplingParams as Params
    from batchgen.model.model_source import resolve_model

    torch.set_num_threads(2)
    llm = LLM(MODEL, device="cpu")
    assert llm.tokenizer is not None
    eos = int(llm.tokenizer.eos_token_id)
    path = resolve_model(MODEL, None)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    texts = read_texts(options.rows, options.field, options.prompts)
    prompts = [chat_ids(llm.tokenizer, text) for text in texts]
    transformers_answers(reference, prompts[:2], 2, 2, eos)
    params = Params(temperature=0, max_new_tokens=options.new_tokens)
    rates: dict[str, list[float]] = {"batchgen": [], "transformers": []}
    equal = 0
    for _ in range(options.rounds):
        llm = LLM(MODEL, device="cpu")  # a new one, whose prefix cache is empty
        llm.generate([[eos]], Params(temperature=0, max_new_tokens=2))
        start = time.perf_counter()
        ours = [outputs[0].token_ids for outputs in llm.generate(prompts, params)]
        middle = time.perf_counter()
        theirs = transformers_answers(
            reference, prompts, options.new_tokens, options.batch_size, eos
        )
        end = time.perf_counter()
        rates["batchgen"].append(sum(map(len, ours)) / (middle - start))
        rates["transformers"].append(sum(map(len, theirs)) / (end - middle))
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    best = {name: max(values) for name, values in rates.items()}
    figures = {
        "useful_tokens_per_s": {name: [round(v, 1) for v in vs] for name, vs in rates.items()},
        "ratio_of_best": round(best["batchgen"] / best["transformers"], 2),
        "equal_answers": f"{equal} of {len(prompts)}",
        "prompt_tokens": sum(map(len, prompts)),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures, indent=1))
    return [figures]
