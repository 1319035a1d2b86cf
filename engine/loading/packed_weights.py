"""Reads the weights of a quantised checkpoint (GPTQ, AWQ and others), module by module.

A quantised module has several tensors, such as codes and scales, which `packed_module.py` combines
into one weight. The loader calls `packed_weights` for checkpoints in a `PackedFormat`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.layers.weight_slot import CheckpointTensor
from batchgen.engine.loading.packed_module import module_weight
from batchgen.engine.loading.safetensors_files import open_by_name, tensor_names
from batchgen.kernels.four_bit.fp4_weight import NVFP4Weight
from batchgen.kernels.four_bit.int4_weight import Int4Weight
from batchgen.kernels.four_bit.layouts import GroupedWeight
from batchgen.kernels.fp8.fp8_weight import FP8

_WORDS = (".qweight", ".weight_packed")
_SECOND = ".weight_scale_2"
"""The suffix of a tensor that ModelOpt has only with 4-bit values."""
_PARTS = (
    "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2",
    "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
)  # fmt: skip
"""The last name parts of a quantised module's tensors, besides its values."""
_UNUSED = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".k_scale",
    ".v_scale", ".q_scale", ".activation_scale_ub", ".input_scale_ub",
)  # fmt: skip
"""Suffixes of tensors about activations and the cache, which stay in the model's dtype."""


def with_modules(form: PackedFormat, folder: Path) -> PackedFormat:
    """Complete a format with the names of the checkpoint's 4-bit modules, taken from its tensors.
    They are more reliable than the exclusion lists in config.json."""
    if form.kept is None:
        return form
    names = (name.rpartition(".") for name in tensor_names(folder))
    modules = frozenset(module for module, _, last in names if f".{last}" in (*_WORDS, _SECOND))
    return replace(form, kept=replace(form.kept, modules=modules))


def packed_weights(folder: Path, form: PackedFormat) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the tensors of a checkpoint. A quantised module yields one `weight` [N, K] (or [E, N,
    K] of experts): in int4 if groups are consecutive inputs, in NVFP4, otherwise in float32. Raises
    ValueError if one of a module's tensors is missing or does not fit the others."""
    with open_by_name(folder) as where:
        for name in where:
            module, _, last = name.rpartition(".")
            if last in _PARTS or name.endswith(_UNUSED):
                continue
            values = where[name].get_tensor(name)
            is_packed = values.dtype in (FP8, torch.int8, torch.uint8)
            if not name.endswith(_WORDS) and not (last == "weight" and is_packed):
                yield name, values
                continue
            parts = {
                part: where[full].get_tensor(full)
                for part in _PARTS
                if (full := f"{module}.{part}") in where
            }
            try:
                weight = _of_experts(last, values, parts, form)
            except (ValueError, RuntimeError, IndexError) as error:
                raise ValueError(f"{folder}: {name}: {error}") from None
            yield f"{module}.weight", weight


def _of_experts(
    last: str, values: Tensor, parts: Mapping[str, Tensor], form: PackedFormat
) -> Tensor | GroupedWeight:
    """Return the weight of a module. If its values have three axes, it has the weights of all
    experts."""
    if values.dim() != 3:
        return module_weight(last, values, parts, form)
    each = []
    for index, expert in enumerate(values):
        # Tensors without an axis of experts are for all of them.
        tensors = {
            part: tensor[index] if tensor.dim() and len(tensor) == len(values) else tensor
            for part, tensor in parts.items()
        }
        if "weight_shape" in tensors:
            tensors["weight_shape"] = tensors["weight_shape"][-2:]
        each.append(module_weight(last, expert, tensors, form))
    for kind in (Int4Weight, NVFP4Weight):
        if all(isinstance(weight, kind) for weight in each):
            # Stack the codes of all experts, their scales, and so on.
            return kind(*map(torch.stack, zip(*each, strict=True)))
    plain = [weight if isinstance(weight, Tensor) else weight.dequantise() for weight in each]
    whole: Tensor = torch.stack(plain)
    return whole
