"""Measure the engine: its throughput, its start, and what options of it cost.

    python scripts/bench/bench_engine.py throughput --model qwen3-8b --workload mixed,decode
    python scripts/bench/bench_engine.py throughput --model qwen3-8b --workload mixed \\
        --profile trace.json.gz
    python scripts/bench/bench_engine.py throughput --model qwen3-30b-a3b --workload mixed \\
        --routing uniform [--columns routed_experts] [--quantization none,fp8] [--requests 128]
    TRITON_CACHE_DIR=$(mktemp -d) python scripts/bench/bench_engine.py start-up --model qwen3-8b
    python scripts/bench/bench_engine.py speculation replay --model qwen3-8b [--accuracy 0.7]
    python scripts/bench/bench_engine.py speculation ngram --model X.gguf --rows gsm8k.jsonl
    python scripts/bench/bench_engine.py dllm [--model sdar-8b] [--lengths 4,32]
    python scripts/bench/bench_engine.py constraint --tokenizer FOLDER [--rows 256]
    python scripts/bench/bench_engine.py tensor-parallel [--parts sums,dense] [--sums fused,nccl]
    python scripts/bench/bench_engine.py host [--rows 800] [--chunk-tokens 256] [--profile]
    python scripts/bench/bench_engine.py cpu ROWS.jsonl [--rounds 2]

All modes but `speculation ngram` and `cpu` take random weights, in bfloat16 on a GPU, or in FP8
with `--quantization fp8`, and in float32 on a CPU. Prompts are random, and EOS is ignored. Every
mode writes its figures with `--json PATH`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import decoding
import tensor_parallel
import torch
import triton
from engine_runs import Bench, Run
from measuring import DEVICE, Mode, Rates, commas, measure_rates, process_age, run_mode
from routing import ROUTINGS, run_rows
from workloads import MODELS, WORKLOADS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import StepOutput
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.step_inputs import JoiningRows
from batchgen.strategies.ar.strategy import ARStrategy

sys.path.append(str(Path(__file__).parents[1] / "check"))
from real_rows import MODEL, chat_ids, read_texts

PEERS: dict[tuple[str, str], dict[str, float]] = {
    ("qwen3-0.6b", "mixed"): {"vLLM 0.23.0": 7.6, "lmdeploy 0.18.0": 10.2},
    ("qwen3-8b", "mixed"): {"vLLM 0.23.0": 18.1, "lmdeploy 0.18.0": 21.3},
    ("qwen3-8b", "decode"): {"vLLM 0.23.0": 38.0},
    ("qwen3-8b", "prefill"): {"vLLM 0.23.0": 19.7},
    ("qwen3-30b-a3b", "mixed"): {
        "vLLM 0.26.0, H200, uniform routing": 25.4,
        "vLLM 0.23.0, H200": 23.6,
        "vLLM, H100": 51.6,
    },
    ("qwen3-30b-a3b", "decode"): {
        "vLLM 0.26.0, H200, uniform routing": 32.7,
        "vLLM 0.23.0, H200": 31.9,
    },
    ("qwen3-30b-a3b", "prefill"): {"vLLM 0.23.0, H200": 12.1},
    ("hybrid-35b-a3b", "mixed"): {"vLLM 0.26.0, H200": 25.7},
    ("hybrid-35b-a3b", "decode"): {"vLLM 0.26.0, H200": 37.8},
    ("deepseek-v2-lite", "mixed"): {"vLLM 0.26.0, H200": 9.9},
    ("deepseek-v2-lite", "prefill"): {"vLLM 0.26.0, H200": 9.0},
}
"""The seconds of other engines by model and workload, on an H100 80GB unless they say otherwise."""
_ENGINE_OPTIONS: dict[str, Any] = {
    "max_num_seqs": int,
    "max_batched_tokens": int,
    "max_model_len": int,
    "gpu_memory_utilization": float,
    "kv_cache_gib": float,
}


def describe(run: Run, model: str) -> str:
    prefill, decode, mixed, full = run.prefill, run.decode, run.mixed, run.full_batch
    lines = [
        f"{run.workload}: {run.seconds:.3f} s, {run.output_rate:.1f} output tok/s, "
        f"{run.total_rate:.1f} total tok/s"
    ]
    if run.floor_here:  # there is none on a CPU
        lines.append(
            f"  floor {run.floor.total:.2f} s (share {run.floor.total / run.seconds:.3f}), at the "
            f"rates here {run.floor_here.total:.2f} s "
            f"(share {run.floor_here.total / run.seconds:.3f})"
        )
        lines += [
            f"  {name}: {seconds} s, {seconds / run.seconds:.2f} times ours"
            for name, seconds in PEERS.get((model, run.workload), {}).items()
        ]
    host = run.seconds - prefill.seconds - decode.seconds - mixed.seconds - run.idle
    lines.append(
        f"  prefill {prefill.seconds:.3f} s in {prefill.steps} steps "
        f"(floor {run.floor.prefill:.2f}), decode {decode.seconds:.3f} s in {decode.steps} "
        f"(floor {run.floor.decode:.2f}), both in one {mixed.seconds:.3f} s in {mixed.steps}, "
        f"idle between {run.idle:.3f} s "
        f"({run.idle / run.seconds:.1%}), before and after {host:.3f} s"
    )
    if full.steps:
        each, idle = full.seconds / full.steps, full.idle_before / full.steps
        lines.append(
            f"  at batch {full.rows // full.steps}: {each * 1e3:.3f} ms per step and "
            f"{idle * 1e6:.0f} us idle ({idle / (each + idle):.2%}); mean batch "
            f"{decode.rows / decode.steps:.1f}"
        )
    lines.append(
        f"  preemptions {run.preemptions}, cached tokens {run.cached_tokens}, "
        f"peak KV use {run.peak_kv_usage:.1%}"
    )
    return "\n".join(lines)


def figures_of(run: Run, model: str) -> dict[str, Any]:
    return asdict(run) | {
        "output_tokens_per_s": run.output_rate,
        "total_tokens_per_s": run.total_rate,
        "idle_seconds": run.idle,
        "floor_share": run.floor.total / run.seconds,
        "floor_share_here": run.floor_here and run.floor_here.total / run.seconds,
        "peer_seconds": PEERS.get((model, run.workload), {}),
    }


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--routing", choices=ROUTINGS, default="model", help="who chooses experts")
    parser.add_argument("--columns", type=commas(str), default=[], help="of every request")
    parser.add_argument("--quantization", type=commas(str, ("none", "fp8")), default=["none"])
    parser.add_argument("--requests", type=int, help="only the first so many of each workload")
    for name, kind in _ENGINE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", default=None)
    parser.add_argument("--no-cuda-graph", dest="cuda_graph", action="store_false", default=None)


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--workload", type=commas(str, WORKLOADS), required=True)
    parser.add_argument("--runs", type=int, default=1, help="timed runs of each workload")
    parser.add_argument("--profile", type=Path, help="after the runs; traces NAME.json or .json.gz")
    parser.add_argument("--profile-after", type=int, default=8, help="decode steps before")


def make_bench(options: argparse.Namespace, quantization: str) -> Bench:
    names = (*_ENGINE_OPTIONS, "overlap", "cuda_graph")
    given = {name: getattr(options, name) for name in names}
    return Bench(
        options.model,
        EngineConfig(**{name: value for name, value in given.items() if value is not None}),
        routing=options.routing,
        columns=tuple(options.columns),
        quantization="fp8" if quantization == "fp8" else None,
        most_requests=options.requests,
    )


def run_throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run workloads, each beside the physical floor of its work and the times of other engines.

    Printed is how the time divides into prefill, decode and a device that waits for the host. For a
    model with experts it also counts how many of them a step touches: random weights route less
    evenly than chance does (`--routing uniform`), and the dummy weights of other engines may let
    all tokens go to the same experts (`--routing same`).
    """
    if options.profile and DEVICE.type == "cpu":
        raise SystemExit("--profile needs a GPU")
    here = measure_rates()
    if here:
        print(here)
    found = []
    for quantization in options.quantization:
        if len(options.quantization) > 1:
            print(f"quantization {quantization}")
        found.append(run_workloads(options, quantization, here))
    return found


