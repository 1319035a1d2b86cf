"""The mode table of bench_engine.py: the table of docs/benchmarks/models.md in one command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from measuring import commas, measure_rates
from modes.turns import HERE, Process, Spec, compared, in_turn

_ALL = ("mixed", "decode", "prefill")


@dataclass(frozen=True)
class Line:
    """A model of the table, with the form of its weights and of its cache."""

    model: str
    workloads: tuple[str, ...] = _ALL
    weights: str | None = None  # fp8; None: as the checkpoint has them
    cache: str | None = None  # fp8; None: in the dtype of the model
    requests: int | None = None  # the first so many of each workload; None: all

    @property
    def name(self) -> str:
        forms = [f"weights in {self.weights}"] * bool(self.weights)
        forms += [f"cache in {self.cache}"] * bool(self.cache)
        return ", ".join([self.model, *forms])


LINES = (
    Line("qwen3-0.6b", ("mixed", "mixed1k")),
    Line("qwen3-8b"),
    Line("qwen3-8b", weights="fp8"),
    Line("qwen3-8b", ("mixed", "decode"), cache="fp8"),
    Line("qwen3-30b-a3b"),
    Line("qwen3-30b-a3b-fp8", ("mixed",)),
    Line("deepseek-v2-lite"),
    Line("hybrid-35b-a3b"),
    Line("nemotron-30b-a3b", ("decode",)),
    Line("gpt-oss-20b"),
    Line("gpt-oss-120b", ("mixed", "decode")),
    Line("gemma3-27b", ("mixed",)),
    Line("gemma4-26b-a4b", ("mixed",)),
    Line("gemma4-31b", ("mixed",), weights="fp8", cache="fp8", requests=128),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = {line.model for line in LINES} | {"tiny", "tiny-moe"}
    parser.add_argument("--models", type=commas(str, names), help="only these")
    parser.add_argument("--workloads", type=commas(str, _ALL), help="only these")
    parser.add_argument("--layers", type=int, default=0, help="the first N layers; 0: all")
    parser.add_argument("--requests", type=int, help="the most rows of a workload")
    parser.add_argument("--cache-gib", type=float, help="KV cache of each engine")
    parser.add_argument("--rounds", type=int, default=1, help="runs, of which the median counts")
    parser.add_argument("--beside", type=Path, help="the root of an older tree, run in turn")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time each line of the table, and print it as Markdown.

    With --beside each workload runs in turn in an engine of the other tree and one of this tree,
    both on the GPU, which may take --layers and --cache-gib; the last two columns are how much
    longer this tree takes, and the spread of the other's runs.
    """
    rates = measure_rates()
    results = []
    print("| model, workload | floor | seconds | share | a step |", end="")
    print(" other tree | longer | spread |" if options.beside else "")
    for line in _lines(options):
        trees = [options.beside.resolve(), HERE] if options.beside else [HERE]
        processes = [Process(_spec(options, line, rates), tree) for tree in trees]
        try:
            for process in processes:
                process.wait()
            for workload in line.workloads:
                turns = in_turn(processes, workload, options.rounds)
                results.append({"line": line.name, "workload": workload, "turns": turns})
                print(_row(line, workload, turns), flush=True)
        except RuntimeError as error:  # the older tree may not know the model, or memory is short
            print(f"| {line.name} | {error} |", flush=True)
        for process in processes:
            process.close()
    return results


def _lines(options: argparse.Namespace) -> list[Line]:
    """Return the chosen lines with the chosen workloads."""
    known = [*LINES, Line("tiny", ("smoke",)), Line("tiny-moe", ("smoke",))]
    chosen = [line for line in known if line.model in options.models] if options.models else LINES
    if not options.workloads:
        return list(chosen)
    own = [tuple(each for each in line.workloads if each in options.workloads) for line in chosen]
    return [replace(line, workloads=each) for line, each in zip(chosen, own, strict=True) if each]


def _spec(options: argparse.Namespace, line: Line, rates: Any) -> Spec:
    config = {"max_model_len": 2304, "kv_cache_gib": options.cache_gib}
    requests = min(filter(None, (line.requests, options.requests)), default=None)
    bench = {
        "quantization": line.weights,
        "kv_cache_dtype": line.cache,
        "most_requests": requests,
    }
    # An older tree may not know all options.
    bench = {name: value for name, value in bench.items() if value is not None}
    return Spec(line.model, line.workloads, options.layers, config, bench, rates=rates)


def _row(line: Line, workload: str, turns: list[list[dict[str, Any]]]) -> str:
    """Return the line of a workload, whose last figures are those of this tree."""
    own, last = [figures["seconds"] for figures in turns[-1]], turns[-1][-1]
    floor, seconds = last["floor"], median(own)
    cells = [f"{floor:.1f} s" if floor else "", f"{seconds:.2f} s"]
    cells += [f"{floor / seconds:.2f}" if floor else ""]
    cells += [f"{last['step_ms']:.2f} ms of {last['step_rows']} rows"]
    if len(turns) > 1:
        both = compared([figures["seconds"] for figures in turns[0]], own)
        cells += [f"{median(both['A']):.2f} s", f"{round(both['difference'], 3) + 0.0:+.1%}"]
        cells += [f"{both['spread']:.1%}"]
    return f"| {line.name}, {workload} | {' | '.join(cells)} |"
