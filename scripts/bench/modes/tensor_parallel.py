"""The mode tensor-parallel of bench_engine.py: weights divided between the GPUs of one host."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from measuring import DEVICE, commas
from modes.routing import run_rows
from workloads import dummy_model, prompt_vocab, requests

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel.rank_group import end_process
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader, follow_engine
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy


@dataclass(frozen=True)
class Divided:
    """What each rank runs: a workload on a model of `MODELS`."""

    model: str
    workload: str
    cache_gib: float
    runs: int

    def engine(self, parallel: TensorParallel = ALONE, leader: Leader | None = None) -> LLMEngine:
        """Make the engine of one rank; `leader` is rank 0's way to the others."""
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
        """Run as a rank other than 0, which repeats each step of rank 0."""
        follow_engine(self.engine(parallel), connection)

    def measure(self, engine: LLMEngine) -> list[float]:
        """Return the seconds of each run. A quarter of the rows run before, to compile kernels."""
        run_rows(engine, self._rows(engine, 0, step=4))
        return [run_rows(engine, self._rows(engine, turn))[0] for turn in range(1, 1 + self.runs)]

    def _rows(self, engine: LLMEngine, turn: int, step: int = 1) -> Iterable[tuple[Any, ...]]:
        """Make each `step`th row, with prompts that the prefix cache does not have."""
        vocab = prompt_vocab(engine.vocab_size)
        for each in requests(self.workload, vocab)[::step]:
            prompt = [(token + turn) % vocab for token in each.prompt]
            new = each.output_len
            yield prompt, RequestParams(temperature=0, max_new_tokens=new, ignore_eos=True)


def serve(divided: Divided, ranks: int, results: Connection[Any, Any]) -> None:
    """Measure as rank 0 of several, in a process of its own, and send the figures."""
    started = time.perf_counter()
    if ranks > 1:
        processes = RankProcesses(ranks, divided, DEVICE.type)
        with processes.starting():
            engine = divided.engine(processes.parallel, Leader(processes))
    else:
        engine = divided.engine()
    ready = time.perf_counter() - started
    runs = divided.measure(engine)
    results.send({"ranks": ranks, "ready_seconds": ready, "runs": runs, "seconds": min(runs)})
    engine.close()
    end_process(0)


def measured(divided: Divided, ranks: int) -> dict[str, Any]:
    """Measure with this many ranks, in processes of their own."""
    context = get_context("spawn")
    results, theirs = context.Pipe()
    process = context.Process(target=serve, args=(divided, ranks, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = results.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process of {ranks} ranks has ended: {process.exitcode}") from None
    process.join()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--workload", default="mixed")
    parser.add_argument("--ranks", type=commas(int), default=[1, 2], help="numbers of GPUs")
    parser.add_argument("--cache-gib", type=float, default=34.0, help="KV cache of a GPU")
    parser.add_argument("--runs", type=int, default=1, help="timed runs of each number")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a workload on each number of GPUs, which divide the weights, one after the other and
    each in processes of its own. The others are compared with the first number."""
    divided = Divided(options.model, options.workload, options.cache_gib, options.runs)
    results = list[dict[str, Any]]()
    for ranks in options.ranks:
        result = measured(divided, ranks)
        results.append(result)
        result["times"] = results[0]["seconds"] / result["seconds"]
        print(
            f"{options.model}, {options.workload}: {result['seconds']:.1f} s on {ranks} GPUs "
            f"(ready after {result['ready_seconds']:.1f} s), {result['times']:.2f} times as "
            f"fast as on {results[0]['ranks']}",
            flush=True,
        )
    return results
