"""The offline workloads on which engines are compared: random token ids from a fixed
seed with fixed numbers of output tokens, so that all engines do the same work."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shapes import MODELS

from batchgen.engine.layers.mxfp4_format import Units
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import Quantization, chosen_form, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_config import KVCacheDtype, ModelConfig
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel

PROMPT_VOCAB = 150_000
"""Prompts of Qwen3 have ids below this number, since its special tokens are above."""


class Workload(NamedTuple):
    num_requests: int
    input_lens: tuple[int, int]  # the shortest and the longest prompt, in tokens
    output_lens: tuple[int, int]  # the fewest and the most generated tokens


WORKLOADS = {
    "mixed": Workload(256, (100, 1024), (100, 1024)),
    "mixed1k": Workload(1024, (100, 1024), (100, 1024)),
    "decode": Workload(512, (64, 128), (1024, 1024)),
    "prefill": Workload(512, (1024, 2048), (16, 16)),
    # Prompts much longer than the windows of models that have some.
    "long": Workload(64, (4096, 8192), (256, 256)),
    # As questions of GSM8K and their answers are long.
    "gsm8k": Workload(256, (40, 160), (100, 300)),
    "smoke": Workload(16, (20, 60), (16, 48)),
}
"""Workloads by name. Lengths are drawn uniformly from the two ranges of each."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, as token ids, and the number of tokens to generate."""

    prompt: list[int]
    output_len: int


def requests(name: str, vocab: int = PROMPT_VOCAB) -> list[BenchRequest]:
    """Draw the requests of a workload, which depend on the name and on `vocab` alone; prompt ids
    are in [0, vocab)."""
    load = WORKLOADS[name]
    draws = random.Random(0)
    prompts = [
        [draws.randrange(vocab) for _ in range(draws.randint(*load.input_lens))]
        for _ in range(load.num_requests)
    ]
    return [BenchRequest(prompt, draws.randint(*load.output_lens)) for prompt in prompts]


def prompt_vocab(vocab_size: int) -> int:
    """Return the number below which prompts of a model with `vocab_size` token ids stay, so that
    they have no special tokens, which are the last ids."""
    if vocab_size > 151_000:
        return PROMPT_VOCAB
    return vocab_size - 2_000 if vocab_size > 4_000 else vocab_size


def write_config(model: str, folder: Path, **changes: Any) -> Path:
    """Write the config.json of a model, with changed entries, into a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model] | changes))
    return folder


def dummy_model(
    name: str,
    device: torch.device,
    heads: Collection[str] = (),
    parallel: TensorParallel = ALONE,
    *,
    quantization: Quantization | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    vision: bool = False,
    **changes: Any,
) -> CausalLM:
    """Make a model of `MODELS` with random weights, in bfloat16 on a GPU and float32 on a CPU, with
    changed entries of config.json such as `vocab_size=300`. With `vision` it reads images."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(name, Path(folder), **changes)
        return load_model(
            path,
            device=device,
            dtype=dtype,
            load_format="dummy",
            heads=heads,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            parallel=parallel,
            vision=vision,
        )


def model_config(name: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        return load_model_config(write_config(name, Path(folder)), "dummy")


def bare_model(
    config: ModelConfig,
    device: torch.device,
    *,
    quantization: Quantization | None = None,
) -> CausalLM:
    """Make a model in bfloat16 whose parameters have shapes and no values, to be called within
    `ShapesOnly` for a GPU."""
    model_type = model_class(config.architecture, Path())
    form = chosen_form(config, quantization, Units(fp8=True, four_bits=True))
    return model_type(config, device=device, dtype=torch.bfloat16, form=form)
