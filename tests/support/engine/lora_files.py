"""Adapters of the tiny models as PEFT writes them, and the models that they are merged into."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.engine.edited_models import edit_weights

SKIPPED = re.compile(r"visual|vision_tower|^mtp")
"""Modules that batchgen has no adapters for."""
OF_EXPERT = re.compile(r"experts\.\d")
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    targets: Sequence[str] = DENSE,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    strength: float = 0.3,
    experts: bool = False,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter with random factors for the modules of `base` that end with `targets`;
    `ranks` are those that differ, by the last part of the name. `experts` says whether modules of
    single experts are meant, too."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    layers = config.get("layers_to_transform")
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if (
            not name.endswith(".weight")
            or last not in targets
            or weight.ndim != 2
            or SKIPPED.search(name)
            or (OF_EXPERT.search(name) and not experts)
        ):
            continue
        if (
            layers is not None
            and "layers." in module
            and int(module.split("layers.")[1].split(".")[0]) not in layers
        ):
            continue
        own = (ranks or {}).get(last, rank)
        out_features, in_features = weight.shape
        of_embedding = last == "embed_tokens"
        if of_embedding:
            out_features, in_features = in_features, out_features
        for factor, shape in (("A", (own, in_features)), ("B", (out_features, own))):
            drawn = torch.randn(shape, generator=generator) * strength
            name = f"embedding_{factor}" if of_embedding else f"{factor}.weight"
            tensors[f"base_model.model.{module}.lora_{name}"] = drawn
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": ranks or {},
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return folder


def merge(base: Path, adapter: Path, target: Path) -> Path:
    """Write the model whose weights are W + scale · B·A, by PEFT's definition."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")

    def change(tensors: dict[str, Tensor]) -> None:
        for name, down in factors.items():
            if not re.search(r"\.lora_(embedding_)?A", name):
                continue
            module = re.sub(r"\.lora_.*", "", name.removeprefix("base_model.model."))
            up, last = factors[re.sub("A(.weight)?$", r"B\1", name)], module.rpartition(".")[2]
            alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
            added = scale * (up.double() @ down.double()).float()
            tensors[f"{module}.weight"] += added.t() if "embedding" in name else added

    return edit_weights(base, target, change)
