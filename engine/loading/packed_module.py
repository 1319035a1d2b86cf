"""Reads the weight of one quantised module from its tensors. Their names and types determine the
format:

- GPTQ: `qweight` [K/8, N], `qzeros` [G, N/8], `scales` [G, N] and `g_idx` [K], the group of each
  input;
- AWQ: `qweight` [K, N/8], `qzeros` [G, N/8] and `scales` [G, N], with the eight values of a word in
  the order 0, 2, 4, 6, 1, 3, 5, 7;
- compressed-tensors: `weight_packed` [N, K/8] with `weight_scale`, or `weight` in int8 or FP8 with
  `weight_scale`; NVFP4 also has `weight_global_scale`, a divisor;
- ModelOpt and others: `weight` in FP8, or two values per byte, with `weight_scale`, and
  `weight_scale_2`, a factor.

A weight has N output features and K input features; G groups of inputs share scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.kernels.four_bit.fp4_weight import (
    NVFP4_GROUP,
    NVFP4Weight,
    pack_codes,
    unpack_codes,
)
from batchgen.kernels.four_bit.int4_weight import Int4Weight
from batchgen.kernels.four_bit.layouts import GroupedWeight
from batchgen.kernels.fp8.fp8_weight import FP8

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The index in an AWQ word of each of eight consecutive values of the weight."""


def module_weight(
    last: str, values: Tensor, parts: Mapping[str, Tensor], form: PackedFormat
) -> Tensor | GroupedWeight:
    """Return the weight [N, K] of a module: 4-bit if kernels can read it, else float32.

    Args:
        last: the last part of the name of the module's main tensor, such as `qweight`.
        values: the main tensor.
        parts: the module's other tensors, by the last parts of their names.

    Raises:
        ValueError: a tensor is missing, or has a wrong type, shape or value.
    """
    if values.dim() != 2:
        raise ValueError(f"a quantised weight must have two axes, and has {list(values.shape)}")
    if last == "qweight":
        scales = _part(parts, "scales").float()
        # Words of AWQ pack outputs, so they have fewer columns than the scales.
        is_awq = values.shape[1] != scales.shape[1]
        return (_of_awq if is_awq else _of_gptq)(values, scales, parts, form)
    if values.dtype == torch.uint8:
        return _of_nvfp4(values, parts)
    if last == "weight_packed":
        return _of_words(values, parts, form)
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
) -> Tensor | Int4Weight:
    """Return the weight from words [K/8, N] and scales [G, N] of GPTQ."""
    values = _bytes(words.T)
    size, (groups, _) = 2 * values.shape[1], scales.shape
    zeros = _unpacked(_part(parts, "qzeros"), 4)
    if form.zeros_are_less:
        zeros = (zeros + 1) & 15
    if zeros.shape != scales.shape:
        raise ValueError(f"scales {list(scales.shape)} and qzeros {list(zeros.shape)} differ")
    weight = Int4Weight(values, scales.T, zeros.T.to(torch.uint8))
    group = parts.get("g_idx")
    if group is None:
        _group_size(size, groups)
        return weight
    return _ordered(weight, group, "g_idx", form)


