"""Compare the tokens per second of batchgen and of transformers' generate on a CPU.

    python scripts/bench/bench_cpu.py ROWS.jsonl [--field question] [--prompts 64] \\
        [--new-tokens 96]

Both answer the same chat prompts greedily in float32 on 2 threads. transformers takes batches with
left padding, as its documentation shows. Tokens that it generates after a row's end do not count.
The two run in turn, round by round, so that a slow phase of the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchgen import LLM, SamplingParams
from batchgen.model.model_source import resolve_model

sys.path.append(str(Path(__file__).parents[1] / "check"))
from real_rows import MODEL, chat_ids, read_texts


def run_batchgen(llm: LLM, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens)
    return [outputs[0].token_ids for outputs in llm.generate(prompts, params)]


def batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def run_transformers(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, batch_size: int, eos: int
) -> list[list[int]]:
    answers: list[list[int]] = []
    for batch in batches(prompts, batch_size):
        width = max(map(len, batch))
        ids = torch.tensor([[eos] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            pad_token_id=eos,
            eos_token_id=eos,
        )
        for row in output[:, width:].tolist():
            end = row.index(eos) + 1 if eos in row else len(row)
            answers.append(row[:end])
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--field", default="question")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16, help="of transformers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(2)

    llm = LLM(MODEL, device="cpu")
    assert llm.tokenizer is not None
    eos = int(llm.tokenizer.eos_token_id)
    path = resolve_model(MODEL, None)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    texts = read_texts(arguments.rows, arguments.field, arguments.prompts)
    prompts = [chat_ids(llm.tokenizer, text) for text in texts]
    run_transformers(reference, prompts[:2], 2, 2, eos)

    rates: dict[str, list[float]] = {"batchgen": [], "transformers": []}
    equal = 0
    for _ in range(arguments.rounds):
        llm = LLM(MODEL, device="cpu")  # a new one, whose prefix cache is empty
        run_batchgen(llm, [[eos]], 2)
        start = time.perf_counter()
        ours = run_batchgen(llm, prompts, arguments.new_tokens)
        middle = time.perf_counter()
        theirs = run_transformers(
            reference, prompts, arguments.new_tokens, arguments.batch_size, eos
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
        "torch": torch.__version__,
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
