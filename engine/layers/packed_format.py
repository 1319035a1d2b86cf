"""The formats of published quantised weights (GPTQ, AWQ and others), as config.json declares them.
Such weights stay in 4 bits, or are dequantised when they are loaded.

For example, `{"quant_method": "gptq", "bits": 4, "group_size": 128}` means int4 with a scale for
each 128 inputs of an output. `packed_format` reads it, with one function for each method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen.kernels.four_bit.fp4_weight import NVFP4_GROUP
from batchgen.kernels.four_bit.panels import Code
from batchgen.kernels.fp8.fp8_weight import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitFormat:
    """Weights of linear layers and experts that stay in 4 bits (`kernels/four_bit`).

    Kernels read 64 columns at a time, so a layer is dequantised if its number of columns is not a
    multiple of 64. A merged layer, such as one for q, k and v, is dequantised if only a part of it
    is 4-bit.

    Attributes:
        name: the name of the format, for messages.
        group: the number of columns that share a scale; None: all columns of a row.
        code: which values the 16 codes stand for.
        modules: the names in checkpoints of the 4-bit modules; None: every layer that can be 4-bit.
        native: whether the device has kernels for 4-bit weights; if not, weights are dequantised
            when they are loaded.
    """

    name: str
    group: int | None
    code: Code = "int4"
    modules: frozenset[str] | None = None
    native: bool = True

    def excludes(self, name: str) -> bool:
        """Return whether the module of this name is not 4-bit."""
        return self.modules is not None and name not in self.modules

    def renamed(self, rename: Callable[[str], str]) -> FourBitFormat:
        """Return this format with renamed modules."""
        if self.modules is None:
            return self
        return replace(self, modules=frozenset(map(rename, self.modules)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How the weights of a checkpoint are quantised. Which modules are quantised is not stored
    here; `packed_weights` finds that out from the names of the tensors.

    Attributes:
        name: the name of the format, for messages.
        kept: the 4-bit format in which the weights stay on the device; None: they are dequantised.
        activations: the type of activations that the checkpoint was made for, if it differs from
            the model's dtype. batchgen computes in the model's dtype.
        zeros_are_less: whether zero points are stored minus 1, as in the first version of GPTQ
            files.
        block: the rows and columns that share a scale; the last blocks of a weight may be
            incomplete. None: scales divide each axis into equal parts.
        ordered: whether inputs were ordered by activation (`desc_act`, `actorder`), so that a
            tensor `g_idx` holds the group of each input.
        kv_cache: the type in which the checkpoint would keep keys and values. batchgen keeps them
            in the model's dtype.
    """

    name: str
    activations: str | None = None
    zeros_are_less: bool = False
    block: tuple[int, int] | None = None
    kept: FourBitFormat | None = None
    ordered: bool = False
    kv_cache: str | None = None


def packed_format(quantization: Mapping[str, Any]) -> PackedFormat | None:
    """Read the `quantization_config` of AWQ, GPTQ, compressed-tensors, ModelOpt, FBGEMM or FP8.
    Returns None for other methods, and for FP8 with blocks of 128 × 128, which `fp8_format.py`
    reads. Raises ValueError, naming the key, for a variant that is not supported."""
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
    ordered = bool(values.get("desc_act"))
    name = f"int4 (GPTQ, {_groups(values, 'group_size', ordered)})"
    return PackedFormat(
        name=name,
        zeros_are_less=values.get("checkpoint_format") != "gptq_v2",
        kept=None if ordered else _int4(name, values["group_size"]),
        ordered=ordered,
    )


def _awq(values: Mapping[str, Any]) -> PackedFormat:
    _check(values, "bits", (4,))
    _check(values, "version", ("gemm", "GEMM", None))
    name = f"int4 (AWQ, {_groups(values, 'group_size')})"
    return PackedFormat(name=name, kept=_int4(name, values["group_size"]))


