"""The mode determinism of bench_engine.py: does a row keep its bits, whatever else is in the batch?

A digest (hash) of each operation's result for a token is kept by the token's KV slot, its index in
the KV cache. So digests of rejected drafts are overwritten, and a row that shares a prefix has the
digests of the row that computed it. Digests are made in captured CUDA graphs too. The reference are
the digests of one run of the row alone. The first operation that differs from it, in the order of
the layers, is the cause, because all that it read was equal. There are no digests of a prefill's
last layer, of which only some tokens are computed.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from measuring import DEVICE, commas
from modes.row_probe import Probe, Result, Schedule, Sizes
from modes.served import first_layers
from shapes import MODELS
from workloads import dummy_model, model_config

from batchgen.engine.operation_digests import Tape
from batchgen.engine.parallel.rank_group import end_process
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.kernels.library import keep_one_order

LAYERS = {
    "qwen3-0.6b": 5, "qwen3-30b-a3b": 4, "sdar-8b": 4, "gemma3-27b": 6, "gemma4-26b-a4b": 6,
    "qwen3-8b-fp8": 4, "qwen3-30b-a3b-fp8": 4, "gpt-oss-20b": 4, "hybrid-35b-a3b": 5,
    "deepseek-v2-lite": 4, "qwen3-vl-8b": 4,
}  # fmt: skip
"""The models that run by default, and how many of their layers."""
ON_GPU = Sizes(tokens=90_000, rows=192, blocks=160, side=24)
"""The prompt is longer than a split of a context is under any rule (`BitRules.splits`)."""
ON_CPU = Sizes(tokens=3_000, rows=6, blocks=44, side=5)


def first_difference(tape: Tape, reference: Result, found: Result, prompt: int) -> str | None:
    """Name the first operation whose digests differ at tokens that both runs have in common, and
    where; None if nothing differs. `prompt` is the number of prompt tokens."""
    tokens, others = (np.array(each.tokens) for each in (reference, found))
    equal = int(np.cumprod(tokens == others).sum())
    common = prompt + min(equal, len(tokens) - 1)
    before, now = (each.digests[:, :common] for each in (reference, found))
    if (operation := tape.first_difference(before, now)) is not None:
        name, token = operation
        return f"{name}, {'prompt' if token < prompt else 'generated'}"
    scores, others_scores = (np.array(each.logprobs) for each in (reference, found))
    differing = ((scores != others_scores) | (tokens != others)).nonzero()[0].tolist()
    if not differing:
        return None
    return f"last layer, head or sampler, {'later' if differing[0] else 'first'} token"


@dataclass(frozen=True)
class Schedules:
    """Random schedules for a row of a model. With several ranks, each runs the same ones.

    Attributes:
        layers: how many of the model's layers there are; None is all.
        deterministic: whether the engine has `engine.deterministic`.
    """

    name: str
    count: int
    sizes: Sizes
    layers: int | None = None
    deterministic: bool = False

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        """Run the schedules as a rank other than 0, and wait until rank 0 ends."""
        self.run(parallel)
        with suppress(EOFError, ConnectionResetError):
            connection.recv()

    def run(self, parallel: TensorParallel = ALONE) -> dict[str, dict[str, int]]:
        """Run the schedules in four kinds of engines: with drafts and CUDA graphs or without. A
        CPU has no graphs, and a diffusion model no drafts. In a third of the schedules the row
        scores the tokens that it generated alone; a diffusion model generates in all.

        Returns the number of schedules that gave the row other bits, by kind of engine and by first
        cause, and how often events such as preemptions were seen.
        """
        on_gpu, draws = DEVICE.type == "cuda", random.Random(0)
        if self.deterministic and on_gpu:
            keep_one_order()
        by_kind, by_cause, seen = Counter[str](), Counter[str](), Counter[str]()
        config = model_config(self.name)
        model = dummy_model(
            self.name,
            DEVICE,
            parallel=parallel,
            vision=config.vision is not None,
            **first_layers(MODELS[self.name], self.layers or config.num_layers),
        )
        tape, reference = Tape(self.sizes.tokens + 1024, DEVICE), None
        diffuses = model.config.diffusion is not None
        kinds = [*product((False,) if diffuses else (False, True), (False, True)[: 1 + on_gpu])]
        with tape.watching(model):
            for number, (drafts, graphs) in enumerate(kinds):
                probe = Probe(
                    model,
                    tape,
                    self.sizes,
                    drafts=drafts,
                    graphs=graphs,
                    deterministic=self.deterministic,
                )
                reference = reference or probe.run(Schedule(), draws)
                kind = f"{'drafts' if drafts else 'plain'}, {'graphs' if graphs else 'eager'}"
                for turn, _ in enumerate(range(number, self.count, len(kinds))):
                    answer = reference.tokens if turn % 3 == 2 and not diffuses else None
                    schedule = Schedule.drawn(draws, self.sizes.rows, self.sizes.blocks)
                    found = probe.run(schedule, draws, answer)
                    seen["scored"] += answer is not None
                    seen["prefix hits"] += found.output.num_cached_tokens > 0
                    seen["preempted"] += found.output.num_preemptions
                    seen["accepted drafts"] += found.output.counts.get("num_accepted_tokens", 0)
                    if cause := first_difference(tape, reference, found, len(probe.prompt)):
                        by_cause[cause] += 1
                        by_kind[kind] += 1
                print(f"{self.name}, {kind}: {by_kind[kind]} schedules with other bits", flush=True)
                del probe
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
        causes = dict(by_cause.most_common())
        return {"by_cause": causes, "by_kind": dict(by_kind), "seen": dict(seen)}


def _lead(schedules: Schedules, ranks: int, results: Connection[Any, Any]) -> None:
    """Run schedules as rank 0 of several, in a process of its own, and send the counts."""
    processes = RankProcesses(ranks, schedules, DEVICE.type)
    with processes.starting():
        results.send(schedules.run(processes.parallel))
    processes.close()
    end_process(0)


def _run_divided(schedules: Schedules, ranks: int) -> dict[str, dict[str, int]]:
    context = get_context("spawn")
    results, theirs = context.Pipe()
    process = context.Process(target=_lead, args=(schedules, ranks, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, dict[str, int]] = results.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"rank 0 has ended with {process.exitcode}") from None
    process.join()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=commas(str, MODELS), default=[*LAYERS])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--deterministic", action="store_true", help="with engine.deterministic")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that divide the weights")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a row beside random other rows, cut into random chunks, with CUDA graphs or not, with
    drafts or not, after a prefix hit or not, generated or scored; say how often it keeps the bits
    that it has alone, and else the first operation whose result differs.

    It needs a GPU for figures; on a CPU, with smaller batches, no bit may differ.
    """
    sizes, results = ON_GPU if DEVICE.type == "cuda" else ON_CPU, []
    for name in options.models:
        layers, count, ranks = LAYERS.get(name), options.schedules, options.ranks
        schedules = Schedules(name, count, sizes, layers, options.deterministic)
        found = schedules.run() if ranks == 1 else _run_divided(schedules, ranks)
        kept = f"{count - sum(found['by_kind'].values())} of {count} schedules equal"
        on = "" if ranks == 1 else f" on {ranks} ranks"
        print(f"{name}, {layers or 'all'} layers{on}: {kept}; {found}", flush=True)
        results.append(
            {"model": name, "layers": layers, "ranks": ranks, "schedules": count, **found}
        )
    return results
