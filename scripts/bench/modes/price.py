"""The mode price of bench_engine.py: what `engine.deterministic` costs, or how much slower another
model is. Two engines (A and B) take turns on one GPU."""

from __future__ import annotations

import argparse
from typing import Any

from measuring import commas
from modes.engine_runs import PICTURE_SIDE
from modes.turns import Process, Spec, compared, in_turn
from shapes import MODELS
from workloads import WORKLOADS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=commas(str, MODELS), required=True)
    parser.add_argument("--against", type=commas(str, MODELS), help="B of each, without the mode")
    parser.add_argument("--workloads", type=commas(str, WORKLOADS), default=["mixed", "decode"])
    parser.add_argument("--layers", type=int, default=12, help="the first N layers; 0: all")
    parser.add_argument("--requests", type=int, default=256, help="the most rows of a workload")
    parser.add_argument("--scored", action="store_true", help="answers are scored")
    parser.add_argument("--pictures", action="store_true", help="one before each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-gib", type=float, default=6.0, help="KV cache of each engine")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time workloads without the mode (A), and with it or on another model (B): A B A B A B.

    Both engines are on the same card and take turns. Tokens go to random experts. The output is the
    difference between the medians and the spread of A, (maximum - minimum) / median. The processes
    of all models start at once and run one model after the other.
    """
    pairs = []
    for name, other in zip(options.models, options.against or options.models, strict=True):
        specs = _spec(options, name), _spec(options, other, deterministic=not options.against)
        pairs.append((name, [Process(spec) for spec in specs]))
    for _, processes in pairs:
        for process in processes:
            process.wait()
    results = []
    for name, processes in pairs:
        for workload in options.workloads:
            turns = in_turn(processes, workload, options.rounds)
            seconds = [[figures["seconds"] for figures in each] for each in turns]
            result = {"model": name, "layers": options.layers, "workload": workload}
            results.append(result | compared(*seconds))
            print("{model}, {workload}: {A} / {B}, {difference:+.1%}".format(**results[-1]), end="")
            print(f", spread {results[-1]['spread']:.1%}", flush=True)
        for process in processes:
            process.close()
    return results


def _spec(options: argparse.Namespace, model: str, *, deterministic: bool = False) -> Spec:
    """Return the engine of a model. Its rows are greedy."""
    config = {
        "max_num_seqs": 256,
        "max_model_len": 2304 + options.pictures * (PICTURE_SIDE**2 + 2),
        "kv_cache_gib": options.cache_gib,
        "deterministic": deterministic,
    }
    bench = {
        "most_requests": options.requests,
        "scored": options.scored,
        "pictures": options.pictures,
    }
    workloads = tuple(options.workloads)
    return Spec(model, workloads, options.layers, config, bench, temperature=0, rehearse=True)