def _int4(name: str, group: int) -> FourBitFormat:
    return FourBitFormat(name=name, group=None if group == -1 else group)


def _groups(values: Mapping[str, Any], key: str, ordered: bool = False) -> str:
    """Describe which inputs share a scale, for messages. Raises ValueError if the group size is
    invalid."""
    size = values.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise _refused(key, size, "-1 or the number of values in a group")
    groups = "a scale for each output" if size == -1 else f"groups of {size}"
    return f"{groups} ordered by activation" if ordered else groups


def _compressed_tensors(values: Mapping[str, Any]) -> PackedFormat:
    for key, allowed in (
        ("sparsity_config", "null: sparse weights cannot be read"),
        ("transform_config", "null"),
    ):
        value = values.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _refused(key, value, allowed)
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups, "an object that names how weights are quantised")
    kinds, activations = dict[str, None](), dict[str, None]()  # sets in the order of insertion
    blocks = list[tuple[int, int]]()
    ordered, forms = False, list[tuple[str, int | None]]()
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
        size, order = weights.get("group_size"), weights.get("actorder")
        if not (size is None or (type(size) is int and (size > 0 or size == -1))):
            raise _refused(f"{key}.group_size", size, "null, -1 or the number of values in a group")
        forms.append((f"{kind}{bits}", None if size == -1 else size))
        # With `static` and `weight`, groups stay in the order of the inputs.
        ordered = ordered or order in (True, "group", "dynamic")
        inputs = group.get("input_activations")
        if isinstance(inputs, Mapping):
            activations[f"{inputs.get('type')}{inputs.get('num_bits')}"] = None
    name = f"{' and '.join(kinds)} (compressed-tensors)"
    kept = None  # kernels read 4-bit weights only if all groups have one form
    if len(kinds) == len(set(forms)) == 1 and not ordered:
        kept = _kept(name, next(iter(kinds)), forms[0][1])
    return PackedFormat(
        name=name,
        activations=" and ".join(activations) or None,
        block=blocks[0] if blocks else None,
        kept=kept,
        ordered=ordered,
        kv_cache=_kv_cache(values.get("kv_cache_scheme")),
    )


def _kept(name: str, kind: str, group: int | None) -> FourBitFormat | None:
    """Return the format in which kernels read weights of this kind; None if they cannot."""
    if kind == "nvfp4":
        return FourBitFormat(name=name, group=NVFP4_GROUP, code="nvfp4")
    return FourBitFormat(name=name, group=group) if kind == "int4" else None


def _kv_cache(scheme: Any) -> str | None:
    """Return the name of the type in which a checkpoint would keep keys and values."""
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise _refused("kv_cache_scheme", scheme, "null or an object")
    kind = {"int": "int", "float": "FP"}.get(str(scheme.get("type")))
    bits = scheme.get("num_bits")
    if kind is None or bits not in (4, 8):
        raise _refused("kv_cache_scheme", scheme, "null, or int or float of 4 or 8 bits")
    return f"{kind}{bits}"


def _modelopt(values: Mapping[str, Any]) -> PackedFormat:
    algorithm = values.get("quant_algo")
    _check(values, "quant_algo", ("FP8", "NVFP4"))
    kv_cache = values.get("kv_cache_quant_algo") or _kv_cache(values.get("kv_cache_scheme"))
    name = f"{algorithm} (ModelOpt)"
    return PackedFormat(
        name=name,
        activations=algorithm,
        kept=_kept(name, "nvfp4", None) if algorithm == "NVFP4" else None,
        kv_cache=str(kv_cache) if kv_cache else None,
    )


def _fbgemm(values: Mapping[str, Any]) -> PackedFormat:
    return PackedFormat(name="FP8 (a scale for each output)", activations="FP8")


def _fp8(values: Mapping[str, Any]) -> PackedFormat | None:
    block = values.get("weight_block_size")
    if block == [BLOCK, BLOCK]:
        return None  # kernels read this form directly: `fp8_format.py`
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
