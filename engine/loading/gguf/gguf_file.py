"""Reads the metadata and tensors of memory-mapped GGUF files.

The `gguf` package dequantises the tensors. The header is parsed here, because the package makes
several NumPy arrays per vocabulary entry, which takes seconds per file. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Maps the number of a metadata type to its format character in `struct`."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
"""The most axes of a tensor in a GGUF file."""
_Kind = GGMLQuantizationType
READ_TYPES = (
    *(_Kind.F32, _Kind.F16, _Kind.BF16, _Kind.Q8_0),
    *(_Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1),
    *(_Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K),
    *(_Kind.IQ1_S, _Kind.IQ2_XXS, _Kind.IQ2_XS, _Kind.IQ2_S, _Kind.IQ3_XXS, _Kind.IQ3_S),
    *(_Kind.IQ4_NL, _Kind.IQ4_XS, _Kind.TQ1_0, _Kind.TQ2_0),
)
"""The types of tensors that are supported: those that the tests compare."""
_CHUNK_ELEMENTS = 2**20
"""The number of elements that are dequantised at a time. This bounds the float32 temporaries and
keeps them in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor is in the file, and its shape and type."""

    shape: tuple[int, ...]  # row-major as in PyTorch, the reverse of the file's
    type: int  # the number of its quantization (`GGMLQuantizationType`)
    offset: int  # the byte of the file at which the tensor's data begin


class GGUFFile:
    """An open GGUF file, whose tensors are read on demand. Raises ValueError, naming the file, if
    it is not a complete GGUF file of version 2 or 3.

    Attributes:
        metadata: maps each key to an int, float, bool, str or a list of these.
        tensors: maps each name to the tensor's offset and shape.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, LookupError) as error:
            raise ValueError(f"{path}: the GGUF header is damaged or cut off") from error
        if self.metadata.get("split.count", 1) != 1:
            raise ValueError(f"{path} is one part of a split GGUF; merge the parts first")
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Raise ValueError if the file is too short for its tensors, or has tensors of unsupported
        types."""
        before, end = "", 0
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if tensor.type not in READ_TYPES:
                known = tensor.type in list(_Kind)
                raise ValueError(
                    f"{self.path}: {name} has quantization "
                    f"{_Kind(tensor.type).name if known else tensor.type}, which is not "
                    f"supported; supported: {', '.join(kind.name for kind in READ_TYPES)}"
                )
            empty = not tensor.shape or 0 in tensor.shape
            if empty or tensor.shape[-1] % GGML_QUANT_SIZES[_Kind(tensor.type)][0]:
                raise ValueError(
                    f"{self.path}: {name} has rows that are not whole blocks of "
                    f"{_Kind(tensor.type).name}"
                )
            if tensor.offset < end:
                raise ValueError(f"{self.path}: the data of {before} and {name} overlap")
            before, end = name, tensor.offset + self._num_bytes(tensor)
            if end > len(self._data):
                raise ValueError(f"{self.path} is cut off: it ends before the data of {name}")

    def _read_header(self) -> None:
        """Parse the metadata, and the offsets and shapes of the tensors."""
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name, axes = self._string(), self._scalar("I")
            if axes > _MOST_DIMENSIONS:
                raise ValueError(f"{self.path}: {name} has {axes} axes")
            dims = [self._scalar("Q") for _ in range(axes)]
            infos.append((name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(shape, kind, start + offset) for name, shape, kind, offset in infos
        }
        if len(self.tensors) < len(infos):
            raise ValueError(f"{self.path}: two tensors have the same name")

    def _scalar(self, code: str) -> Any:
        """Read a little-endian number of this `struct` format, and advance past it."""
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        """Read a string, which is preceded by its length in bytes, and advance past it."""
        (text,) = self._strings(1)
        return text

    def _strings(self, number: int) -> list[str]:
        """Read `number` strings. It is fast, because a vocabulary has a hundred thousand."""
        data, position, size_at = self._data, self._at, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(number):
            (size,) = size_at(data, position)
            position += 8 + size
            if position > len(data):
                raise IndexError("the file ends within a string")
            texts.append(data[position - size : position].decode())
        self._at = position
        return texts

    def _value(self, kind: int) -> Any:
        """Read a metadata value of this type, and advance past it."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, length = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(length)
        # No known key holds lists of lists.
        values = struct.unpack_from(f"<{length}{_SCALARS[item]}", self._data, self._at)
        self._at += struct.calcsize(f"<{length}{_SCALARS[item]}")
        return list(values)

    def _num_bytes(self, tensor: GGUFTensor) -> int:
        """Return the number of bytes of a tensor's data in the file."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        return math.prod(tensor.shape) // block * size

    def load(self, name: str) -> Tensor:
        """Read and dequantise a tensor. Returns float32 on the CPU, in the shape of
        `tensors[name]`."""
        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.type)
        block, size = GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(self._data, np.uint8, self._num_bytes(tensor), tensor.offset)
        out = np.empty(math.prod(tensor.shape), np.float32)
        step = max(1, _CHUNK_ELEMENTS // block)
        for start in range(0, len(out) // block, step):
            # Passed as one long row, because the package is slow on many short rows.
            part = raw[start * size : (start + step) * size].reshape(1, -1)
            out[start * block : (start + step) * block] = _dequantize(part, kind)[0]
        return torch.from_numpy(out).view(tensor.shape)


def _dequantize(row: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType) -> Any:
    """Dequantise the bytes [1, N] of whole quantisation blocks to float values [1, M]."""
    # For these two types the package expects values instead of bytes.
    if kind == GGMLQuantizationType.F16:
        return row.view(np.float16)
    if kind == GGMLQuantizationType.F32:
        return row.view(np.float32)
    return dequantize(row, kind)