def run_workloads(
    options: argparse.Namespace, quantization: str, here: Rates | None
) -> dict[str, Any]:
    bench = make_bench(options, quantization)
    warm_up = bench.warm_up(options.workload, options.temperature)
    print(
        f"load {bench.load_seconds:.2f} s, engine {bench.engine_seconds:.2f} s, "
        f"warm-up {warm_up:.2f} s\n{bench.engine.memory}",
        flush=True,
    )
    runs = []
    for name in options.workload:
        for _ in range(options.runs):
            run = bench.run(name, options.temperature, here)
            print(describe(run, options.model), flush=True)
            runs.append(figures_of(run, options.model))
    if options.profile:
        for name in options.workload:
            bench.profile(name, options.temperature, options.profile, options.profile_after)
    engine_config, memory = asdict(bench.engine.config), asdict(bench.engine.memory)
    peak = torch.cuda.max_memory_reserved() if here else None
    bench.free()
    touched = {name: bench.touched(name) for name in options.workload}
    for name, kinds in touched.items():
        for kind in kinds:
            print(f"{name}: {kind.line()}")
    return {
        "model": options.model,
        "engine_config": engine_config,
        "quantization": quantization,
        "requests": options.requests,
        "routing": options.routing,
        "columns": options.columns,
        "experts_touched": {name: [asdict(t) for t in kinds] for name, kinds in touched.items()},
        "memory": memory,
        "rates": asdict(here) if here else None,
        "load_seconds": bench.load_seconds,
        "engine_seconds": bench.engine_seconds,
        "warm_up_seconds": warm_up,
        "peak_memory_bytes": peak,
        "runs": runs,
    }


