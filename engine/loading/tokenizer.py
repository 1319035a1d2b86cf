"""Loads the tokenizer of a model, and finds the token ids that end its answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.engine.constraint.harmony import HarmonyTokens
from batchgen.engine.loading.safetensors_files import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OBJECTS = (_SETTINGS, "special_tokens_map.json", "added_tokens.json")
"""The small files of a tokenizer, each of which holds a JSON object."""
# The ends of a sequence, a turn and a message. Generation stops at each of them.
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Load the fast tokenizer of a model folder or GGUF file, with its chat template.

    Returns None if the model has none; then prompts must be token ids, and answers have no text.
    Raises ValueError if the tokenizer cannot be read, needs code of its own, has no fast form, or
    is of an unsupported GGUF kind.
    """
    if path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.gguf_file import GGUFFile
        from batchgen.engine.loading.gguf.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(GGUFFile(path))
    if not any((path / name).is_file() for name in _VOCABULARIES):
        if not (path / _SETTINGS).is_file():
            return None
        # Without this check, transformers would make a tokenizer with an empty vocabulary.
        raise ValueError(f"{path} has {_SETTINGS} but none of {', '.join(_VOCABULARIES)}")
    from transformers import AutoTokenizer  # takes seconds, and not every model has a tokenizer

    for name in _OBJECTS:
        if (path / name).is_file():
            read_json(path / name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path,
            trust_remote_code=False,
            local_files_only=True,
            # The engine checks lengths itself; transformers uses this value only for warnings.
            model_max_length=sys.maxsize,
            **_config(path),
        )
    except Exception as error:  # transformers does not check the files' values
        raise ValueError(
            f"{path}: its tokenizer cannot be loaded: {error} ({type(error).__name__} at reading "
            f"one of {', '.join((*_VOCABULARIES, *_OBJECTS))})"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"{path}: only tokenizers with a fast form (tokenizer.json) are supported")
    return tokenizer


def _config(path: Path) -> dict[str, PretrainedConfig]:
    """Return an empty configuration for models that transformers does not know; otherwise it would
    warn."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    file = path / "config.json"
    kind = read_json(file).get("model_type") if file.is_file() else None
    return {} if kind in CONFIG_MAPPING else {"config": PretrainedConfig()}


def eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return all token ids that end an answer of this model, ascending; may be empty.

    They are named in generation_config.json, config.json and the tokenizer. A GGUF file has ids for
    the ends of a sequence, a turn and a message. A Harmony tokenizer adds the ends of Harmony's
    messages. Raises ValueError, naming the file, for an invalid value.
    """
    ids: set[int] = set()
    if path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.gguf_file import GGUFFile

        metadata = GGUFFile(path).metadata
        keys = (f"tokenizer.ggml.{key}" for key in _GGUF_EOS_KEYS)
        for key in keys:
            ids.update(_checked(path, key, metadata.get(key)))
    else:
        for name in ("generation_config.json", "config.json"):
            if (path / name).is_file():
                ids.update(_eos_of(path / name))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if tokenizer is not None and (harmony := HarmonyTokens.of(tokenizer)) is not None:
        ids.update(harmony.stops)
    return tuple(sorted(ids))


def _eos_of(file: Path) -> list[int]:
    """Return the EOS ids in a configuration file; none, one or several."""
    # The file is read directly, because transformers' classes fill in a missing id.
    config = read_json(file)
    eos = config.get("eos_token_id")
    if eos is None:  # with a vision tower, the decoder's part may have it
        eos = (config.get("text_config") or {}).get("eos_token_id")
    return _checked(file, "eos_token_id", eos)


def _checked(file: Path, key: str, eos: Any) -> list[int]:
    """Return the ids of a value that may be null, an id or a list of ids."""
    ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token_id) is not int for token_id in ids):
        raise ValueError(f"{file}: {key} is {eos!r:.60}, and must be a token id or a list of them")
    return ids
