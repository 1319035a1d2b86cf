"""The mode tensor-parallel of bench_engine.py: weights divided between two GPUs, and two engines
beside each other.

Parts, of which --parts chooses some:

- sums: a sum over two GPUs and the norm behind it, of rows of 4,096 values in bfloat16, and a
  gather of logits for 151,936 ids, in CUDA graphs.
- dense: decode steps of qwen3-8b with 4 and with 256 rows, with one GPU and with two, and how many
  tokens both have in common, greedily in bfloat16.
- experts: the workload mixed on qwen3-30b-a3b, with one GPU and with two.
- data: the workload mixed1k on qwen3-8b, with one GPU, and halved between two engines of one GPU
  each: with the time in which the last rows run out, and the rates before that begins.

Each engine is a process of its own, with so large a cache that others have room on its GPU
(--cache-gib). --sums chooses how two GPUs sum; all parts but data measure each of several ways:

- fused: a kernel of ours, which computes the norm behind the sum as well.
- apart: the same kernel, and another one that computes the norm once more, as if the first had not.
- nccl: NCCL sums and gathers, and other kernels add the sum and compute the norm.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from measuring import DEVICE, commas
from modes.routing import run_rows
from torch import Tensor
from workloads import BenchRequest, dummy_model, prompt_vocab, requests

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel.one_shot import OneShot
from batchgen.engine.parallel.rank_group import DistributedGroup, end_process
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader, follow
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.kernels.layers.rms_norm import rms_norm
from batchgen.strategies.ar.strategy import ARStrategy

T = TypeVar("T")
PARTS = {"sums": "", "dense": "qwen3-8b", "experts": "qwen3-30b-a3b", "data": "qwen3-8b"}
"""The parts and their models."""
SUMS = ("fused", "apart", "nccl")
_DECODE_ROWS, _PROMPT, _TOKENS = (4, 256), 128, 192
_SUM_ROWS, _HIDDEN, _VOCAB = (1, 4, 16, 64, 256), 4096, 151_936
_REPEATS, _REPLAYS = 72, 20
_END_SECONDS = 20.0


class _Apart(OneShot):
    """Sums behind which another kernel computes the norm, whatever the sum has made of it."""

    def __init__(self, fused: OneShot) -> None:
        super().__init__(fused._memory, fused._peers)

    def add_sum_norm(
        self, residual: Tensor | None, partial: Tensor, lane: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        _, stream = super().add_sum_norm(residual, partial, lane, weight, eps)
        return rms_norm(stream, weight, eps), stream


@dataclass(frozen=True)
class BenchRecipe:
    """What each rank runs: an engine of a model of `MODELS`, or sums and gathers alone for ""."""

    model: str
    cache_gib: float
    sums: str = SUMS[0]

    def engine(self, parallel: TensorParallel = ALONE, leader: Leader | None = None) -> LLMEngine:
        self._choose_sums(parallel)
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
        if self.model:
            follow(self.engine(parallel), connection)
        else:
            self.measure_sums(parallel)
            connection.recv()  # until rank 0 ends

    def _choose_sums(self, parallel: TensorParallel) -> None:
        group = parallel._collectives
        if isinstance(group, DistributedGroup) and self.sums == "nccl":
            group._one_shot = None
        elif isinstance(group, DistributedGroup) and self.sums == "apart" and group._one_shot:
            group._one_shot = _Apart(group._one_shot)

    def measure_sums(self, parallel: TensorParallel) -> list[dict[str, Any]]:
        """Time them in CUDA graphs, one behind the other: microseconds by the number of rows."""
        self._choose_sums(parallel)
        group = parallel._collectives
        assert isinstance(group, DistributedGroup)
        where: dict[str, Any] = {"dtype": torch.bfloat16, "device": f"cuda:{parallel.rank}"}
        weight, found = torch.ones(_HIDDEN, **where), []
        for rows in _SUM_ROWS:
            stream, partial = torch.zeros(2, rows, _HIDDEN, **where)
            logits = torch.zeros(rows, _VOCAB // parallel.size, **where)

            def add(i: int, stream: Tensor = stream, partial: Tensor = partial) -> object:
                return group.add_sum_norm(stream, partial, i % 2, weight, 1e-6)

            def gather(i: int, logits: Tensor = logits) -> object:
                return group.gather(logits)

            found.append({"rows": rows, "sum_us": _time(add), "gather_us": _time(gather)})
        return found


def _time(run: Callable[[int], object]) -> float:
    """Return the microseconds of one of many runs, each of which is told its number."""
    for i in range(4):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(_REPEATS):
            run(i)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e3 / (_REPEATS * _REPLAYS), 2)


def serve(recipe: BenchRecipe, ranks: int, asked: Connection[Any, Any]) -> None:
    """Make an engine, say so, and measure what is asked for until the other end closes."""
    started = time.perf_counter()
    processes = RankProcesses(ranks, recipe, DEVICE.type) if ranks > 1 else None
    if not recipe.model:
        assert processes is not None
        asked.send({"ready": round(time.perf_counter() - started, 2)})
        found = recipe.measure_sums(processes.parallel)
        asked.recv()
        asked.send(found)
        end_process(0)
        return
    if processes is not None:
        with processes.starting():
            engine = recipe.engine(processes.parallel, Leader(processes))
    else:
        engine = recipe.engine()
    ready = {"ready": round(time.perf_counter() - started, 2), "memory": str(engine.memory)}
    asked.send(ready)
    try:
        while True:
            what = asked.recv()
            asked.send(decode(engine, **what) if "rows" in what else workload(engine, **what))
    except EOFError:
        engine.close()
        end_process(0)


def _run(engine: LLMEngine, load: Sequence[BenchRequest]) -> tuple[float, float, int, list[Any]]:
    """Run requests greedily; returns the seconds, the seconds and the tokens until fewer rows are
    left than can run at once, and the outputs."""
    begun, started, full = engine.generated_tokens, time.perf_counter(), (0.0, 0)
    rows = [
        (r.prompt, SamplingParams(temperature=0, max_new_tokens=r.output_len, ignore_eos=True))
        for r in load
    ]

    def after_step(finished: int) -> None:
        nonlocal full
        if len(load) - finished >= engine.max_num_seqs:
            full = time.perf_counter() - started, engine.generated_tokens - begun

    seconds, outputs = run_rows(engine, rows, after_step)
    return seconds, *full, outputs


def decode(engine: LLMEngine, rows: int) -> dict[str, Any]:
    """Time decode steps of so many rows: what more tokens take than fewer."""
    vocab = prompt_vocab(engine.vocab_size)
    prompts = [[(7 * i + 11 * j) % vocab for j in range(_PROMPT)] for i in range(rows)]
    _run(engine, [BenchRequest(prompt, 8) for prompt in prompts])
    few, *_ = _run(engine, [BenchRequest(prompt, 16) for prompt in prompts])
    many, *_, outputs = _run(engine, [BenchRequest(prompt, 16 + _TOKENS) for prompt in prompts])
    return {
        "rows": rows,
        "ms_per_step": round((many - few) / _TOKENS * 1e3, 4),
        "tokens": [output.token_ids for output in outputs],
    }


def workload(engine: LLMEngine, name: str, part: int, parts: int) -> dict[str, Any]:
    """Time a share of a workload."""
    load = requests(name, prompt_vocab(engine.vocab_size))[part::parts]
    seconds, full_seconds, full_tokens, _ = _run(engine, load)
    tokens = sum(r.output_len for r in load)
    return {
        "workload": name,
        "part": f"{part + 1}/{parts}",
        "seconds": round(seconds, 3),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / seconds, 1),
        "seconds_before_the_last_rows": round(full_seconds, 3),
        "rate_before_the_last_rows": round(full_tokens / max(full_seconds, 1e-9), 1),
    }


class Child:
    """The process of an engine, on GPUs of its own."""

    def __init__(self, recipe: BenchRecipe, ranks: int, gpus: str) -> None:
        self.name = f"{recipe.model or 'sums'}, {ranks} ranks on {gpus}"
        context = get_context("spawn")
        self._asked, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(recipe, ranks, theirs))
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # which the process reads when it starts
        self._process.start()
        theirs.close()

    def read(self) -> Any:
        try:
            said = self._asked.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.name} has ended: {self._process.exitcode}") from None
        shown = said
        if isinstance(said, dict):
            shown = {name: value for name, value in said.items() if name != "tokens"}
        print(f"{self.name}: {shown}", flush=True)
        return said

    def ask(self, **what: object) -> Any:
        self._asked.send(what)
        return self.read()

    def end(self) -> None:
        self._asked.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            print(f"{self.name}: did not end, and is killed", flush=True)
            self._process.kill()


@contextmanager
def children(recipe: BenchRecipe, *wanted: tuple[int, str]) -> Iterator[list[Child]]:
    """Start engines of so many ranks on these GPUs, wait until all are ready, and end them."""
    started = [Child(recipe, ranks, gpus) for ranks, gpus in wanted]
    both(started, lambda child, i: child.read())
    yield started
    both(started, lambda child, i: child.end())


def both(started: Sequence[Child], call: Callable[[Child, int], T]) -> list[T]:
    """Call a function for all engines at the same time."""
    with ThreadPoolExecutor(len(started)) as pool:
        return list(pool.map(call, started, range(len(started))))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts that were asked for, those with two ranks in each of the ways to sum."""
    found: dict[str, Any] = {}
    models = dict.fromkeys(PARTS, options.model) | {"sums": ""} if options.model else PARTS
    # The first run of experts may compile kernels.
    loads: dict[str, list[dict[str, Any]]] = {
        "sums": [{}],
        "dense": [{"rows": rows} for rows in _DECODE_ROWS],
        "experts": [{"name": options.workload, "part": 0, "parts": shares} for shares in (4, 1)],
    }
    for part in (part for part in loads if part in options.parts):
        for way in options.sums:
            recipe = BenchRecipe(models[part], options.cache_gib, way)
            with children(recipe, (2, "0,1")) as (child,):
                found[f"{part} 2 {way}"] = [child.ask(**load) for load in loads[part]]
        if part != "sums":
            with children(BenchRecipe(models[part], options.cache_gib), (1, "0")) as (child,):
                found[f"{part} 1"] = [child.ask(**load) for load in loads[part]]
    if "data" in options.parts:
        name = "mixed1k" if options.workload == "mixed" else options.workload
        recipe = BenchRecipe(models["data"], options.cache_gib)
        with children(recipe, (1, "0"), (1, "1")) as two:
            both(two, lambda child, i: child.ask(name="smoke", part=0, parts=1))
            found["data 1"] = two[0].ask(name=name, part=0, parts=1)
            found["data 2"] = both(two, lambda child, i: child.ask(name=name, part=i, parts=2))
    return found


