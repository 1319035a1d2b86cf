"""Loads a checkpoint into a model. Every parameter is filled exactly once, or the load fails."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from batchgen.engine.execution.transfer import release_cached_memory
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.loading.tokenizer import load_tokenizer
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.models.registry import model_class
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel

LoadFormat = Literal["auto", "gguf", "dummy"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MASK = "<|MASK|>"  # The mask token of the published SDAR tokenizers.


def load_config(path: Path) -> ModelConfig:
    """Read the configuration of a GGUF file or of a folder with a config.json.

    Raises:
        ValueError: there is no configuration, or the model needs something that the engine does not
            have; the message names the path and the reason.
    """
    if path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.file import GGUFFile
        from batchgen.engine.loading.gguf.model import gguf_config

        return gguf_config(GGUFFile(path))
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is neither a .gguf file nor a folder with a config.json")
    values = _read_json(path / "config.json")
    architectures = values.get("architectures")
    if not architectures:
        raise ValueError(f"{path}/config.json names no architecture (key 'architectures')")
    model = model_class(architectures[0], path)
    hf_config = model.hf_config()
    from huggingface_hub.errors import StrictDataclassError  # transformers has loaded it by now

    expected = hf_config.model_type
    if values.get("model_type") != expected:
        raise ValueError(
            f"{path}/config.json: model_type is {values.get('model_type')!r}, and architecture "
            f"{architectures[0]} goes with {expected!r}"
        )
    try:
        if model.is_diffusion and values.get("mask_token_id") is None:
            values["mask_token_id"] = _mask_token_id(path)
        return model.config_from_hf(hf_config.from_dict(values))
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{path}: {error}") from error


def _mask_token_id(path: Path) -> int:
    """Ask the tokenizer for the mask token's id, for a config.json that does not give it.

    Raises:
        ValueError: the tokenizer does not know it either.
    """
    tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        if tokenizer.mask_token_id is not None:
            return int(tokenizer.mask_token_id)
        added: dict[str, int] = tokenizer.get_added_vocab()
        if _MASK in added:
            return added[_MASK]
    raise ValueError(
        "neither config.json (key 'mask_token_id') nor the tokenizer (mask_token, or an added "
        f"token {_MASK}) says which token stands for masked ones: add it to config.json"
    )


def load_model(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "auto",
    heads: Collection[str] = (),
    parallel: TensorParallel = ALONE,
) -> CausalLM:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: a folder with config.json and safetensors, or a .gguf file. For load_format `dummy`
            a configuration is enough.
        device: where the parameters are created; tensors are copied there one at a time.
        dtype: the dtype of parameters and activations; None takes the checkpoint's dtype, which is
            float32 for a GGUF file.
        load_format: `auto` decides by what lies at the path, `gguf` refuses anything but a GGUF
            file, and `dummy` makes small random weights, which are the same in every run.
        heads: the names of the model's heads to load with it.
        parallel: the ranks between which the weights are divided; only those of this rank are read.

    Raises:
        ValueError: the model is not supported, or a tensor is missing, unexpected or of the wrong
            shape.
    """
    if load_format == "gguf" and path.suffix != ".gguf":
        raise ValueError(f"{path} is not a .gguf file, which load_format=gguf asks for")
    config = load_config(path)
    kind = model_class(config.architecture, path)
    release_cached_memory(device)
    model = kind(config, device=device, dtype=dtype or config.dtype, heads=heads, parallel=parallel)
    if load_format == "dummy":
        _fill_dummy(model)
    elif path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.file import GGUFFile
        from batchgen.engine.loading.gguf.model import gguf_weights

        _fill(model, gguf_weights(GGUFFile(path), model), path)
    else:
        _fill(model, _safetensors(path), path)
    return model


def _fill(model: CausalLM, weights: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Fill every piece of the model exactly once.

    Args:
        weights: the name and values of each tensor of the checkpoint.
        path: the checkpoint, for error messages.

    Raises:
        ValueError: a tensor is missing, unexpected, of the wrong shape, or fills a piece again.
    """
    slots = model.checkpoint_slots()
    by_source: dict[str, list[WeightSlot]] = defaultdict(list)
    for slot in slots:
        for source in slot.sources:
            by_source[source].append(slot)
    # The sources found so far of slots that need several, by the slot's identity.
    waiting: dict[int, dict[str, Tensor]] = defaultdict(dict)
    filled: set[str] = set()
    unexpected: list[str] = []
    skipped: set[str] = set()
    for given, tensor in weights:
        if (part := model.skipped_part(given)) is not None:
            skipped.add(part)
            continue
        name = model.piece_name(given)
        found = by_source.pop(name, [])
        if not found and not model.is_derived(name):
            unexpected.append(given)
        for slot in found:
            sources = waiting[id(slot)]
            sources[name] = tensor
            if len(sources) == len(slot.sources):
                if twice := filled.intersection(slot.pieces):
                    raise ValueError(f"{path}: {given} holds {min(twice)}, which came before")
                try:
                    slot.fill(waiting.pop(id(slot)))
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
                filled.update(slot.pieces)
    model.skipped_parts = tuple(sorted(skipped))
    missing = {piece for slot in slots for piece in slot.pieces} - filled
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"{path}: {problem} tensors: {_abbreviate(sorted(names))}")


def _abbreviate(names: list[str]) -> str:
    """List at most five names and say how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor in a folder's safetensors files."""
    for file in safetensors_files(folder):
        with _opened(file) as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in a folder's safetensors files, without reading any tensor.

    Raises:
        ValueError: there are no weights, or a file is damaged.
    """
    names: list[str] = []
    for file in safetensors_files(folder):
        with _opened(file) as tensors:
            names += tensors.keys()
    return names


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file as safetensors' `safe_open` does, which has no types. It is
    memory-mapped, so a tensor is read only when it is copied.

    Raises:
        ValueError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open  # dummy weights and GGUF files need none

    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut off: {error}") from error


def safetensors_files(folder: Path) -> list[Path]:
    """Find the safetensors files of a folder, which are one file or several shards.

    Raises:
        ValueError: there are none, or a shard that the index names is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        weight_map = _read_json(index)["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{folder}: {file.name}, named by {_INDEX}, is missing")
        return files
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = [file.name for ending in ("bin", "pt", "pth") for file in folder.glob(f"*.{ending}")]
    if pickles:
        raise ValueError(
            f"{folder} has no {_SINGLE}; pickled weights ({_abbreviate(sorted(pickles))}) are not "
            "read because they can run code: convert them to safetensors"
        )
    raise ValueError(
        f"{folder} has no weights ({_SINGLE} or {_INDEX}); load_format=dummy needs none"
    )


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # The text is not UTF-8, or not JSON.
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def _fill_dummy(model: CausalLM) -> None:
    """Fill a model without a checkpoint.

    Slots with a `dummy` value, such as norms, get that value. All others get normal random numbers
    with standard deviation 0.02, from a generator of their own for each piece. They are drawn for
    the whole tensor of a checkpoint, so that ranks have parts of the same weights.
    """
    plain = {slot.pieces[0]: slot for slot in model.checkpoint_slots() if len(slot.pieces) == 1}
    for index, (_, slot) in enumerate(sorted(plain.items())):
        parameter = slot.parameter
        if slot.dummy is not None:
            parameter.fill_(slot.dummy)
        elif not slot.elsewhere:
            generator = torch.Generator(device=parameter.device).manual_seed(index)
            whole = parameter.new_empty(slot.source_shape).normal_(0.0, 0.02, generator=generator)
            slot.fill(dict.fromkeys(slot.sources, whole))
