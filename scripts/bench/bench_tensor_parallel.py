"""Measure an engine whose weights are divided between two GPUs, and two engines beside each other.

    python scripts/bench/bench_tensor_parallel.py --json PATH
    python scripts/bench/bench_tensor_parallel.py --parts sums,dense --sums fused,apart,nccl

Parts, of which --parts chooses some:

- sums: a sum over two GPUs and the norm behind it, of rows of 4,096 values in bfloat16, and a
  gather of logits for 151,936 ids, in CUDA graphs.
- dense: decode steps of qwen3-8b with 4 and with 256 rows, with one GPU and with two, and how many
  tokens both have in common, greedily in bfloat16.
- experts: the workload mixed on qwen3-30b-a3b, with one GPU and with two.
- data: the workload mixed1k on qwen3-8b, with one GPU, and halved between two engines of one GPU
  each: with the time in which the last rows run out, and the rates before that begins.

The weights are random. Each engine is a process of its own, with so large a cache that others have
room on its GPU (--cache-gib).

--sums chooses how two GPUs sum. The parts sums, dense and experts measure each of several ways:

- fused: a kernel of ours, which computes the norm behind the sum as well.
- apart: the same kernel, and another one that computes the norm once more, as if the first had not.
- nccl: NCCL sums and gathers, and other kernels add the sum and compute the norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from bench_recipe import SUMS, BenchRecipe, SumsRecipe
from workloads import BenchRequest, prompt_vocab, requests

from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.parallel.rank_group import end_process
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.replicas import Leader
from batchgen.engine.sampling.sampling_params import SamplingParams

T = TypeVar("T")
_MODELS = {"dense": "qwen3-8b", "experts": "qwen3-30b-a3b", "data": "qwen3-8b"}
_SUMS = "sums"
_ROWS = (4, 256)
_PROMPT, _TOKENS = 128, 192
_END_SECONDS = 20.0


class Served:
    """An engine in this process that is told over stdin what to measure."""

    def __init__(self, recipe: BenchRecipe, ranks: int) -> None:
        started = time.perf_counter()
        self._processes: RankProcesses | None = None
        if ranks > 1:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._processes = RankProcesses(ranks, recipe, device)
            with self._processes.starting():
                leader = Leader(self._processes)
                self._engine = recipe.engine(self._processes.parallel, leader)
        else:
            self._engine = recipe.engine()
        self._vocab = prompt_vocab(self._engine.vocab_size)
        self.start_seconds = time.perf_counter() - started

    def serve(self) -> None:
        _say({"ready": round(self.start_seconds, 2), "memory": str(self._engine.memory)})
        for line in sys.stdin:
            asked = json.loads(line)
            _say(self.decode(asked["rows"]) if "rows" in asked else self.workload(**asked))
        self._engine.close()
        end_process(0)

    def decode(self, rows: int) -> dict[str, Any]:
        """Time decode steps of so many rows: what more tokens take than fewer."""
        load = [
            BenchRequest([(7 * i + 11 * j) % self._vocab for j in range(_PROMPT)], 0)
            for i in range(rows)
        ]
        self._run([BenchRequest(r.prompt, 8) for r in load])
        few, _, _ = self._run([BenchRequest(r.prompt, 16) for r in load])
        many, _, outputs = self._run([BenchRequest(r.prompt, 16 + _TOKENS) for r in load])
        return {
            "rows": rows,
            "ms_per_step": round((many - few) / _TOKENS * 1e3, 4),
            "tokens": [output.token_ids for output in outputs],
        }

    def workload(self, name: str, part: int, parts: int) -> dict[str, Any]:
        """Time a share of a workload."""
        load = requests(name, self._vocab)[part::parts]
        seconds, full, _ = self._run(load)
        tokens = sum(r.output_len for r in load)
        full_seconds, full_tokens = full
        return {
            "workload": name,
            "part": f"{part + 1}/{parts}",
            "seconds": round(seconds, 3),
            "output_tokens": tokens,
            "output_tokens_per_s": round(tokens / seconds, 1),
            "seconds_before_the_last_rows": round(full_seconds, 3),
            "rate_before_the_last_rows": round(full_tokens / max(full_seconds, 1e-9), 1),
        }

    def _run(
        self, load: Sequence[BenchRequest]
    ) -> tuple[float, tuple[float, int], list[RequestOutput]]:
        """Run requests.

        Returns:
            The seconds; the seconds and the tokens until fewer rows are left than can run at once;
            the outputs in the order of the requests.
        """
        engine, outputs = self._engine, {}
        begun, full = engine.generated_tokens, (0.0, 0)
        _synchronize()
        started = time.perf_counter()
        for i, request in enumerate(load):
            params = SamplingParams(
                temperature=0, max_new_tokens=request.output_len, ignore_eos=True
            )
            engine.add_request(str(i), request.prompt, params)
        while engine.has_unfinished():
            for output in engine.step():
                outputs[int(output.request_id)] = output
            if len(load) - len(outputs) >= engine.max_num_seqs:
                full = time.perf_counter() - started, engine.generated_tokens - begun
        _synchronize()
        seconds = time.perf_counter() - started
        return seconds, full, [outputs[i] for i in range(len(load))]


def serve_sums(sums: str) -> None:
    """Measure sums and gathers of two ranks, and say the result to who asks over stdin."""
    started = time.perf_counter()
    recipe = SumsRecipe(sums)
    processes = RankProcesses(2, recipe, "cuda")
    _say({"ready": round(time.perf_counter() - started, 2)})
    found = recipe.measure(processes.parallel)
    for _ in sys.stdin:
        _say({"sums": found})
    end_process(0)


class Child:
    """The process of an engine, on GPUs of its own."""

    def __init__(self, model: str, ranks: int, gpus: str, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", model, "--ranks", str(ranks), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
        )
        self._name = f"{model}, {ranks} ranks on {gpus}"

    def wait(self) -> None:
        """Wait until the engine is ready."""
        print(f"{self._name}: {self._read()}", flush=True)

    def ask(self, **what: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        said = self._read()
        shown = {name: value for name, value in said.items() if name != "tokens"}
        print(f"{self._name}: {shown}", flush=True)
        return said

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{self._name}: did not end, and is killed", flush=True)
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended with exit code {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said


def measure(
    parts: Sequence[str], sums: Sequence[str], options: Sequence[str], models: Mapping[str, str]
) -> Any:
    """Measure the parts that were asked for, those with two ranks in each of the ways to sum."""
    found: dict[str, Any] = {}
    if "sums" in parts:
        for way in sums:
            found[f"sums {way}"] = ask_two(_SUMS, way, (), {})[0]["sums"]
    if "dense" in parts:
        steps = [{"rows": rows} for rows in _ROWS]
        for way in sums:
            found[f"dense 2 {way}"] = ask_two(models["dense"], way, options, *steps)
    if {"dense", "data"} & {*parts}:
        wanted = [(1, "0")] + [(1, "1")] * ("data" in parts)
        children = start(models["dense"], wanted, options)
        if "dense" in parts:
            found["dense 1"] = [children[0].ask(rows=rows) for rows in _ROWS]
        if "data" in parts:
            both(children, lambda child, i: child.ask(name="smoke", part=0, parts=1))
            found["data 1"] = children[0].ask(name="mixed1k", part=0, parts=1)
            found["data 2"] = both(
                children, lambda child, i: child.ask(name="mixed1k", part=i, parts=2)
            )
        both(children, lambda child, i: child.end())
    if "experts" in parts:
        # The first run may compile kernels.
        loads: list[dict[str, Any]] = [
            {"name": "mixed", "part": 0, "parts": shares} for shares in (4, 1)
        ]
        for way in sums:
            found[f"experts 2 {way}"] = ask_two(models["experts"], way, options, *loads)[-1]
        (child,) = start(models["experts"], [(1, "1")], options)
        found["experts 1"] = [child.ask(**load) for load in loads][-1]
        child.end()
    return found


def ask_two(
    model: str, way: str, options: Sequence[str], *loads: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Start an engine of two ranks that sum in this way, measure loads, and end it."""
    (child,) = start(model, [(2, "0,1")], [*options, "--sums", way])
    found = [child.ask(**load) for load in loads]
    child.end()
    return found


