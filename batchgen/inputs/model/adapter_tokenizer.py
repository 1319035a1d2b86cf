"""Reads the tokenizer and chat template that the folder of a LoRA adapter may have besides its
weights.

The configuration `lora_template` says whose chat template prompts are written with: `base`, the
model's, or `adapter`, that of the job's only adapter, whose tokenizer is then used as well.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from batchgen.engine.loading.peft_config import read_adapter_json
from batchgen.engine.loading.tokenizer import eos_token_ids, load_tokenizer
from batchgen.inputs.model.open_model import OpenedModel

_VOCABULARY, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TOKENIZER = (_VOCABULARY, _SETTINGS, _TEMPLATE)
"""The files of a tokenizer that are read."""
_MOST_BYTES = 64 * 2**20
"""The maximum size of each of these files; the largest known has 33 MB. An adapter may come from a
stranger, so a larger file is refused, not read."""
_TAKE_IT = "or, if it is the job's only adapter, take that of its folder with lora_template=adapter"


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer that lie in an adapter's folder."""
    return [folder / name for name in TOKENIZER if (folder / name).is_file()]


def check_tokenizer(name: str, folder: Path, model: OpenedModel) -> None:
    """Check an adapter of a job with lora_template=base.

    Args:
        name: the adapter's name in the job.
        folder: the adapter's folder.

    Raises:
        ValueError: the folder has a vocabulary or chat template that differs from the model's.
    """
    if model.tokenizer is None:
        return
    content = _read(folder / _VOCABULARY)
    if content is not None:
        if differing := sorted(_vocabulary(content).items() - model.tokenizer.get_vocab().items()):
            first, _ = differing[0]
            raise ValueError(
                f"adapter {name}: {folder}/{_VOCABULARY} has another vocabulary than the model "
                f"(token {first!r}): merge the adapter into the model, and give the result "
                f"its tokenizer, {_TAKE_IT}"
            )
    templates = _templates(_own_template(folder))
    if templates and templates != _templates(model.tokenizer.chat_template):
        raise ValueError(
            f"adapter {name}: {folder} has another chat template than the model, and prompts of a "
            "job are written with one: remove it from the adapter's folder if the adapter was not "
            "trained with it, merge the adapter into a model with that template, "
            f"{_TAKE_IT}"
        )


def with_adapter_tokenizer(name: str, folder: Path, model: OpenedModel) -> OpenedModel:
    """Return the model with the tokenizer and chat template of its only adapter's folder, or with
    the template alone if the folder has no tokenizer: the use of lora_template=adapter.

    Raises:
        ValueError: the folder has neither, one cannot be read, or the id of a token is not below
            the number of rows of the model's embedding.
    """
    files = tokenizer_files(folder)
    if not files:
        raise ValueError(
            f"lora_template is adapter, but {folder} of adapter {name} has none of "
            f"{', '.join(TOKENIZER)}: leave it at base"
        )
    for file in files:
        if file.name != _TEMPLATE:
            _read(file)  # raises if the file is too large, or holds no JSON object
    tokenizer = _tokenizer(folder, model)
    if tokenizer is None:
        raise ValueError(
            f"lora_template is adapter, but neither {folder} nor the model has a vocabulary: "
            "leave it at base"
        )
    vocab_size = model.config.vocab_size
    if beyond := [(id, text) for text, id in tokenizer.get_vocab().items() if id >= vocab_size]:
        number, text = min(beyond)
        raise ValueError(
            f"adapter {name}: {folder}/{_VOCABULARY} has token {text!r} with id {number}, and the "
            f"model's embedding has {vocab_size} rows: merge the adapter into the model that it "
            "was trained on, whose embedding was resized"
        )
    if (template := _own_template(folder)) is not None:
        tokenizer.chat_template = _templates(template).get("default", template)
    elif model.tokenizer is not None:
        tokenizer.chat_template = model.tokenizer.chat_template
    eos_ids = tuple(id for id in eos_token_ids(model.path, tokenizer) if 0 <= id < vocab_size)
    return replace(model, tokenizer=tokenizer, eos_token_ids=eos_ids)


def _tokenizer(folder: Path, model: OpenedModel) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of an adapter's folder, or copy the model's if it has none."""
    if (folder / _VOCABULARY).is_file():
        return load_tokenizer(folder)
    return copy.deepcopy(model.tokenizer)


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer.json, by their text. Entries of wrong types are
    left out."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids |= {str(text): id for text, id in vocab.items() if isinstance(id, int)}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            ids[str(token.get("content"))] = token["id"]
    return ids


def _own_template(folder: Path) -> Any:
    """Return the chat template of an adapter's folder in one of the forms that `_templates` reads;
    None without one."""
    path = folder / _TEMPLATE
    if path.is_file():
        _check_size(path)
        return path.read_text("utf-8", "replace")
    return (_read(folder / _SETTINGS) or {}).get("chat_template")


def _templates(value: Any) -> dict[str, str]:
    """Return chat templates by their names. tokenizer_config.json holds one text, an object of
    texts by name, or a list of objects with `name` and `template`."""
    if isinstance(value, str):
        return {"default": value.strip()}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in entries}
    if not isinstance(value, dict):
        return {}
    return {str(name): str(text).strip() for name, text in value.items()}


def _check_size(path: Path) -> None:
    """Raise ValueError if a file has more than _MOST_BYTES."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than any tokenizer's: remove it from the adapter")


def _read(path: Path) -> Mapping[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing."""
    if not path.is_file():
        return None
    _check_size(path)
    return read_adapter_json(path)
