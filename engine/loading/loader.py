"""From a checkpoint to a model: every parameter is filled exactly once, or the load fails."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchgen.engine.execution.transfer import release_cached_memory
from batchgen.engine.loading.gguf.file import GGUFFile
from batchgen.engine.loading.gguf.model import gguf_config, gguf_weights
from batchgen.engine.loading.tokenizer import load_tokenizer
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.models.registry import model_class

LoadFormat = Literal["auto", "gguf", "dummy"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MASK = "<|MASK|>"


def load_config(path: Path) -> ModelConfig:
    """The configuration of a GGUF file or of a folder with a config.json.

    Raises:
        ValueError: there is none, or the model needs something the engine does not have; the
            message names the path and the reason.
    """
    if path.suffix == ".gguf":
        return gguf_config(GGUFFile(path))
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is neither a .gguf file nor a folder with a config.json")
    values = _read_json(path / "config.json")
    architectures = values.get("architectures")
    if not architectures:
        raise ValueError(f"{path}/config.json names no architecture (key 'architectures')")
    model = model_class(architectures[0], path)
    expected = model.hf_config.model_type
    if values.get("model_type") != expected:
        raise ValueError(
            f"{path}/config.json: model_type is {values.get('model_type')!r}, and architecture "
            f"{architectures[0]} goes with {expected!r}"
        )
    try:
        if model.diffusion and values.get("mask_token_id") is None:
            values["mask_token_id"] = _mask_token_id(path)
        return model.config_from_hf(model.hf_config.from_dict(values))
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{path}: {error}") from error


def _mask_token_id(path: Path) -> int:
    """The tokenizer's, for a config.json that does not say."""
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
) -> DenseForCausalLM:
    """Build the model of `path` and fill its weights.

    Args:
        path: a folder with config.json and safetensors, or a .gguf file. With load_format `dummy`
            its configuration is enough.
        device: the parameters are created on it; tensors are copied there one at a time.
        dtype: of parameters and activations; None is the checkpoint's (of a GGUF, float32).
        load_format: `auto` goes by what lies at path; `gguf` insists on a GGUF file; `dummy` fills
            small random weights, the same on every run.

    Raises:
        ValueError: unsupported model, or a missing, unexpected or mis-shaped tensor.
    """
    if load_format == "gguf" and path.suffix != ".gguf":
        raise ValueError(f"{path} is not a .gguf file, which load_format=gguf asks for")
    config = load_config(path)
    kind = model_class(config.architecture, path)
    release_cached_memory(device)
    model = kind(config, device=device, dtype=dtype or config.dtype)
    if load_format == "dummy":
        _fill_dummy(model)
    elif path.suffix == ".gguf":
        _fill(model, gguf_weights(GGUFFile(path), model), path)
    else:
        _fill(model, _safetensors(path), path)
    return model


def _fill(model: DenseForCausalLM, weights: Iterable[tuple[str, Tensor]], path: Path) -> None:
    slots = model.checkpoint_slots()
    filled: set[str] = set()
    unexpected: list[str] = []
    for name, tensor in weights:
        if name in slots and name not in filled:
            if tensor.shape != slots[name].shape:
                raise ValueError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, "
                    f"the configuration says {list(slots[name].shape)}"
                )
            slots[name].copy_(tensor)
            filled.add(name)
        elif not _is_derived(name, model.config):
            unexpected.append(name)
    missing = slots.keys() - filled
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"{path}: {problem} tensors: {_abbreviate(sorted(names))}")


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints hold although they follow from others."""
    tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return tied_head or name.endswith(".rotary_emb.inv_freq")


def _abbreviate(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in safetensors_files(folder):
        try:
            # Memory-mapped: a tensor is read when it is copied to its slot.
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut off: {error}") from error


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder, sharded or not.

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
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def _fill_dummy(model: DenseForCausalLM) -> None:
    """Norms are one, all else is normal with deviation 0.02, a stream of its own per tensor."""
    for index, (name, slot) in enumerate(sorted(model.checkpoint_slots().items())):
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            generator = torch.Generator(device=slot.device).manual_seed(index)
            slot.normal_(0.0, 0.02, generator=generator)
