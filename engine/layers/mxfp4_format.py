"""The MXFP4 format of experts, and the type `WeightFormat` of all formats that a checkpoint may
declare."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from batchgen.engine.layers.fp8_format import FP8Format, checkpoint_format, has_fp8_units
from batchgen.engine.layers.packed_format import FourBitFormat, PackedFormat, packed_format

_NAME = re.compile(r"[\w.*-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Format:
    """Weights of experts in MXFP4 (`kernels/four_bit`), as gpt-oss publishes them. All other
    weights are in the model's dtype."""

    excluded: tuple[str, ...] = ()  # further modules not in MXFP4; * matches within one name part
    native: bool = True  # whether kernels read MXFP4; else weights are kept in the model's dtype

    def excludes(self, name: str) -> bool:
        """Return whether this module, or one that contains it, is excluded."""
        patterns = (re.escape(entry).replace(r"\*", "[^.]*") for entry in self.excluded)
        return any(re.search(rf"\.{pattern}\.", f".{name}.") for pattern in patterns)

    def renamed(self, rename: Callable[[str], str]) -> MXFP4Format:
        """Return this format with renamed modules."""
        return replace(self, excluded=tuple(map(rename, self.excluded)))


WeightFormat = FP8Format | MXFP4Format | FourBitFormat
"""How the weights of a model are kept, if not in its dtype."""


class Units(NamedTuple):
    """The weight formats that a device can compute from."""

    fp8: bool
    four_bits: bool  # whether kernels for 4-bit weights run on the device
    dtype: torch.dtype = torch.bfloat16  # the dtype of activations

    def computes_from(self, form: WeightFormat) -> bool:
        """Return whether there are kernels for this format. No kernel multiplies e2m1 (FP4) by
        float16."""
        if isinstance(form, FP8Format):
            return self.fp8
        in_int4 = isinstance(form, FourBitFormat) and form.code == "int4"
        return self.four_bits and (in_int4 or self.dtype != torch.float16)


_FOUR_BITS = (8, 0)
"""The compute capability from which GPUs multiply pairs of bfloat16 values."""


def units_of(device: torch.device, dtype: torch.dtype) -> Units:
    """Return the formats that this device can compute from, with activations of this dtype."""
    if device.type != "cuda":
        return Units(fp8=False, four_bits=False, dtype=dtype)
    four_bits = torch.cuda.get_device_capability(device) >= _FOUR_BITS and dtype.itemsize == 2
    return Units(has_fp8_units(device), four_bits, dtype)


def format_name(form: WeightFormat) -> str:
    """Return the name of a format for messages to the user."""
    if isinstance(form, FourBitFormat):
        return form.name
    return "FP8" if isinstance(form, FP8Format) else "MXFP4"


def weight_format(quantization: Mapping[str, Any] | None) -> WeightFormat | PackedFormat | None:
    """Read the `quantization_config` of a checkpoint; None if there is none. Raises ValueError,
    naming the key, for quantisation that is not supported and for unknown keys."""
    if quantization is None or quantization.get("quant_method") != "mxfp4":
        packed = None if quantization is None else packed_format(quantization)
        return packed or checkpoint_format(quantization)
    names = quantization.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in names
    ):
        raise ValueError(
            f"quantization_config.modules_to_not_convert is {names!r:.60}, and must be a list of "
            "names of modules, in which * may stand for any letters"
        )
    known = {"quant_method", "modules_to_not_convert"}
    # `dequantize` is an instruction to transformers.
    unknown = {key for key, value in quantization.items() if value not in (None, False)} - known
    if unknown - {"dequantize"}:
        raise ValueError(
            f"quantization_config.{min(unknown)} is not known for the method mxfp4: leave it out"
        )
    return MXFP4Format(excluded=tuple(names))
