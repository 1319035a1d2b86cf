"""Checkpoints in the packed forms that people publish, and twins that hold what they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by the ends of their names, and the weight [N, K] that they stand for."""
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
_MODULE = re.compile(r"layers\.\d+\..*(?:proj|w[123])\.weight$")


def words(codes: np.ndarray[Any, Any], bits: int = 4, order: list[int] | None = None) -> Tensor:
    """Codes [R, C] as words of 32 bits along the last axis, the first code in the lowest bits; with
    an order, the code that stands i-th is that of this place among eight."""
    per = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per)))
    wide = codes.reshape(codes.shape[0], -1, per).astype(np.uint32)
    wide = wide if order is None else wide[:, :, order]
    out = np.bitwise_or.reduce(wide << np.arange(0, 32, bits, dtype=np.uint32), axis=2)
    return torch.from_numpy(out.view(np.int32).copy())


def draw(shape: tuple[int, int], groups: int, seed: int) -> tuple[Any, Any, Any]:
    """Codes [N, K], zero points [N, G] and scales [N, G] of four bits."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, shape), rng.integers(1, 16, (shape[0], groups))
    return codes, zeros, rng.uniform(0.005, 0.03, (shape[0], groups)).astype(np.float16)


def gptq(shape: tuple[int, int], seed: int, first: bool = True, ordered: bool = False) -> Packed:
    k = shape[1]
    groups = k // 32
    codes, zeros, scales = draw(shape, groups, seed)
    group = np.arange(k) // 32
    if ordered:
        group = np.random.default_rng(seed).permutation(group)
    tensors = {
        "qweight": words(codes).T.contiguous(),
        "qzeros": words((zeros - first).T),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    weight = (codes - zeros[:, group]) * scales[:, group].astype(np.float32)
    return tensors, torch.from_numpy(weight.astype(np.float32))


def gptq_v2(shape: tuple[int, int], seed: int) -> Packed:
    return gptq(shape, seed, first=False, ordered=True)


def awq(shape: tuple[int, int], seed: int) -> Packed:
    codes, zeros, scales = draw(shape, shape[1] // 32, seed)
    tensors = {
        "qweight": words(codes.T, order=_AWQ),
        "qzeros": words(zeros.T, order=_AWQ),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    weight = (codes - zeros.repeat(32, 1)) * scales.repeat(32, 1).astype(np.float32)
    return tensors, torch.from_numpy(weight.astype(np.float32))


def pack_quantized(
    shape: tuple[int, int], seed: int, bits: int = 4, group: int = 32, zero: bool = False,
    ordered: bool = False,
) -> Packed:  # fmt: skip
    n, k = shape
    rng = np.random.default_rng(seed)
    groups = k // group
    codes, _, scales = draw(shape, groups, seed)
    codes = codes if bits == 4 else rng.integers(0, 256, shape)
    half = 1 << (bits - 1)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor(shape),
    }
    zeros = np.full((n, groups), half)
    if zero:
        zeros = rng.integers(0, 2 * half, (n, groups))
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    place = np.arange(k) // group
    if ordered:
        place = rng.permutation(place)
        tensors["weight_g_idx"] = torch.from_numpy(place.astype(np.int32))
    exact = tensors["weight_scale"].float().numpy()
    weight = (codes - zeros[:, place]) * exact[:, place]
    return tensors, torch.from_numpy(weight.astype(np.float32))


def fp8(
    shape: tuple[int, int], seed: int, scales: tuple[int, ...], name: str, block: int = 1
) -> Packed:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(0, 60, shape).astype(np.float32)).to(torch.float8_e4m3fn)
    factors = rng.uniform(5e-4, 2e-3, scales).astype(np.float32)
    wide = factors
    if len(scales) == 2:  # a last block may be incomplete
        wide = wide.repeat(block, 0).repeat(block if scales[1] > 1 else shape[1], 1)
        wide = wide[: shape[0], : shape[1]]
    tensors = {"weight": values, name: torch.tensor(factors)}
    return tensors, values.float() * torch.tensor(wide)


def int8(shape: tuple[int, int], seed: int, zero: bool = False) -> Packed:
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scales = rng.uniform(5e-4, 2e-3, (shape[0], 1)).astype(np.float32)
    zeros = (
        rng.integers(-9, 9, (shape[0], 1)).astype(np.int8) if zero else np.zeros((1, 1), np.int8)
    )
    tensors = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    if zero:
        tensors["weight_zero_point"] = torch.from_numpy(zeros)
    return tensors, torch.from_numpy((codes - zeros.astype(np.float32)) * scales)


def nvfp4(shape: tuple[int, int], seed: int, modelopt: bool = False) -> Packed:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape)
    scales = torch.from_numpy(rng.uniform(1, 300, (shape[0], shape[1] // 16)).astype(np.float32))
    scales = scales.to(torch.float8_e4m3fn)
    whole = torch.tensor([1e-4 if modelopt else 1e4])
    values = np.array([*_E2M1, *(-v for v in _E2M1)], np.float32)[codes]
    pairs = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    factor = scales.float() * whole if modelopt else scales.float() / whole
    name = "weight" if modelopt else "weight_packed"
    second = "weight_scale_2" if modelopt else "weight_global_scale"
    tensors = {name: pairs, "weight_scale": scales, second: whole, "input_scale": torch.ones(1)}
    return tensors, torch.from_numpy(values) * factor.repeat_interleave(16, 1)


def write_packed(
    folder: Path,
    target: Path,
    quantization: Mapping[str, Any],
    pack: Callable[[tuple[int, int], int], Packed],
) -> tuple[Path, Path]:
    """A copy of a model whose projections are packed, and its twin in float32."""
    packed, plain = target / "packed", target / "plain"
    shutil.copytree(folder, packed)
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    forms, twins = dict[str, Tensor](), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if not _MODULE.search(name):
            forms[name] = twins[name] = tensor
            continue
        parts, twins[name] = pack((tensor.shape[0], tensor.shape[1]), seed)
        forms |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    for made, where in ((forms, packed), (twins, plain)):
        whole = {name: tensor.contiguous() for name, tensor in made.items()}
        save_file(whole, where / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain
