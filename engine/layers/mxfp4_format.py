"""Which weights of a model are in MXFP4, and the type `WeightFormat` of all formats that a
checkpoint may declare."""

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
    weights are as they would be without."""

    excluded: tuple[str, ...] = ()  # more modules that are not in MXFP4; * stands for any letters
    native: bool = True  # kernels read MXFP4; else weights are kept in the model's dtype

    def excludes(self, name: str) -> bool:
        """Whether a module of this name, or one that it is part of, is excluded."""
        patterns = (re.escape(entry).replace(r"\*", "[^.]*") for entry in self.excluded)
        return any(re.search(rf"\.{pattern}\.", f".{name}.") for pattern in patterns)

    def renamed(self, rename: Callable[[str], str]) -> MXFP4Format:
        """Return this format with other names of modules."""
        return replace(self, excluded=tuple(map(rename, self.excluded)))


WeightFormat = FP8Format | MXFP4Format | FourBitFormat
"""How weights of a model are kept, if not in its dtype."""


class Units(NamedTuple):
    """From which formats a device computes."""

    fp8: bool
    four_bits: bool  # there are kernels for weights in 4 bits
    dtype: torch.dtype = torch.bfloat16  # of activations

    def computes_from(self, form: WeightFormat) -> bool:
        """Whether there are kernels for this format: none multiply e2m1 by float16."""
        if isinstance(form, FP8Format):
            return self.fp8
        in_int4 = isinstance(form, FourBitFormat) and form.code == "int4"
        return self.four_bits and (in_int4 or self.dtype != torch.float16)


_FOUR_BITS = (8, 0)
"""The compute capability from which there are products of pairs in bfloat16."""


def units_of(device: torch.device, dtype: torch.dtype) -> Units:
    """From which formats this device computes with activations of this dtype."""
    if device.type != "cuda":
        return Units(fp8=False, four_bits=False, dtype=dtype)
    four_bits = torch.cuda.get_device_capability(device) >= _FOUR_BITS and dtype.itemsize == 2
    return Units(has_fp8_units(device), four_bits, dtype)


def format_name(form: WeightFormat) -> str:
    """Name a format to the user."""
    if isinstance(form, FourBitFormat):
        return form.name
    return "FP8" if isinstance(form, FP8Format) else "MXFP4"


def weight_format(quantization: Mapping[str, Any] | None) -> WeightFormat | PackedFormat | None:
    """Read the `quantization_config` of a checkpoint's configuration; None if there is none.

    Raises ValueError for a quantisation that is not supported, or something unknown in it, which
    the message names.
    """
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
    # `dequantize` says what transformers should do with it.
    unknown = {key for key, value in quantization.items() if value not in (None, False)} - known
    if unknown - {"dequantize"}:
        raise ValueError(
            f"quantization_config.{min(unknown)} is not known for the method mxfp4: leave it out"
        )
    return MXFP4Format(excluded=tuple(names))
