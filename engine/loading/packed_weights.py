"""Dequantises the weights of a checkpoint in `PackedFormat`, one after another.

Each quantised module holds several tensors, whose names and types say in which form they are:

- GPTQ: `qweight` [K/8, N], `qzeros` [G, N/8], `scales` [G, N] and `g_idx` [K], the group of each
  input;
- AWQ: `qweight` [K, N/8], `qzeros` [G, N/8] and `scales` [G, N], eight values of a word in the
  order 0, 2, 4, 6, 1, 3, 5, 7;
- compressed-tensors: `weight_packed` [N, K/8] with `weight_scale`, or `weight` in int8 or FP8 with
  `weight_scale`; NVFP4 has a `weight_global_scale` that divides;
- ModelOpt and others: `weight` in FP8, or two values in a byte, with `weight_scale`, and
  `weight_scale_2`, which multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.loading.safetensors_files import open_by_name

_FP8 = torch.float8_e4m3fn
_WORDS = (".qweight", ".weight_packed")
_BESIDE = (
    "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2",
    "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
)  # fmt: skip
"""What stands beside the values of a quantised module."""
_UNUSED = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".k_scale",
    ".v_scale", ".q_scale", ".activation_scale_ub", ".input_scale_ub",
)  # fmt: skip
"""What is about activations and the cache, which stay in the model's dtype."""
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NVFP4_GROUP = 16


def dequantised(folder: Path, form: PackedFormat) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, those of quantised modules as one `weight` [N, K] in
    float32.

    Raises ValueError if one of a module's tensors is missing, or does not fit the others.
    """
    with open_by_name(folder) as where:
        for name in where:
            module, _, last = name.rpartition(".")
            if last in _BESIDE or name.endswith(_UNUSED):
                continue
            values = where[name].get_tensor(name)
            is_packed = values.dtype in (_FP8, torch.int8, torch.uint8)
            if not name.endswith(_WORDS) and not (last == "weight" and is_packed):
                yield name, values
                continue
            parts = {
                part: where[full].get_tensor(full)
                for part in _BESIDE
                if (full := f"{module}.{part}") in where
            }
            try:
                weight = _weight(last, values, parts, form)
            except (ValueError, RuntimeError, IndexError) as error:
                raise ValueError(f"{folder}: {name}: {error}") from None
            yield f"{module}.weight", weight


def _weight(last: str, values: Tensor, parts: Mapping[str, Tensor], form: PackedFormat) -> Tensor:
    """The weight [N, K] of a module in float32."""
    if values.dim() != 2:
        raise ValueError(f"a quantised weight must have two axes, and has {list(values.shape)}")
    if last == "qweight":
        scales = _part(parts, "scales").float()
        is_awq = values.shape[1] != scales.shape[1]
        return (_of_awq if is_awq else _of_gptq)(values, scales, parts, form)
    if values.dtype == torch.uint8:
        return _of_nvfp4(values, parts)
    if last == "weight_packed":
        return _of_words(values, parts)
    name = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    scales, block = _part(parts, name), form.block
    if block is not None and scales.shape == tuple(map(_blocks, values.shape, block)):
        wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        in_blocks: Tensor = values.float() * wide[: values.shape[0], : values.shape[1]]
        return in_blocks
    zeros = parts.get("weight_zero_point", torch.zeros(1)).float()
    weight: Tensor = (values.float() - _spread(zeros, values.shape)) * _spread(scales, values.shape)
    return weight


def _of_gptq(
    words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], form: PackedFormat
) -> Tensor:
    values = _unpacked(words.T, 4)
    size, (groups, _) = values.shape[1], scales.shape
    zeros = _unpacked(_part(parts, "qzeros"), 4)
    if form.zeros_are_less:
        zeros = (zeros + 1) & 15
    group = parts.get("g_idx")
    if group is None:
        group = torch.arange(size) // _group_size(size, groups)
    if len(group) != size or not 0 <= int(group.min()) <= int(group.max()) < groups:
        raise ValueError(f"g_idx must name one of {groups} groups for each of {size} inputs")
    group = group.long()
    return (values - zeros.T[:, group]) * scales.T[:, group]


def _of_awq(
    words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], form: PackedFormat
) -> Tensor:
    values, zeros = (
        _unpacked(each, 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1)
        for each in (words, _part(parts, "qzeros"))
    )
    size = _group_size(len(values), len(scales))
    weight: Tensor = (values - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)
    return weight.T


def _of_words(words: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    rows, columns = _part(parts, "weight_shape").tolist()
    bits = 32 * words.shape[1] // max(columns, 1)
    bits = 4 if bits < 8 else 8
    if words.shape != (rows, -(-columns * bits // 32)):
        raise ValueError(f"words {list(words.shape)} do not hold a weight of {rows} × {columns}")
    half = 1 << (bits - 1)
    values = _unpacked(words, bits)[:, :columns] - half
    scales = _part(parts, "weight_scale").float()
    if (packed := parts.get("weight_zero_point")) is not None:
        zeros = packed.to(torch.int32)
        if packed.dtype == torch.int32 and len(packed) != rows:
            zeros = _unpacked(packed.T, bits).T[:rows] - half
    else:
        zeros = torch.zeros(1, 1, dtype=torch.int32)
    group = parts.get("weight_g_idx")
    if group is not None and len(group) == columns and int(group.min()) >= 0:
        if int(group.max()) >= scales.shape[1]:
            raise ValueError(f"weight_g_idx names more groups than {scales.shape[1]}")
        group = group.long()
        return (values - (zeros[:, group] if zeros.numel() > 1 else zeros)) * scales[:, group]
    if zeros.numel() > 1:
        zeros = _spread(zeros, values.shape)
    weight: Tensor = (values - zeros) * _spread(scales, values.shape)
    return weight


def _of_nvfp4(pairs: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    scales = _part(parts, "weight_scale").float()
    if scales.shape != (len(codes), codes.shape[1] // _NVFP4_GROUP):
        raise ValueError(f"weight_scale {list(scales.shape)} is not for {list(codes.shape)} values")
    if "weight_scale_2" in parts:
        scales = scales * parts["weight_scale_2"].float()
    else:
        scales = scales / _part(parts, "weight_global_scale").float()
    return _E2M1[codes.long()] * scales.repeat_interleave(_NVFP4_GROUP, 1)


def _part(parts: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parts:
        raise ValueError(f"its {name} is missing")
    return parts[name]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The values of words [R, C] int32, the lowest bits first: [R, C · 32 / bits] int32."""
    if words.dtype != torch.int32:
        raise ValueError(f"words must be int32, and are {str(words.dtype).removeprefix('torch.')}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(1)


def _group_size(size: int, groups: int) -> int:
    if groups < 1 or size % groups:
        raise ValueError(f"{size} inputs do not fall into {groups} groups of one size")
    return size // groups


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales of all values, rows, or blocks of a weight as one that multiplies it."""
    rows, columns = shape
    scales = scales if scales.dtype == torch.int32 else scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.dim() != 2 or 0 in scales.shape:
        raise ValueError(f"scales have the shape {list(scales.shape)}")
    for axis, size in ((0, rows), (1, columns)):
        count = scales.shape[axis]
        if size % count:
            raise ValueError(f"{count} scales are not for {size} values")
        if count > 1:
            scales = scales.repeat_interleave(size // count, axis)
    return scales


def _blocks(size: int, block: int) -> int:
    """How many blocks an axis has."""
    return -(-size // block)