def run_start_up(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the start of a process up to its first token, and count the kernels that it compiles."""
    imported = process_age()
    compiled: list[bool] = []  # whether a thread compiled it ahead; kernels of the cache not at all

    def listen(cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(threading.current_thread() is not threading.main_thread())

    triton.knobs.compilation.listener = listen
    bench = make_bench(options, options.quantization[0])
    built, of_engine = process_age(), len(compiled)
    bench.first_token(options.temperature)
    total, ahead = process_age(), sum(compiled)
    print(
        f"first token {total:.2f} s after the process started: imports {imported:.2f} s, weights "
        f"{bench.load_seconds:.2f} s, engine {bench.engine_seconds:.2f} s, "
        f"request {total - built:.2f} s\n"
        f"kernels compiled ahead {ahead}, by the engine's launches {of_engine - ahead}, "
        f"by the request's {len(compiled) - of_engine}"
    )
    return [
        {
            "model": options.model,
            "engine_config": asdict(bench.engine.config),
            "first_token_seconds": total,
            "imports_seconds": imported,
            "load_seconds": bench.load_seconds,
            "engine_seconds": bench.engine_seconds,
            "request_seconds": total - built,
            "kernels_compiled_ahead": ahead,
            "kernels_compiled_by_engine": of_engine - ahead,
            "kernels_compiled_by_request": len(compiled) - of_engine,
        }
    ]


class FreeStrategy(ARStrategy):
    """Gives every row the same token, without looking at logits."""

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        return self.decide(output, None)

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        rows = len(output.positions)
        return StepOutput(
            torch.ones(rows, dtype=torch.int32),
            torch.full((rows, 1), 7),
            torch.zeros(rows, dtype=torch.bool),
            {"logprobs": torch.zeros(rows, 1)},
        )


class FreeRunner(ModelRunner):
    """Runs no forward and returns empty logits."""

    def decode(self, inputs: ModelInputs) -> ModelOutput:
        return ModelOutput(torch.empty(0), inputs.positions)

    def prefill(self, prefill: PrefillInputs, all_hidden: bool = False) -> ModelOutput:
        last = self._last_tokens(prefill.inputs, prefill.rows)
        return ModelOutput(torch.empty(0), prefill.inputs.positions[last])

    def mixed(
        self, decode: ModelInputs, prefill: PrefillInputs, all_hidden: bool = False
    ) -> tuple[ModelOutput, ModelOutput]:
        return self.decode(decode), self.prefill(prefill)


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")


def run_host(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time what the host does in a step, on a CPU: forwards and draws are skipped.

    Scheduling, block tables, the batch's rows, stops and columns are those of the engine. Rows have
    60 to 140 prompt tokens and generate 60 to 256 tokens with log-probabilities.
    """
    torch.set_num_threads(1)
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=8192,
        chunk_tokens=options.chunk_tokens,
        kv_cache_gib=1,
        overlap=True,
    )
    model = dummy_model("tiny", torch.device("cpu"))
    with mock.patch("batchgen.engine.llm_engine.ModelRunner", FreeRunner):
        engine = LLMEngine(model, None, (), FreeStrategy(), config)
    draws, rows, steps = random.Random(0), [], list[int]()
    for seed in range(options.rows):
        prompt = [draws.randrange(engine.vocab_size) for _ in range(draws.randint(60, 140))]
        length = draws.randint(60, 256)
        params = SamplingParams(
            temperature=0.7, top_p=0.9, max_new_tokens=length, seed=seed, logprobs=True
        )
        rows.append((prompt, params))
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    seconds, _ = run_rows(engine, rows, steps.append)
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    stats, each = engine.stats, seconds / len(steps) * 1e3
    mean_rows = stats.decode_rows / stats.decode_steps
    print(
        f"{len(steps)} steps, {each:.2f} ms each; {stats.prefill_steps} with a "
        f"prefill, mean decode batch {mean_rows:.0f}"
    )
    return [{"steps": len(steps), "ms_per_step": each, "mean_decode_batch": mean_rows}]


