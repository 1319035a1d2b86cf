"""Reads the configuration of a checkpoint. Its files come from strangers, so every value is
checked, and errors name what is wrong. The loader and the job's checks call `load_model_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.loading.model_keys import check_model_keys, unknown_keys
from batchgen.engine.loading.packed_weights import with_modules
from batchgen.engine.loading.safetensors_files import read_json, tensor_names, tensors_equal
from batchgen.engine.loading.tokenizer import load_tokenizer
from batchgen.engine.models.causal_lm import EMBEDDING, LM_HEAD, CausalLM, full_name
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.model_registry import ModelHead, decoder_of, model_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LoadFormat = Literal["auto", "gguf", "dummy"]

_OF_EMBEDDERS = "modules.json"
"""A file of sentence-transformers, which embedding models have."""
_BARE_EMBEDDING = "embed_tokens.weight"
"""The name of the embedding in files of a decoder without its head."""
_MOST_LABELS, _LABEL_LENGTH = 10_000, 200
"""The most classes of a classifier, and the most characters of a class's name."""
_MASKS = ("<|MASK|>", "|<MASK>|")
"""The mask tokens of the published tokenizers of SDAR and of Fast-dLLM v2."""
_OBJECTS = ("text_config", "quantization_config", "rope_parameters", "rope_scaling")
"""The keys of config.json whose value is an object or null."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_FLOATS = {f"{sign}Infinity": float(f"{sign}inf") for sign in ("", "-")}
_SHOWN = 60
"""How many characters of a wrong value a message shows."""


def load_model_config(path: Path, load_format: LoadFormat = "auto") -> ModelConfig:
    """Read the configuration of a GGUF file, or of a folder with a config.json.

    If config.json says that embedding and output layer share a weight, but the checkpoint holds two
    different ones, both are used, as in transformers. With the load format `dummy`, weights are not
    looked at.

    Raises:
        ValueError: there is no configuration, or the engine does not support the model. The message
            names the path, the key and what the value must be.
    """
    if path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.gguf_file import GGUFFile
        from batchgen.engine.loading.gguf.gguf_model import gguf_config

        return gguf_config(GGUFFile(path))
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is neither a .gguf file nor a folder with a config.json")
    values = with_infinities(read_json(file))
    _check_values(file, values)
    model = _class_of(file, values)
    check_model_keys(file, values, model.hf_config().model_type)
    if model.is_diffusion and values.get("mask_token_id") is None:
        values["mask_token_id"] = _mask_token_id(path)
    _, head = decoder_of(values["architectures"][0])
    try:
        hf = _parsed(model.hf_config(), values)
        config = model.config_from_hf(hf)
        if head is not None:
            labels = _labels(hf) if head is ModelHead.CLASSES else None
            config = replace(config, has_logits=False, labels=labels, heads=())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    looked_at = load_format != "dummy" and any(path.glob("*.safetensors"))
    if isinstance(config.form, PackedFormat) and looked_at:
        config = replace(config, form=with_modules(config.form, path))
    embeds = (path / _OF_EMBEDDERS).is_file()
    if config.has_logits and looked_at and (config.tie_word_embeddings or embeds):
        tensors_there = list(tensor_names(path))
        names = {model.piece_name(full_name(name), config): name for name in tensors_there}
        if config.tie_word_embeddings and names.keys() >= {EMBEDDING, LM_HEAD}:
            tied = tensors_equal(path, names[EMBEDDING], names[LM_HEAD])
            config = replace(config, tie_word_embeddings=tied, untied=not tied)
        elif (
            not config.tie_word_embeddings
            and LM_HEAD not in names
            and _BARE_EMBEDDING in tensors_there
        ):
            # Embedding models may be saved without the output layer that their architecture
            # implies.
            config = replace(config, has_logits=False, heads=())
    return config


def _labels(hf: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in order. Raises ValueError if they are not
    numbered from 0, or are not strings."""
    names: object = hf.id2label
    if not isinstance(names, dict) or not 0 < len(names) <= _MOST_LABELS:
        raise ValueError(f"id2label must name 1 to {_MOST_LABELS:,} classes, got {_shown(names)}")
    if sorted(names) != [*range(len(names))] or not all(isinstance(n, str) for n in names.values()):
        raise ValueError(f"id2label is {_shown(names)}, and must give each class from 0 on a name")
    return tuple(_cut(names[i], _LABEL_LENGTH) for i in range(len(names)))


def strange_keys(path: Path) -> list[str]:
    """Return the keys in a folder's config.json that neither transformers nor the engine knows;
    none for a GGUF file."""
    file = path / "config.json"
    if not file.is_file():
        return []
    values = with_infinities(read_json(file))
    return unknown_keys(values, _class_of(file, values).hf_config())


