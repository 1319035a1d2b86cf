"""The mode tensor-parallel of bench_engine.py: weights divided between the GPUs of one host."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from measuring import DEVICE, commas
from modes.rank_watch import Plan, Watch, describe, read_reports, windows_of
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
class Variant:
    """An engine's settings that runs are compared in, beside those that all have."""

    name: str
    chunk_tokens: int | None = None  # `BatchLimits.chunk_tokens`; None leaves it


class Begin(NamedTuple):
    """Watch all steps from the next on, with these limits of batches."""

    plan: Plan
    variant: Variant


class End(NamedTuple):
    """Stop watching."""


@dataclass(frozen=True)
class BenchRecipe:
    """What each rank runs: a workload on a model of `MODELS`."""

    model: str
    workload: str
    cache_gib: float
    variants: tuple[Variant, ...]
    runs: int
    folder: Path  # where ranks write what they have seen
    profiled: bool  # profile some steps of each kind after the runs

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
        watch = Watch(parallel.rank, self.folder)
        with watch.counting():
            engine = self.engine(parallel)
            calls = _Calls(connection, Watched(engine, watch))
            follow_engine(engine, cast("Connection[Any, Any]", calls))


class Watched:
    """The engine of a rank, and what watches it."""

    def __init__(self, engine: LLMEngine, watch: Watch) -> None:
        self.engine, self._watch = engine, watch
        self._limits = engine.scheduler.limits

    def obey(self, call: Begin | End) -> None:
        """Do what all ranks do at the same point of their work."""
        if isinstance(call, End):
            self._watch.end(self.engine)
            return
        changes = {} if (chunk := call.variant.chunk_tokens) is None else {"chunk_tokens": chunk}
        self.engine.scheduler.limits = replace(self._limits, **changes)
        self._watch.begin(self.engine, call.plan)


class _Calls:
    """A connection of which a rank's engine sees the commands alone."""

    def __init__(self, connection: Connection[Any, Any], watched: Watched) -> None:
        self._connection, self._watched = connection, watched

    def recv(self) -> object:
        while isinstance(received := self._connection.recv(), Begin | End):
            self._watched.obey(received)
        return received


class Session:
    """Runs of a workload on all ranks, as rank 0 makes them."""

    def __init__(
        self, recipe: BenchRecipe, watched: Watched, processes: RankProcesses | None
    ) -> None:
        self._recipe, self._watched, self._processes = recipe, watched, processes
        self._shift = 0

    def run(self, plan: Plan, variant: Variant) -> tuple[float, list[dict[str, Any]]]:
        """Run the workload once, watched; returns the seconds and what each rank saw."""
        self._tell(Begin(plan, variant))
        seconds, _ = run_rows(self._watched.engine, self.rows())
        self._tell(End())
        return seconds, read_reports(self._recipe.folder, plan.name, self._size)

    def rows(self, step: int = 1) -> list[tuple[list[int], RequestParams]]:
        """Make each `step`th row, with prompts that the prefix cache does not have."""
        vocab, shift = prompt_vocab(self._watched.engine.vocab_size), self._shift
        self._shift += 1
        return [
            (
                [(token + shift) % vocab for token in r.prompt],
                RequestParams(temperature=0, max_new_tokens=r.output_len, ignore_eos=True),
            )
            for r in requests(self._recipe.workload, vocab)[::step]
        ]

    @property
    def _size(self) -> int:
        return 1 if self._processes is None else self._processes.parallel.size

    def _tell(self, call: Begin | End) -> None:
        if self._processes is not None:
            self._processes.send(call)
        self._watched.obey(call)

    def measure(self) -> dict[str, Any]:
        """Time the workload in each variant, after a quarter of it that compiles kernels."""
        recipe, engine = self._recipe, self._watched.engine
        run_rows(engine, self.rows(4))
        found: dict[str, Any] = {"memory": str(engine.memory), "runs": []}
        load = requests(recipe.workload, prompt_vocab(engine.vocab_size))
        tokens = sum(r.output_len for r in load)
        orders: dict[str, list[str]] = {}
        for index, variant in enumerate(recipe.variants * recipe.runs):
            name = f"{self._size}-{index}"
            seconds, reports = self.run(Plan(name), variant)
            orders[variant.name] = reports[0]["order"]
            found["runs"].append(
                {"variant": variant.name, "seconds": seconds, "ranks": reports}
                | {"output_tokens_per_s": tokens / seconds}
            )
            print(f"{self._size} ranks, {variant.name}: {seconds:.2f} s", flush=True)
            print(describe(reports), flush=True)
        found["profiles"] = []
        for index, variant in enumerate(recipe.variants if recipe.profiled else ()):
            plan = Plan(
                f"{self._size}-profile-{index}",
                windows_of(orders[variant.name]),
                places=True,
            )
            seconds, reports = self.run(plan, variant)
            found["profiles"].append(
                {"variant": variant.name, "seconds": seconds, "ranks": reports}
            )
            print(f"{self._size} ranks, {variant.name}, profiled: {seconds:.2f} s", flush=True)
            print(describe(reports), flush=True)
        found["seconds"] = min(run["seconds"] for run in found["runs"])
        return found


def serve(recipe: BenchRecipe, ranks: int, results: Connection[Any, Any]) -> None:
    """Measure a recipe as rank 0 of its ranks, in a process of its own, and send the figures."""
    started = time.perf_counter()
    processes = RankProcesses(ranks, recipe, DEVICE.type) if ranks > 1 else None
    watch = Watch(0, recipe.folder)
    with watch.counting():
        if processes:
            with processes.starting():
                engine = recipe.engine(processes.parallel, Leader(processes))
        else:
            engine = recipe.engine()
        ready = time.perf_counter() - started
        print(f"{ranks} ranks are ready after {ready:.1f} s", flush=True)
        found = Session(recipe, Watched(engine, watch), processes).measure()
    results.send({"ranks": ranks, "ready_seconds": ready} | found)
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
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--workload", default="mixed")
    parser.add_argument("--ranks", type=commas(int), default=[1, 2], help="numbers of GPUs")
    parser.add_argument("--cache-gib", type=float, default=34.0, help="KV cache of a GPU")
    parser.add_argument("--runs", type=int, default=1, help="timed runs of each variant")
    parser.add_argument(
        "--chunk-tokens", type=commas(int), default=[], help="variants; none: the engine's own"
    )
    parser.add_argument("--profile", action="store_true", help="then: kernels and host of steps")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a workload on each number of GPUs, which divide the weights, one after the other and
    each in processes of its own. The first number is what the others are compared with.

    Printed is what each rank does in each kind of step: the device's time and idle time, the host's
    work, and its waits for results and for rank 0.
    """
    variants = tuple(Variant(f"chunk_tokens={n}", n) for n in options.chunk_tokens)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            recipe = BenchRecipe(
                options.model,
                options.workload,
                options.cache_gib,
                variants or (Variant("as it is"),),
                options.runs,
                Path(folder),
                options.profile,
            )
            found.append(measured(recipe, ranks))
            found[-1]["times"] = found[0]["seconds"] / found[-1]["seconds"]
    for each in found:
        print(
            f"{options.model}, {options.workload}: {each['seconds']:.1f} s on {each['ranks']} "
            f"GPUs, {each['times']:.2f} times as fast as on {found[0]['ranks']}"
        )
    return found