def _ordered(
    weight: Int4Weight, group: Tensor, name: str, form: PackedFormat
) -> Tensor | Int4Weight:
    """Return a weight whose input k belongs to group `group[k]`: unchanged if the groups are equal
    consecutive ranges, else in float32. `name` is the name of the tensor `group`."""
    size, groups = weight.shape[1], weight.scales.shape[1]
    if len(group) != size or not 0 <= int(group.min()) <= int(group.max()) < groups:
        raise ValueError(f"{name} must name one of {groups} groups for each of {size} inputs")
    group = group.long()
    if size % groups == 0 and torch.equal(group, torch.arange(size) // (size // groups)):
        return weight
    if not form.ordered:
        raise ValueError(
            f"{name} is out of order, and quantization_config does not say so: desc_act (GPTQ) or "
            "actorder (compressed-tensors) must"
        )
    codes = unpack_codes(weight.values).int()
    values = codes - weight.zeros.int()[:, group]
    plain: Tensor = values * weight.scales.float()[:, group]
    return plain


def _of_awq(
    words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], form: PackedFormat
) -> Int4Weight:
    """Return the weight from words [K, N/8] and scales [G, N] of AWQ."""
    values, zeros = (
        _unpacked(tensor, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
        for tensor in (words, _part(parts, "qzeros"))
    )
    _group_size(len(values), len(scales))
    if zeros.shape != scales.shape:
        raise ValueError(f"scales {list(scales.shape)} and qzeros {list(zeros.shape)} differ")
    codes = pack_codes(values.T.to(torch.uint8))
    return Int4Weight(codes, scales.T, zeros.T.to(torch.uint8))


def _of_words(
    words: Tensor, parts: Mapping[str, Tensor], form: PackedFormat
) -> Tensor | Int4Weight:
    """Return the weight from words of compressed-tensors, [N, K/8] with 4 bits or [N, K/4] with 8.
    Without zero points, a code c means c − 2**(bits − 1)."""
    rows, columns = _part(parts, "weight_shape").tolist()
    # The bits of words per value are 4, or at least 8; padding can only add some.
    bits = 32 * words.shape[1] // max(columns, 1)
    bits = 4 if bits < 8 else 8
    if words.shape != (rows, -(-columns * bits // 32)):
        raise ValueError(f"words {list(words.shape)} do not hold a weight of {rows} × {columns}")
    middle = 1 << (bits - 1)
    scales = _part(parts, "weight_scale")
    if (packed := parts.get("weight_zero_point")) is not None:
        zeros = packed.to(torch.int32)
        # Zero points are packed along the outputs, or single numbers that count from the middle.
        if packed.dtype == torch.int32 and len(packed) != rows:
            zeros = _unpacked(packed.T, bits).T[:rows]
        else:
            zeros = zeros + middle
    else:
        zeros = torch.tensor([[middle]], dtype=torch.int32)
    group = parts.get("weight_g_idx")
    if group is not None and (group.numel() == 0 or int(group.min()) < 0):
        group = None  # published checkpoints with zero points have groups in order
    if 0 in scales.shape:
        raise ValueError(f"scales have the shape {list(scales.shape)}")
    if bits == 4 and columns % 8 == 0 and scales.dim() == 2 and columns % scales.shape[1] == 0:
        shape = (rows, scales.shape[1])
        of_groups = [_expanded(part, shape) for part in (scales, zeros.to(torch.uint8))]
        weight = Int4Weight(_bytes(words), *of_groups)
        return weight if group is None else _ordered(weight, group, "weight_g_idx", form)
    values = _unpacked(words, bits)[:, :columns]
    if group is not None:
        if len(group) != columns or int(group.max()) >= scales.shape[1]:
            raise ValueError(
                f"weight_g_idx must name one of {scales.shape[1]} groups for each of {columns} "
                "inputs"
            )
        group = group.long()
        ordered = scales.float()[:, group]
        return (values - (zeros[:, group] if zeros.numel() > 1 else zeros)) * ordered
    if zeros.numel() > 1:
        zeros = _spread(zeros, values.shape)
    plain: Tensor = (values - zeros) * _spread(scales, values.shape)
    return plain


def _expanded(part: Tensor, shape: tuple[int, int]) -> Tensor:
    """Repeat scales or zero points, given per group [N, G], per row [N, 1] or for the whole weight
    [1], to [N, G]."""
    try:
        return part.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"scales or zero points {list(part.shape)} are not for {shape[0]} values in "
            f"{shape[1]} groups"
        ) from None


def _bytes(words: Tensor) -> Tensor:
    """View words [N, C] int32 as bytes [N, 4·C] with two codes each, the lowest bits first."""
    _check_words(words)
    return words.contiguous().view(torch.uint8)


def _of_nvfp4(pairs: Tensor, parts: Mapping[str, Tensor]) -> NVFP4Weight:
    """Return the weight from uint8 [N, K/2], with two NVFP4 codes per byte."""
    scales, shape = _part(parts, "weight_scale"), [len(pairs), 2 * pairs.shape[1]]
    if list(scales.shape) != [shape[0], shape[1] / NVFP4_GROUP] or scales.dtype != FP8:
        raise ValueError(
            f"weight_scale {list(scales.shape)} of {str(scales.dtype).removeprefix('torch.')} is "
            f"not for {shape} values: there must be one in float8_e4m3fn for each {NVFP4_GROUP}"
        )
    if "weight_scale_2" in parts:
        factor = parts["weight_scale_2"].double()
    else:
        factor = 1 / _part(parts, "weight_global_scale").double()
    if factor.numel() != 1 or not 0 < float(factor) < torch.inf:
        raise ValueError("its scale of the whole weight must be one number over 0")
    return NVFP4Weight(pairs, scales, factor.reshape(1, 1).expand(scales.shape))


def _part(parts: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parts:
        raise ValueError(f"its {name} is missing")
    return parts[name]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words [R, C] int32 into codes [R, C · 32 / bits] int32, the lowest bits first."""
    _check_words(words)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(1)


def _check_words(words: Tensor) -> None:
    if words.dtype != torch.int32:
        raise ValueError(f"words must be int32, and are {str(words.dtype).removeprefix('torch.')}")


def _group_size(size: int, groups: int) -> int:
    """Return the number of inputs in a group. Raises ValueError if groups differ in size."""
    if groups < 1 or size % groups:
        raise ValueError(f"{size} inputs do not fall into {groups} groups of one size")
    return size // groups


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Repeat the scales of a weight of this shape so that they broadcast to it. There may be one
    scale for all values, for each row or for each block."""
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
    """Return the number of blocks on an axis; the last one may be incomplete."""
    return -(-size // block)
