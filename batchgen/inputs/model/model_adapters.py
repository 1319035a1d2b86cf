"""Finds the LoRA adapters of a job and checks that they fit its model, before any weights load.
`with_adapters` is the entry point."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from batchgen.config.groups.adapter_names import (
    HUB_NAME,
    LoRA,
    LoRATemplate,
    named_places,
    only_one,
)
from batchgen.engine.layers.mxfp4_format import Units
from batchgen.engine.loading.adapters import check_adapter
from batchgen.engine.loading.peft_config import CONFIG
from batchgen.engine.loading.peft_files import WEIGHTS, AdapterFile, open_adapter
from batchgen.engine.sampling.sampling_params import BASE
from batchgen.inputs.model.adapter_tokenizer import (
    TOKENIZER,
    check_tokenizer,
    tokenizer_files,
    with_adapter_tokenizer,
)
from batchgen.inputs.model.engine_recipe import bare
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path


def with_adapters(
    model: OpenedModel, adapters: LoRA, *, fold: bool = False, template: LoRATemplate = "base"
) -> OpenedModel:
    """Return the model with these adapters. If there is only one, all rows run with it by default.

    Args:
        adapters: the job's model.lora: folders or hub names of adapters, by name.
        fold: add the only adapter to the weights once, instead of computing it in each forward.
        template: whose tokenizer and chat template the job uses: `base`, the model's, or `adapter`,
            those of the only adapter.

    Raises:
        ValueError: an adapter cannot be found, is damaged, or does not fit the model.
    """
    folders = {
        name: adapter_folder
        for name, adapter_folder in named_places(adapters).items()
        if name != BASE
    }
    if template not in get_args(LoRATemplate):
        raise ValueError(f"lora_template must be base or adapter, got {template!r}")
    if template == "adapter" and not only_one(adapters):
        raise ValueError(
            "lora_template=adapter takes the tokenizer of the only adapter, and lora names "
            + ("several" if folders else "none")
        )
    if not folders:
        return model
    _check_fold(model, fold=fold, is_single=only_one(adapters))
    # The model's modules with shapes and without values, to compare with the adapter's shapes.
    weights = bare(model, torch.float32, [], units=Units(fp8=False, four_bits=False))
    by_name = {}
    for name, adapter_folder in folders.items():
        folder = _folder(name, adapter_folder)
        _check_links(name, folder)
        adapter = open_adapter(folder, fold=fold)
        check_adapter(adapter, weights, fold=fold)
        adapter.check_values()
        if template == "base":
            check_tokenizer(name, adapter.folder, model)
        else:
            model = with_adapter_tokenizer(name, adapter.folder, model)
        _warn_of_base(name, adapter, model)
        by_name[name] = adapter
    return replace(
        model,
        adapters=by_name,
        default_adapter=next(iter(by_name)) if only_one(adapters) else None,
        folds=fold,
        adapter_template=template == "adapter",
    )


def _check_fold(model: OpenedModel, *, fold: bool, is_single: bool) -> None:
    """Raise ValueError if adapters cannot be used with this model, or cannot be folded into it."""
    if model.path.is_file():
        raise ValueError(
            f"lora needs a model in safetensors, but {model.path.name} is a GGUF file: merge the "
            "adapter, or use the original checkpoint"
        )
    if fold and not is_single:
        raise ValueError("lora_fold adds one adapter to the weights, and lora names several")
    if fold and (model.config.form is not None or model.quantization is not None):
        raise ValueError(
            "lora_fold adds an adapter to weights of 16 or 32 bits, but this model's have fewer: "
            "leave it false, which computes the adapter separately"
        )


def adapter_files(adapter: AdapterFile, *, with_template: bool) -> list[Path]:
    """Return the files whose content decides an adapter's results. With `with_template` these
    include its tokenizer and chat template."""
    files = tokenizer_files(adapter.folder) if with_template else []
    return [adapter.folder / CONFIG, adapter.folder / WEIGHTS, *files]


def _hub_name(path: str) -> re.Match[str] | None:
    """Match `HUB_NAME`. None if the path exists on this machine or has another form."""
    if user_path(path, "lora").exists():
        return None
    return HUB_NAME.fullmatch(path)


def _folder(name: str, path: str) -> Path:
    """Return the folder of the adapter `name`. An adapter on the hub is downloaded.

    Raises:
        ConfigError: there is no such folder, and the hub does not have the adapter either.
    """
    if (on_hub := _hub_name(path)) is not None:
        try:
            patterns = [CONFIG, WEIGHTS, *TOKENIZER]
            repo, revision = on_hub.groups()
            return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ConfigError(
                f"adapter {name}: {path} is not a folder here and cannot be fetched from the "
                f"hub: {str(error).splitlines()[0]}"
            ) from None
    local = user_path(path, "lora")
    if not local.is_dir():
        raise ConfigError(f"adapter {name}: {path} does not exist; give a folder or a hub name")
    return local.absolute()


def _check_links(name: str, folder: Path) -> None:
    """Raise ValueError if a file of an adapter is a link to a place outside of its folder, which
    may be a stranger's. The hub's cache links files to its own folder `blobs`."""
    for file in (folder / name for name in (CONFIG, WEIGHTS, *TOKENIZER)):
        if not file.is_symlink():
            continue
        target, inside = file.resolve(), folder.resolve()
        if not target.is_relative_to(inside) and target.parent != inside.parent.parent / "blobs":
            raise ValueError(
                f"adapter {name}: {file} is a link to {target}, outside of the adapter's folder: "
                "put the file itself there"
            )


def _warn_of_base(name: str, adapter: AdapterFile, model: OpenedModel) -> None:
    """Print a warning if the adapter names another base model than this one."""
    base = adapter.config.base
    if base is not None and Path(base).name.lower() != model.path.name.lower():
        print(
            f"model: adapter {name} was trained on {base}; its shapes fit this model",
            file=sys.stderr,
            flush=True,
        )