def start(model: str, wanted: Sequence[tuple[int, str]], options: Sequence[str]) -> list[Child]:
    """Start engines of so many ranks on these GPUs, and wait until all are ready."""
    children = [Child(model, ranks, gpus, *options) for ranks, gpus in wanted]
    both(children, lambda child, i: child.wait())
    return children


def both(children: Sequence[Child], call: Callable[[Child, int], T]) -> list[T]:
    """Call a function for all engines at the same time."""
    with ThreadPoolExecutor(len(children)) as pool:
        return list(pool.map(call, children, range(len(children))))


def summary(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, entries in found.items():
        part, _, way = name.rpartition(" ")
        if part == "sums":
            lines += [
                f"{way}, {entry['rows']} rows: {entry['sum_us']} µs for a sum and its norm, "
                f"{entry['gather_us']} µs for a gather of logits"
                for entry in entries
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
            one, two = found["experts 1"]["seconds"], entries["seconds"]
            lines.append(
                f"experts, mixed: {one} s with one GPU, {two} with two ({way}): "
                f"{one / two:.2f} times"
            )
    if {"data 1", "data 2"} <= found.keys():
        one, halves = found["data 1"], found["data 2"]
        seconds = max(half["seconds"] for half in halves)
        rate = sum(half["rate_before_the_last_rows"] for half in halves)
        lines.append(
            f"data parallel, mixed1k: {one['seconds']} s with one GPU, {seconds} with two: "
            f"{one['seconds'] / seconds:.2f} times; before the last rows run out "
            f"{rate / one['rate_before_the_last_rows']:.2f} times as many tokens per second"
        )
    return lines


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def _say(what: Mapping[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="sums,dense,experts,data", help="comma separated")
    parser.add_argument("--sums", default=SUMS[0], help=f"of {', '.join(SUMS)}; comma separated")
    parser.add_argument("--model", help="instead of the models of all parts, such as tiny")
    parser.add_argument("--cache-gib", type=float, default=34.0, help="KV cache of a GPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == _SUMS:
        serve_sums(arguments.sums)
        return
    if arguments.serve:
        recipe = BenchRecipe(arguments.serve, arguments.cache_gib, arguments.sums)
        Served(recipe, arguments.ranks).serve()
        return
    parts, sums = arguments.parts.split(","), arguments.sums.split(",")
    for given, known in ((parts, (_SUMS, *_MODELS)), (sums, SUMS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown {min(unknown)!r}: choose from {', '.join(known)}")
    if _SUMS in parts and not torch.cuda.is_available():
        parser.error("the part sums needs two GPUs: leave it out of --parts")
    models = dict.fromkeys(_MODELS, arguments.model) if arguments.model else _MODELS
    options = ["--cache-gib", str(arguments.cache_gib)]
    found = measure(parts, sums, options, models)
    lines = summary(found)
    print(*lines, sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(found | {"summary": lines}) + "\n")


if __name__ == "__main__":
    main()
