"""Finds the safetensors files of a checkpoint and reads the tensors in them. The loader and the
adapters use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8, FP8Weight, scales_shape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SCALES = "_scale_inv"
"""The suffix of the name of a weight's FP8 scales."""


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor in a folder's safetensors files."""
    for file in safetensors_files(folder):
        with _opened(file) as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def tensors_equal(folder: Path, one: str, other: str) -> bool:
    """Return whether two tensors of a folder have equal values and the same type."""
    # Files are memory-mapped, so the values of skipped tensors are not read.
    first, second = (next(t for name, t in tensors(folder) if name == n) for n in (one, other))
    return first.dtype == second.dtype and torch.equal(first, second)


def tensors_with_scales(folder: Path) -> Iterator[tuple[str, Tensor | FP8Weight]]:
    """Yield the tensors of a checkpoint with FP8 weights, which are yielded with their scales.
    Raises ValueError if a weight has no scales, or scales of a wrong shape or type."""
    with open_by_name(folder) as file_of:
        used: set[str] = set()
        scales_last = sorted(file_of, key=lambda name: name.endswith(_SCALES))
        for name in scales_last:
            if name in used:
                continue
            tensor, of_scales = file_of[name].get_tensor(name), name + _SCALES
            if tensor.dtype != FP8:
                yield name, tensor
                continue
            if of_scales not in file_of:
                raise ValueError(
                    f"{folder}: tensor {of_scales} is missing, the scales of {name}, which is in "
                    "FP8"
                )
            used.add(of_scales)
            scales = file_of[of_scales].get_tensor(of_scales)
            yield name, _scaled(folder, of_scales, tensor, scales)


def _scaled(folder: Path, name: str, values: Tensor, scales: Tensor) -> FP8Weight:
    """Combine an FP8 weight with its scales; `name` is the name of the scales."""
    expected = scales_shape(values.shape)
    if tuple(scales.shape) != expected or not scales.is_floating_point():
        raise ValueError(
            f"{folder}: tensor {name} has shape {list(scales.shape)} in "
            f"{str(scales.dtype).removeprefix('torch.')}, and a weight of shape "
            f"{list(values.shape)} needs floating-point scales of shape {list(expected)}"
        )
    return FP8Weight(values, scales.float())


def _names(file: Path) -> list[str]:
    with _opened(file) as opened:
        return list(opened.keys())


def tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in a folder's safetensors files without reading any tensor.
    Raises ValueError if there are no weights, or if a file is damaged."""
    return [name for file in safetensors_files(folder) for name in _names(file)]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file, memory-mapped. Raises ValueError if it is damaged. `safe_open` is
    untyped, so the result is `Any`."""
    from safetensors import SafetensorError, safe_open  # dummy weights and GGUF files need none

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut off: {error}") from error


@contextmanager
def open_by_name(folder: Path) -> Iterator[dict[str, Any]]:
    """Open all safetensors files of a folder. The context's value maps each tensor's name to its
    open file."""
    with ExitStack() as stack:
        file_of: dict[str, Any] = {}
        for file in safetensors_files(folder):
            opened = stack.enter_context(_opened(file))
            file_of |= dict.fromkeys(opened.keys(), opened)
        yield file_of


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, one file or several shards. Raises ValueError if
    there are none, or if a shard is missing by the index or by the numbers in file names."""
    index = folder / _INDEX
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if shards := sorted(file.name for file in folder.glob("model-*-of-*.safetensors")):
        number = shards[0].rpartition("-of-")[2].removesuffix(".safetensors")
        if not number.isdecimal() or int(number) != len(shards):
            raise ValueError(
                f"{folder} has no {_INDEX}, and {len(shards)} of the shards that their names count "
                f"({abbreviate(shards)}): some are missing or too many"
            )
        return [folder / name for name in shards]
    pickles = [file.name for ending in ("bin", "pt", "pth") for file in folder.glob(f"*.{ending}")]
    if pickles:
        raise ValueError(
            f"{folder} has no {_SINGLE}; pickled weights ({abbreviate(sorted(pickles))}) are not "
            "read because they can run code: convert them to safetensors"
        )
    raise ValueError(
        f"{folder} has no weights ({_SINGLE} or {_INDEX}); load_format=dummy needs none"
    )


def _indexed(index: Path) -> list[str]:
    """Return the file names in an index of shards, sorted. All files must be in the index's
    folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no 'weight_map', which names the file of each tensor")
    present = {file.name for file in index.parent.iterdir() if file.is_file()}
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{index}: weight_map names {name!r:.60}, which is not a file of the folder"
            )
        if name not in present:
            raise ValueError(f"{index.parent}: {name:.60}, named by {_INDEX}, is missing")
    return sorted(set(weight_map.values()))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError, naming the file, if it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # Not UTF-8, not JSON, or nested too deeply.
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def abbreviate(names: list[str]) -> str:
    """List at most five names, and say how many more there are."""
    first_names = ", ".join(names[:5])
    return first_names if len(names) <= 5 else f"{first_names} and {len(names) - 5} more"