def transformers_answers(
    model: Any, prompts: list[list[int]], new_tokens: int, batch_size: int, eos: int
) -> list[list[int]]:
    """Generate with left padding, as the documentation of transformers shows; tokens behind a row's
    end do not count."""
    answers: list[list[int]] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        width = max(map(len, batch))
        output = model.generate(
            torch.tensor([[eos] * (width - len(p)) + p for p in batch]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch]),
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            pad_token_id=eos,
            eos_token_id=eos,
        )
        for row in output[:, width:].tolist():
            answers.append(row[: row.index(eos) + 1] if eos in row else row)
    return answers


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, help="JSONL")
    parser.add_argument("--field", default="question")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16, help="of transformers")
    parser.add_argument("--rounds", type=int, default=2)


def run_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the tokens per second of batchgen and of transformers' generate on a CPU.

    Both answer chat prompts greedily in float32 on 2 threads. They run in turn, round by round, so
    that a slow phase of the machine affects both.
    """
    from transformers import AutoModelForCausalLM

    from batchgen import LLM
    from batchgen import SamplingParams as Params
    from batchgen.model.model_source import resolve_model

    torch.set_num_threads(2)
    llm = LLM(MODEL, device="cpu")
    assert llm.tokenizer is not None
    eos = int(llm.tokenizer.eos_token_id)
    path = resolve_model(MODEL, None)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    texts = read_texts(options.rows, options.field, options.prompts)
    prompts = [chat_ids(llm.tokenizer, text) for text in texts]
    transformers_answers(reference, prompts[:2], 2, 2, eos)
    params = Params(temperature=0, max_new_tokens=options.new_tokens)
    rates: dict[str, list[float]] = {"batchgen": [], "transformers": []}
    equal = 0
    for _ in range(options.rounds):
        llm = LLM(MODEL, device="cpu")  # a new one, whose prefix cache is empty
        llm.generate([[eos]], Params(temperature=0, max_new_tokens=2))
        start = time.perf_counter()
        ours = [outputs[0].token_ids for outputs in llm.generate(prompts, params)]
        middle = time.perf_counter()
        theirs = transformers_answers(
            reference, prompts, options.new_tokens, options.batch_size, eos
        )
        end = time.perf_counter()
        rates["batchgen"].append(sum(map(len, ours)) / (middle - start))
        rates["transformers"].append(sum(map(len, theirs)) / (end - middle))
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    best = {name: max(values) for name, values in rates.items()}
    figures = {
        "useful_tokens_per_s": {name: [round(v, 1) for v in vs] for name, vs in rates.items()},
        "ratio_of_best": round(best["batchgen"] / best["transformers"], 2),
        "equal_answers": f"{equal} of {len(prompts)}",
        "prompt_tokens": sum(map(len, prompts)),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures, indent=1))
    return [figures]


MODES = {
    "throughput": Mode(add_throughput_arguments, run_throughput),
    "start-up": Mode(add_model_arguments, run_start_up),
    "speculation": Mode(decoding.add_speculation_arguments, decoding.run_speculation),
    "dllm": Mode(decoding.add_dllm_arguments, decoding.run_dllm),
    "constraint": Mode(decoding.add_constraint_arguments, decoding.run_constraint),
    "tensor-parallel": Mode(tensor_parallel.add_arguments, tensor_parallel.run),
    "host": Mode(add_host_arguments, run_host),
    "cpu": Mode(add_cpu_arguments, run_cpu),
}


if __name__ == "__main__":
    run_mode(__doc__, MODES)
