"""Writes checkpoints in FP8, in the published layout, from those of tiny models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8Weight, quantise_fp8

QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
_PROJECTION = re.compile(
    r"(?<!shared_expert_)(q|k|v|o|gate|up|down|gate_up|q_a|q_b|kv_b|out)_proj(\.weight)?$"
    r"|kv_a_proj_with_mqa\.weight$|in_proj_(qkvz|qkv|z)\.weight$"
    r"|experts\.\d+\.w[123]\.weight$"
)


def write_fp8(
    source: Path,
    folder: Path,
    *,
    scale_dtype: torch.dtype = torch.float32,
    kept: Collection[str] = (),
    **quantization: Any,
) -> tuple[Path, Path]:
    """Round the projections of a checkpoint to FP8.

    Args:
        source: the checkpoint.
        folder: where the two are written.
        scale_dtype: of the scales; those of float8_e8m0fnu are powers of two.
        kept: modules that stay as they are, which the configuration names.
        quantization: entries of quantization_config.

    Returns:
        The checkpoint in FP8 and its twin with the dequantised weights.
    """
    fp8, twin = folder / "fp8", folder / "twin"
    for each in (fp8, twin):
        shutil.copytree(source, each)
    tensors = load_file(source / "model.safetensors")
    rounded: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain[name] = rounded[name] = tensor
        if _PROJECTION.search(name) and not any(f".{k}." in f".{name}." for k in kept):
            weight = quantise_fp8(tensor)
            scales = weight.scales.to(scale_dtype)
            plain[name] = FP8Weight(weight.values, scales.float()).dequantise()
            rounded[name], rounded[f"{name}_scale_inv"] = weight.values, scales
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    save_file(rounded, fp8 / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {**QUANTIZATION, **quantization}
    if kept:
        config["quantization_config"]["modules_to_not_convert"] = list(kept)
    (fp8 / "config.json").write_text(json.dumps(config))
    return fp8, twin


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a checkpoint, whose names have two underscores for each dot; None deletes
    one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file, {"format": "pt"})
