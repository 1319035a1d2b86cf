"""Finds the adapters of a model and checks that they fit it, before any weights load."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from batchgen.config.groups.adapter_names import LoRA, named_places, only_one
from batchgen.engine.layers.mxfp4_format import Units
from batchgen.engine.loading.adapters import check_adapter
from batchgen.engine.loading.peft_files import CONFIG, WEIGHTS, AdapterFile, open_adapter
from batchgen.engine.sampling.sampling_params import BASE
from batchgen.inputs.model.engine_recipe import bare
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_MOST_BYTES = 64 * 2**20
"""The size of a tokenizer's file from which on an adapter's is refused; the largest have 33 MB."""


def with_adapters(model: OpenedModel, adapters: LoRA, *, fold: bool = False) -> OpenedModel:
    """Return the model with these adapters; rows have the only one unless they ask for another.
    With `fold` it is added to the weights. Raises ValueError if one cannot be found, is damaged,
    or does not fit."""
    places = {name: place for name, place in named_places(adapters).items() if name != BASE}
    if not places:
        return model
    if model.path.is_file():
        raise ValueError(
            f"lora stands beside weights in safetensors, and {model.path.name} is a GGUF file: "
            "merge the adapter, or use the original checkpoint"
        )
    if fold and not only_one(adapters):
        raise ValueError("lora_fold adds one adapter to the weights, and lora names several")
    if fold and (model.config.form is not None or model.quantization is not None):
        raise ValueError(
            "lora_fold adds an adapter to weights in 16 or 32 bits, and those of this model are in "
            "fewer: leave it false, and the adapter stands beside them"
        )
    weights = bare(model, torch.float32, [], units=Units(fp8=False, four_bits=False))
    found = {}
    for name, place in places.items():
        adapter = open_adapter(_folder(name, place), fold=fold)
        check_adapter(adapter, weights, fold=fold)
        _check_tokenizer(name, adapter.folder, model)
        _warn_of_base(name, adapter, model)
        found[name] = adapter
    return replace(
        model,
        adapters=found,
        default_adapter=next(iter(found)) if only_one(adapters) else None,
        folds=fold,
    )


def adapter_files(adapter: AdapterFile) -> list[Path]:
    """The files that decide what an adapter computes."""
    return [adapter.folder / CONFIG, adapter.folder / WEIGHTS]


def _hub_name(path: str) -> re.Match[str] | None:
    if user_path(path, "lora").exists():
        return None
    return re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?", path)


def _folder(name: str, path: str) -> Path:
    """Find an adapter's folder; one on the hub is downloaded."""
    if (on_hub := _hub_name(path)) is not None:
        try:
            patterns = [CONFIG, WEIGHTS, *_TOKENIZER]
            repo, revision = on_hub.groups()
            return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ConfigError(
                f"adapter {name}: {path} is neither a folder here nor can it be had from the hub: "
                f"{str(error).splitlines()[0]}"
            ) from None
    local = user_path(path, "lora")
    if not local.is_dir():
        raise ConfigError(f"adapter {name}: {path} does not exist; give a folder or a hub name")
    return local.absolute()


def _check_tokenizer(name: str, folder: Path, model: OpenedModel) -> None:
    """Refuse an adapter that comes with another vocabulary or chat template than the model's."""
    if model.tokenizer is None:
        return
    whole = _read(folder / "tokenizer.json")
    if whole is not None:
        if other := sorted(_vocabulary(whole).items() - model.tokenizer.get_vocab().items()):
            raise ValueError(
                f"adapter {name}: {folder}/tokenizer.json has another vocabulary than the "
                f"model (token {other[0][0]!r}): merge the adapter into the model, and give the "
                "result its tokenizer"
            )
    template = _template(folder)
    if template is not None and template.strip() != _own_template(model).strip():
        raise ValueError(
            f"adapter {name}: {folder} has another chat template than the model, and prompts of a "
            "job are written with one: remove it from the adapter's folder if the adapter was not "
            "trained with it, or merge the adapter into a model with that template"
        )


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """The ids of all tokens of a tokenizer.json, by their text."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, int] = {}
    if isinstance(vocab, dict):
        found |= {str(text): i for text, i in vocab.items() if isinstance(i, int)}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            found[str(token.get("content"))] = token["id"]
    return found


def _template(folder: Path) -> str | None:
    """The chat template of an adapter's folder; None without one."""
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= _MOST_BYTES:
        return path.read_text("utf-8", "replace")
    found = (_read(folder / "tokenizer_config.json") or {}).get("chat_template")
    return found if isinstance(found, str) else None


def _own_template(model: OpenedModel) -> str:
    found = None if model.tokenizer is None else model.tokenizer.chat_template
    return found if isinstance(found, str) else ""


def _read(path: Path) -> Mapping[str, Any] | None:
    """Read a file of an adapter's tokenizer; None if there is none."""
    if not path.is_file():
        return None
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than any tokenizer's: remove it from the adapter")
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found


def _warn_of_base(name: str, adapter: AdapterFile, model: OpenedModel) -> None:
    base = adapter.config.base
    if base is not None and Path(base).name.lower() != model.path.name.lower():
        print(
            f"model: adapter {name} was trained on {base}, and fits this model by its shapes",
            file=sys.stderr,
            flush=True,
        )
