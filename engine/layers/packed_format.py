"""Quantised weights that no kernel here computes from: they are dequantised while they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.kernels.fp8.fp8_weight import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How the weights of a checkpoint are quantised, which its tensors say one by one
    (`packed_weights`).

    Attributes:
        name: of the format, in words for the user.
        activations: what the checkpoint was made to compute with, if that is not the model's dtype.
        zeros_are_less: GPTQ's first form holds zero points minus 1.
        block: the rows and columns that share a scale, where a weight may have incomplete blocks;
            None: scales divide each axis into equal parts.
    """

    name: str
    activations: str | None = None
    zeros_are_less: bool = False
    block: tuple[int, int] | None = None


def packed_format(quantization: Mapping[str, Any]) -> PackedFormat | None:
    """Read the `quantization_config` of AWQ, GPTQ, compressed-tensors, ModelOpt, FBGEMM, or of FP8
    other than by blocks of 128; None for another method.

    Raises ValueError, which names the key, for a form that is not supported.
    """
    read = {
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fbgemm_fp8": _fbgemm,
        "fp8": _fp8,
        "gptq": _gptq,
        "modelopt": _modelopt,
    }.get(str(quantization.get("quant_method")))
    return None if read is None else read(quantization)


def _gptq(values: Mapping[str, Any]) -> PackedFormat:
    _check(values, "bits", (4,))
    _check(values, "checkpoint_format", ("gptq", "gptq_v2", None))
    if values.get("dynamic"):
        raise _refused("dynamic", values["dynamic"], "empty: modules must have one form")
    groups = _groups(values, "group_size", values.get("desc_act"))
    is_first = values.get("checkpoint_format") != "gptq_v2"
    return PackedFormat(name=f"int4 (GPTQ, {groups})", zeros_are_less=is_first)


def _awq(values: Mapping[str, Any]) -> PackedFormat:
    _check(values, "bits", (4,))
    _check(values, "version", ("gemm", "GEMM", None))
    return PackedFormat(name=f"int4 (AWQ, {_groups(values, 'group_size')})")


def _groups(values: Mapping[str, Any], key: str, ordered: Any = False) -> str:
    size = values.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise _refused(key, size, "-1 or the values of a group")
    groups = "a scale for each output" if size == -1 else f"groups of {size}"
    return f"{groups} by activation" if ordered else groups


def _compressed_tensors(values: Mapping[str, Any]) -> PackedFormat:
    for key, allowed in (("sparsity_config", "null: sparse weights"), ("transform_config", "null")):
        found = values.get(key)
        if found and not (isinstance(found, Mapping) and found.get("format") == "dense"):
            raise _refused(key, found, f"{allowed} cannot be read" if ":" in allowed else allowed)
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups, "an object that names how weights are quantised")
    kinds, activations = dict[str, None](), dict[str, None]()
    blocks = list[tuple[int, int]]()
    for name, group in groups.items():
        key = f"config_groups.{name}.weights"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refused(key, weights, "an object")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
            raise _refused(key, f"{kind} of {bits} bits", "int of 4 or 8 bits, float of 8 or 4")
        kinds["nvfp4" if (kind, bits) == ("float", 4) else f"{kind}{bits}"] = None
        if (block := weights.get("block_structure")) is not None:
            blocks.append(_block(f"{key}.block_structure", block))
        inputs = group.get("input_activations")
        if isinstance(inputs, Mapping):
            activations[f"{inputs.get('type')}{inputs.get('num_bits')}"] = None
    return PackedFormat(
        name=f"{' and '.join(kinds)} (compressed-tensors)",
        activations=" and ".join(activations) or None,
        block=blocks[0] if blocks else None,
    )


def _modelopt(values: Mapping[str, Any]) -> PackedFormat:
    algorithm = values.get("quant_algo")
    _check(values, "quant_algo", ("FP8", "NVFP4"))
    return PackedFormat(name=f"{algorithm} (ModelOpt)", activations=algorithm)


def _fbgemm(values: Mapping[str, Any]) -> PackedFormat:
    return PackedFormat(name="FP8 (a scale for each output)", activations="FP8")


def _fp8(values: Mapping[str, Any]) -> PackedFormat | None:
    block = values.get("weight_block_size")
    if block == [BLOCK, BLOCK]:
        return None  # which kernels compute from
    _check(values, "fmt", ("e4m3", "float8_e4m3fn", None))
    if block is None:
        return PackedFormat(name="FP8", activations="FP8")
    rows, columns = sizes = _block("weight_block_size", block)
    return PackedFormat(name=f"FP8 (blocks of {rows} × {columns})", activations="FP8", block=sizes)


def _block(key: str, value: Any) -> tuple[int, int]:
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise _refused(key, value, "null or the rows and columns of a block")
    return sizes[0], sizes[1]


def _check(values: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    if values.get(key) not in allowed:
        raise _refused(key, values.get(key), " or ".join(repr(v) for v in allowed if v is not None))


def _refused(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(
        "the checkpoint is quantized in a way that is not supported: "
        f"quantization_config.{key} is {value!r:.60}, and it must be {allowed}; use the original "
        "weights, or a checkpoint in another form"
    )
