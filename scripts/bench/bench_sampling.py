"""Time a sampling step, beside the time that one read of the logits takes.

    python scripts/bench/bench_sampling.py [--rows 1 32 256 512] [--vocab 151936]

Needs a GPU. Each case is captured in a CUDA graph, as in the engine. The logits are bfloat16 and
look like those of a language model: normally distributed, with a few likely tokens per row.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8),
    "+ logprobs": SamplingParams(temperature=0.8, logprobs=True),
    "+ top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "+ top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "+ min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "+ all three filters": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05),
    "+ top_p, flat": SamplingParams(temperature=4, top_p=0.95),
    "+ penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5),
    "+ min_new_tokens": SamplingParams(temperature=0.8, min_new_tokens=200),
    "+ top_logprobs 20": SamplingParams(temperature=0.8, top_logprobs=20),
}
HISTORY = 2048
"""Tokens of a row before the one that is drawn."""


def microseconds(run: Callable[[], object], replays: int = 30) -> float:
    """Capture `run` in a CUDA graph and return the median time of a replay, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(statistics.median(times))


def read_bandwidth() -> float:
    """Return the bytes per microsecond that a copy of 1 GiB reads and writes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / microseconds(lambda: target.copy_(source))


def random_logits(rows: int, vocab: int) -> Tensor:
    """Draw logits [rows, vocab] in bfloat16, with eight likely tokens in every row."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.empty(rows, vocab, device="cuda").normal_(0, 2.5, generator=generator)
    likely = torch.randint(0, vocab, (rows, 8), device="cuda", generator=generator)
    logits.scatter_add_(1, likely, torch.linspace(18, 6, 8, device="cuda").expand(rows, -1))
    return logits.bfloat16()


def sampling_inputs(params: SamplingParams, rows: int, vocab: int) -> SamplingInputs:
    history = [i * 7919 % vocab for i in range(HISTORY)]
    return SamplingInputs.build(
        [params] * rows,
        [HISTORY // 2] * rows,
        [history] * rows,
        [(0, 1)] * rows,
        [HISTORY + 1] * rows,
        torch.device("cuda"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 512])
    parser.add_argument("--vocab", type=int, default=151_936)
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copies at {bandwidth / 1e6:.2f} TB/s; microseconds:")
    print(f"{'rows':>5} {'one read':>9}  " + "  ".join(CASES))
    for rows in arguments.rows:
        logits = random_logits(rows, arguments.vocab)
        positions = torch.full((rows,), HISTORY, device="cuda")
        one_read = logits.nbytes / bandwidth
        line = f"{rows:>5} {one_read:>9.1f}"
        for name, params in CASES.items():
            inputs = sampling_inputs(params, rows, arguments.vocab)

            def step(inputs: SamplingInputs = inputs) -> object:
                return sample(logits, inputs, positions)  # noqa: B023

            line += f"  {microseconds(step):>{len(name)}.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