def summary(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, entries in found.items():
        part, _, way = name.rpartition(" ")
        if part == "sums 2":
            lines += [
                f"{way}, {entry['rows']} rows: {entry['sum_us']} µs for a sum and its norm, "
                f"{entry['gather_us']} µs for a gather of logits"
                for entry in entries[0]
            ]
        elif part == "dense 2":
            for one, two in zip(found["dense 1"], entries, strict=True):
                gain = one["ms_per_step"] / two["ms_per_step"]
                pairs = zip(one["tokens"], two["tokens"], strict=True)
                same = [_common(a, b) / len(a) for a, b in pairs]
                lines.append(
                    f"decode, {one['rows']} rows: {one['ms_per_step']} ms with one GPU, "
                    f"{two['ms_per_step']} with two ({way}): {gain:.2f} times as fast; tokens in "
                    f"common before the first difference {sum(same) / len(same):.1%}"
                )
        elif part == "experts 2":
            one, two = found["experts 1"][-1], entries[-1]
            lines.append(
                f"experts, {one['workload']}: {one['seconds']} s with one GPU, {two['seconds']} "
                f"with two ({way}): {one['seconds'] / two['seconds']:.2f} times"
            )
    if "data 1" in found:
        one, halves = found["data 1"], found["data 2"]
        seconds = max(half["seconds"] for half in halves)
        rate = sum(half["rate_before_the_last_rows"] for half in halves)
        lines.append(
            f"data parallel, {one['workload']}: {one['seconds']} s with one GPU, {seconds} with "
            f"two: {one['seconds'] / seconds:.2f} times; before the last rows run out "
            f"{rate / max(one['rate_before_the_last_rows'], 1e-9):.2f} times as many tokens per "
            "second"
        )
    return lines


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=commas(str, PARTS), default=list(PARTS))
    parser.add_argument("--sums", type=commas(str, SUMS), default=[SUMS[0]])
    parser.add_argument("--model", help="instead of the models of all parts, such as tiny")
    parser.add_argument("--workload", default="mixed", help="of the parts experts and data")
    parser.add_argument("--cache-gib", type=float, default=34.0, help="KV cache of a GPU")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure an engine whose weights are divided between two GPUs, and two engines."""
    if "sums" in options.parts and DEVICE.type == "cpu":
        raise SystemExit("the part sums needs two GPUs: leave it out of --parts")
    found = measure(options)
    lines = summary(found)
    print(*lines, sep="\n")
    return [found | {"summary": lines}]
