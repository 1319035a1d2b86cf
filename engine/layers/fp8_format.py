"""The FP8 format: which weights are in FP8, how checkpoints declare it, and which devices compute
in it.

A checkpoint declares it in config.json:

    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], …}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchgen.kernels.fp8.fp8_weight import BLOCK

_SCALE_FORMATS = ("float", "ue8m0")
_PLAIN_NAME = re.compile(r"[\w.-]+")
_METHODS = "awq, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt or mxfp4"
_UNITS = (8, 9)
"""The compute capability from which GPUs multiply in FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Format:
    """Weights of linear layers in FP8, with a scale for each block of 128 × 128 values.

    The projections and experts of layers are in FP8. Embeddings, the output layer, norms, routers,
    and the gates of delta networks and shared experts are not: they are small, and small errors in
    them matter. Nor is the weight that expands latents, because attention also multiplies by its
    transpose.
    """

    excluded: tuple[str, ...] = ()  # further modules not in FP8, by their names in checkpoints
    powers_of_two: bool = False  # whether activations' scales are powers of two (ue8m0), as trained
    at_load: bool = False  # whether the checkpoint's weights are rounded to FP8 while they load
    native: bool = True  # whether products are in FP8; else weights are kept in the model's dtype

    def excludes(self, name: str) -> bool:
        """Return whether this module, or one that contains it, is excluded."""
        return any(f".{entry}." in f".{name}." for entry in self.excluded)

    def renamed(self, rename: Callable[[str], str]) -> FP8Format:
        """Return this format with renamed modules."""
        return replace(self, excluded=tuple(map(rename, self.excluded)))


def has_fp8_units(device: torch.device) -> bool:
    """Return whether a device can multiply matrices in FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _UNITS


def checkpoint_format(quantization: Mapping[str, Any] | None) -> FP8Format | None:
    """Read the `quantization_config` of a checkpoint; None if there is none. Raises ValueError,
    naming the key, for other quantisation than FP8 in blocks of 128 × 128, and for unknown keys."""
    if quantization is None:
        return None
    values = {key: value for key, value in quantization.items() if value not in (None, False)}
    if (method := values.pop("quant_method", None)) != "fp8":
        raise _refused("quant_method", method, _METHODS)
    excluded: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers"):
        names = values.pop(key, [])
        if not isinstance(names, list):
            raise _refused(key, names, "a list of names of modules")
        excluded += names
    for name in excluded:
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise _refused("modules_to_not_convert", name, "names of modules, not patterns")
    if (block := values.pop("weight_block_size", None)) != [BLOCK, BLOCK]:
        raise _refused("weight_block_size", block, f"[{BLOCK}, {BLOCK}]")
    allowed: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("fmt", ("e4m3", "float8_e4m3fn")),
        ("activation_scheme", ("dynamic",)),
        ("scale_fmt", _SCALE_FORMATS),
        ("expert_dtype", ("fp8",)),
    )
    options: dict[str, Any] = {}
    for key, choices in allowed:
        options[key] = values.pop(key, choices[0])
        if options[key] not in choices:
            raise _refused(key, options[key], " or ".join(map(repr, choices)))
    if values:
        key = min(values)
        raise _refused(key, values[key], "left out")
    return FP8Format(excluded=tuple(excluded), powers_of_two=options["scale_fmt"] == "ue8m0")


def _refused(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(
        "the checkpoint is quantized in a way that is not supported: "
        f"quantization_config.{key} is {value!r:.60}, and it must be {allowed}; use a checkpoint "
        f"in FP8 with blocks of {BLOCK} × {BLOCK}, the original weights or a GGUF file"
    )
