"""Compare a layer of experts on a CPU with the eager experts of transformers.

    python scripts/bench/bench_moe_cpu.py [--experts 64 --hidden 1024 --inner 384 --chosen 8] \\
        [--tokens 1,4,16,64,512] [--rounds 7]

Both multiply the same float32 weights, routed uniformly, on the threads that torch has. They run in
turn, so that a slow phase of the machine affects both; printed is the fastest of each, and what
their results differ by.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.linear import CPUProducts


def make_both(arguments: argparse.Namespace) -> tuple[Experts, Qwen3MoeExperts]:
    """Make the two layers, with the same random weights."""
    config = Qwen3MoeConfig(
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.inner,
        num_experts=arguments.experts,
    )
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    ours = Experts(
        arguments.experts,
        arguments.hidden,
        arguments.inner,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for own, other in (
        (ours.gate_up_proj, theirs.gate_up_proj),
        (ours.down_proj, theirs.down_proj),
    ):
        own.data.normal_(0, own.shape[-1] ** -0.5)
        other.data.copy_(own)
    ours.pack(CPUProducts())
    return ours, theirs


def seconds(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    parser.add_argument("--tokens", default="1,4,16,64,512")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ours, theirs = make_both(arguments)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for tokens in map(int, arguments.tokens.split(",")):
        x = torch.randn(tokens, arguments.hidden)
        logits = torch.rand(tokens, arguments.experts)
        weights, ids = logits.softmax(-1).topk(arguments.chosen)
        both = (partial(ours, x, ids.int(), weights), partial(theirs, x, ids, weights))
        difference = (both[0]() - both[1]()).abs().max()
        times = [[seconds(run) for run in both] for _ in range(arguments.rounds)]
        own, other = (min(column) for column in zip(*times, strict=True))
        print(
            f"{tokens:5d} tokens: {own * 1e3:8.2f} ms, transformers {other * 1e3:8.2f} ms, "
            f"{other / own:.2f} times ours; they differ by {difference:.1e}"
        )


if __name__ == "__main__":
    main()