def with_infinities(values: dict[str, Any]) -> dict[str, Any]:
    """Convert infinities in the lists of a config.json, which transformers writes as {"__float__":
    "Infinity"} since 5.0."""
    return {
        key: [
            _FLOATS.get(str(entry.get("__float__")), entry) if isinstance(entry, dict) else entry
            for entry in value
        ]
        if isinstance(value, list)
        else value
        for key, value in values.items()
    }


def _check_values(file: Path, values: Mapping[str, Any]) -> None:
    """Raise ValueError for values of a wrong type, which transformers' classes accept unchecked."""
    text = values.get("text_config")
    for prefix, inside in (("", values), ("text_config.", text if isinstance(text, dict) else {})):
        for key in _OBJECTS:
            if not isinstance(value := inside.get(key), dict | None):
                raise ValueError(
                    f"{file}: {prefix}{key} is {_shown(value)}, and must be an object or null"
                )
        labels = inside.get("num_labels")  # transformers makes a name for each
        if labels is not None and not (type(labels) is int and 1 <= labels <= _MOST_LABELS):
            raise ValueError(
                f"{file}: {prefix}num_labels is {_shown(labels)}, and must be null or 1 to "
                f"{_MOST_LABELS:,}"
            )
        for key in ("dtype", "torch_dtype"):
            if (value := inside.get(key)) not in (None, *_DTYPES):
                raise ValueError(
                    f"{file}: {prefix}{key} is {_shown(value)}, and must be null or one of "
                    f"{', '.join(_DTYPES)}"
                )


def _class_of(file: Path, values: Mapping[str, Any]) -> type[CausalLM]:
    """Return the class of the model that a config.json describes. Raises ValueError for one that
    the engine, or this transformers, does not support."""
    architectures = values.get("architectures")
    if not architectures and "swiglu_limit" in values:
        raise ValueError(
            f"{file} is that of gpt-oss's original layout, which does not describe the model "
            "fully: use the folder above it, which has a config.json in the layout of "
            "transformers"
        )
    if not architectures:
        raise ValueError(f"{file} names no architecture (key 'architectures')")
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ValueError(
            f"{file}: architectures is {_shown(architectures)}, and must be a list of names"
        )
    import transformers

    model = model_class(architectures[0], file)
    # Families whose configuration is a class of batchgen's own name none of transformers.
    hf_class = getattr(model, "hf_class", None)
    if hf_class is not None and not hasattr(transformers, hf_class):
        raise ValueError(
            f"{file}: {architectures[0]} needs {hf_class}, which transformers "
            f"{transformers.__version__} does not have: install a newer transformers"
        )
    expected = model.hf_config().model_type
    if values.get("model_type") != expected:
        raise ValueError(
            f"{file}: model_type is {_shown(values.get('model_type'))}, and architecture "
            f"{architectures[0]} goes with {expected!r}"
        )
    nested = "text_config" in model.hf_config().sub_configs and not model.has_flat_files
    if nested and not values.get("text_config"):
        raise ValueError(f"{file}: text_config, which describes the decoder, is missing")
    return model


def _parsed(kind: type[PretrainedConfig], values: Mapping[str, Any]) -> PretrainedConfig:
    """Parse a config.json's values with transformers' class. Any exception becomes a ValueError,
    because transformers' code does not expect hostile values."""
    from huggingface_hub.errors import StrictDataclassError  # transformers has loaded it by now

    try:
        return kind.from_dict(dict(values))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, StrictDataclassError):
            # The last line of the message names the problem; for unions it is followed by one for
            # each type.
            why = str(error).strip().split("\n")[-1].strip().split(" Errors: ")[0]
            if why.startswith(("TypeError: Field", "ValueError: ")):  # these name the key
                words = _CLASS.sub(r"\1", why.partition(": ")[2])
                raise ValueError(_cut(words, 4 * _SHOWN)) from error
        why = _cut(why, 2 * _SHOWN)
        for key, value in values.items():
            try:
                kind.from_dict({name: other for name, other in values.items() if name != key})
            except Exception:  # another key is wrong
                continue
            raise ValueError(f"{key} is {_shown(value)}, which cannot be read ({why})") from error
        raise ValueError(f"it cannot be read ({why})") from error


def _shown(value: object) -> str:
    return _cut(repr(value), _SHOWN)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _mask_token_id(path: Path) -> int:
    """Return the mask token's id from the tokenizer, for a config.json that lacks it."""
    tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        if tokenizer.mask_token_id is not None:
            return int(tokenizer.mask_token_id)
        added: dict[str, int] = tokenizer.get_added_vocab()
        for mask in _MASKS:
            if mask in added:
                return added[mask]
    raise ValueError(
        f"{path}: neither config.json (key 'mask_token_id') nor the tokenizer (mask_token, or an "
        f"added token {' or '.join(_MASKS)}) says which token stands for masked ones: add it to "
        "config.json"
    )
