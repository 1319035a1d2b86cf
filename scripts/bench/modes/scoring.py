"""What scoring given answers costs beside reading the same tokens as prompts."""

from __future__ import annotations

import argparse
import random
from typing import Any

from measuring import commas
from modes.engine_runs import Bench
from modes.routing import ROUTINGS, ScoredRow, run_rows
from shapes import MODELS
from workloads import prompt_vocab

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.sampling.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-8b", help=", ".join(MODELS))
    parser.add_argument("--routing", choices=ROUTINGS, default="model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--top", type=commas(int), default=[0, 64], help="likeliest tokens")
    parser.add_argument("--runs", type=int, default=3)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Read rows as prompts, and score their second parts as answers, in turn; the best run of each
    counts."""
    bench = Bench(options.model, EngineConfig(), routing=options.routing)
    draws, vocab = random.Random(0), prompt_vocab(bench.model_config.vocab_size)
    cases = {"prefill": SamplingParams(temperature=0, max_new_tokens=1)} | {
        f"scored, top {k}": SamplingParams(temperature=1, max_new_tokens=0, top_logprobs=k)
        for k in options.top
    }
    best, length = dict.fromkeys(cases, float("inf")), options.prompt + options.answer
    for _ in range(options.runs + 1):  # the first one compiles and warms up
        for name, params in cases.items():
            rows = list[ScoredRow]()  # ones that the prefix cache has not seen
            for _ in range(options.rows):
                ids = [draws.randrange(vocab) for _ in range(length)]
                cut = options.prompt if params.scores_answer else length
                rows.append((ids[:cut], params, ids[cut:] or None))
            best[name] = min(best[name], run_rows(bench.engine, rows)[0])
    tokens, found = options.rows * length, []
    for name, seconds in best.items():
        ratio = best["prefill"] / seconds
        print(f"{name:>16} {seconds:8.3f} s {tokens / seconds:12,.0f} tokens/s {ratio:6.2f}")
        found.append({"case": name, "seconds": seconds, "tokens": tokens, "of_prefill": ratio})
    return found
