"""The mode tensor-parallel of bench_engine.py: weights divided between the GPUs of one host."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measuring import DEVICE, commas
from modes.engine_runs import profile_rows
from modes.routing import run_rows
from workloads import dummy_model, prompt_vocab, requests

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel.rank_group import end_process
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader, follow
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy


@dataclass(frozen=True)
class BenchRecipe:
    """What each rank runs: a workload on a model of `MODELS`."""

    model: str
    workload: str
    cache_gib: float
    trace: Path | None = None  # where the trace of some steps goes
    traced_after: int = 0  # steps before those

    def engine(self, parallel: TensorParallel = ALONE, leader: Leader | None = None) -> LLMEngine:
        weights = dummy_model(self.model, DEVICE, parallel=parallel)
        config = EngineConfig(
            max_num_seqs=256,
            max_model_len=2304,
            kv_cache_gib=self.cache_gib,
            tensor_parallel=parallel.size,
        )
        engine = LLMEngine(weights, None, (), ARStrategy(), config, leader=leader)
        engine.capture_graphs()
        return engine

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        follow(self.engine(parallel), connection)

    def measure_workload(self, engine: LLMEngine) -> dict[str, Any]:
        """Time the workload, after a quarter of it that compiles kernels."""
        load = requests(self.workload, prompt_vocab(engine.vocab_size))
        rows = [
            (r.prompt, SamplingParams(temperature=0, max_new_tokens=r.output_len, ignore_eos=True))
            for r in load
        ]
        run_rows(engine, rows[::4])
        seconds, _ = run_rows(engine, rows)
        if self.trace is not None:
            profile_rows(engine, rows, self.trace, self.traced_after)
        rate = sum(r.output_len for r in load) / seconds
        return {"seconds": seconds, "output_tokens_per_s": rate, "memory": str(engine.memory)}


def serve(recipe: BenchRecipe, ranks: int, results: Connection[Any, Any]) -> None:
    """Measure a recipe as rank 0 of its ranks, in a process of its own, and send the figures."""
    started = time.perf_counter()
    processes = RankProcesses(ranks, recipe, DEVICE.type) if ranks > 1 else None
    if processes:
        with processes.starting():
            engine = recipe.engine(processes.parallel, Leader(processes))
    else:
        engine = recipe.engine()
    ready = time.perf_counter() - started
    results.send({"ranks": ranks, "ready_seconds": ready} | recipe.measure_workload(engine))
    engine.close()
    end_process(0)


def measured(recipe: BenchRecipe, ranks: int) -> Any:
    context = get_context("spawn")
    results, theirs = context.Pipe()
    process = context.Process(target=serve, args=(recipe, ranks, theirs))
    process.start()
    theirs.close()
    try:
        found = results.recv()
    except EOFError:
        found = None
    process.join()
    if found is None:
        raise RuntimeError(f"the process with {ranks} ranks has ended: {process.exitcode}")
    print(f"{recipe.model}, {ranks} ranks: {found}", flush=True)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--workload", default="mixed")
    parser.add_argument("--ranks", type=commas(int), default=[1, 2], help="numbers of GPUs")
    parser.add_argument("--cache-gib", type=float, default=34.0, help="KV cache of a GPU")
    parser.add_argument("--profile", type=Path, help="after the runs: traces of rank 0's steps")
    parser.add_argument("--profile-after", type=int, default=100, help="steps before")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a workload on each number of GPUs, which divide the weights, one after the other and
    each in processes of its own. The first number is what the others are compared with."""
    found = []
    for ranks in options.ranks:
        trace = options.profile and options.profile.with_name(f"{ranks}-{options.profile.name}")
        recipe = BenchRecipe(
            options.model, options.workload, options.cache_gib, trace, options.profile_after
        )
        found.append(measured(recipe, ranks))
        found[-1]["times"] = found[0]["seconds"] / found[-1]["seconds"]
    for each in found:
        print(
            f"{options.model}, {options.workload}: {each['seconds']:.1f} s on {each['ranks']} "
            f"GPUs, {each['times']:.2f} times as fast as on {found[0]['ranks']}"
        )
    return found
