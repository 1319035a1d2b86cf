"""The mode adapters of bench_engine.py: what rows with LoRA adapters cost beside rows without."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import DEVICE, commas
from modes.routing import run_rows
from safetensors.torch import save_file
from shapes import MODELS
from workloads import WORKLOADS, dummy_model, prompt_vocab, requests

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.adapter_factors import experts_of
from batchgen.engine.loading.adapters import add_adapters
from batchgen.engine.loading.peft_files import open_adapter
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import BASE, RequestParams
from batchgen.strategies.ar.strategy import ARStrategy

_WARM_UP = 64
"""Rows that run before any that are timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="mixed")
    parser.add_argument("--adapters", type=commas(int), default=[1, 4, 16], help="how many at once")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--experts", action="store_true", help="adapters change them, too")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--runs", type=int, default=2, help="timed runs of each, in turn")
    parser.add_argument("--kv-cache-gib", type=float)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a workload whose rows have no adapter, or one of several in turn.

    Rows without an adapter run in an engine of the model alone and, as "0 adapters", in the engine
    that has adapters. Each turn (`--runs`) times every number of adapters once.
    """
    rows = requests(options.workload, prompt_vocab(MODELS[options.model]["vocab_size"]))
    most, seconds = max(options.adapters), dict[str, list[float]]()
    for number in (0, most):
        engine = _engine(options, number)
        cases = [0, *options.adapters] if number else [None]
        _time(engine, rows[:_WARM_UP], cases[-1], 0)
        for turn in range(options.runs):
            for adapters in cases:
                took = _time(engine, rows[: options.requests], adapters, 1 + turn)
                name = "model alone" if adapters is None else f"{adapters} adapters"
                seconds.setdefault(name, []).append(took)
                print(f"{name}: {took:.2f} s", flush=True)
        del engine
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    base = median(seconds["model alone"])
    for name, runs in seconds.items():
        times = ", ".join(f"{one:.2f}" for one in runs)
        print(f"{name}: {times} s, {base / median(runs):.3f} of the speed without", flush=True)
    return [{"model": options.model, "rank": options.rank, "seconds": seconds}]


def _engine(options: argparse.Namespace, adapters: int) -> LLMEngine:
    """Make an engine with this many adapters, called a0, a1 and so on."""
    model = dummy_model(options.model, DEVICE)
    if adapters:
        with tempfile.TemporaryDirectory() as folder:
            # All adapters are one file under different names, and the engine has a copy for each.
            path = Path(folder)
            _write_adapter(path, model, options.rank, experts=options.experts)
            add_adapters(model, {f"a{i}": open_adapter(path) for i in range(adapters)})
    config = EngineConfig(max_num_seqs=256, max_model_len=2304, kv_cache_gib=options.kv_cache_gib)
    engine = LLMEngine(model, None, (), ARStrategy(), config)
    engine.capture_graphs()
    return engine


def _write_adapter(folder: Path, model: CausalLM, rank: int, *, experts: bool) -> None:
    """Write a LoRA adapter in PEFT's format for all linear layers that can have one, and with
    `experts` also for all experts."""
    tensors = dict[str, torch.Tensor]()
    slots = {slot.pieces[0]: slot for slot in model.checkpoint_slots() if len(slot.pieces) == 1}
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name, slot in slots.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or ".experts." in module:
            continue
        width, depth = slot.source_shape
        tensors |= _factors(module, width, depth, rank)
    parameters = set()
    for path, part in experts_of(model).items() if experts else ():
        for name, nested in zip(part.names, (".base_layer", ""), strict=True):
            count, width, depth = part.sizes(name)
            tensors |= _factors(path + nested, width, depth, count * rank)
            parameters.add(f"experts.{name}")
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "target_parameters": sorted(parameters),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _factors(module: str, width: int, depth: int, rank: int) -> dict[str, torch.Tensor]:
    """Return small random factors A and B of a weight, by their names in an adapter's file."""
    shapes = {"A": (rank, depth), "B": (width, rank)}
    return {
        f"base_model.model.{module}.lora_{factor}.weight": torch.randn(shape, device=DEVICE)
        .mul_(0.01)
        .bfloat16()
        .cpu()
        for factor, shape in shapes.items()
    }


def _time(engine: LLMEngine, load: list[Any], adapters: int | None, turn: int) -> float:
    vocab = prompt_vocab(engine.vocab_size)
    rows = []
    for index, each in enumerate(load):
        name = f"a{index % adapters}" if adapters else BASE if adapters == 0 else None
        params = RequestParams(
            temperature=0.6, ignore_eos=True, max_new_tokens=each.output_len, seed=index, lora=name
        )
        # Shifted ids make prompts that the prefix cache does not have.
        shift = turn * 64 + (adapters or 0)
        rows.append(([(token + shift) % vocab for token in each.prompt], params))
    return run_rows(engine, rows)[0]
