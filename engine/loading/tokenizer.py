"""The tokenizer that belongs to a model, and the ids that end its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from batchgen.engine.loading.gguf.file import GGUFFile
from batchgen.engine.loading.gguf.tokenizer import gguf_tokenizer

_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# End of a sequence, of a turn and of a message: generation stops at each of them.
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The fast tokenizer of a model folder or GGUF file, with its chat template.

    Returns:
        None if the model comes without one: then prompts must be token ids, and answers have no
        text.

    Raises:
        ValueError: it needs code of its own, has no fast form, or its GGUF kind is not supported.
    """
    if path.suffix == ".gguf":
        return gguf_tokenizer(GGUFFile(path))
    if not any((path / name).is_file() for name in _VOCABULARIES):
        if not (path / _SETTINGS).is_file():
            return None
        # transformers would make a tokenizer with an empty vocabulary.
        raise ValueError(f"{path} has {_SETTINGS} but none of {', '.join(_VOCABULARIES)}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True, **_config(path)
        )
    except Exception as error:
        known = (OSError, ValueError, KeyError, TypeError, ImportError)
        # The tokenizers library raises a bare Exception for a file that it cannot read.
        if not isinstance(error, known) and type(error) is not Exception:
            raise
        raise ValueError(f"{path}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{path}: only tokenizers with a fast form (tokenizer.json) are supported")
    return tokenizer


def _config(path: Path) -> dict[str, PretrainedConfig]:
    """A model that transformers does not know gets an empty configuration: it would warn that the
    one in the folder is of another kind, and the tokenizer does not need it."""
    file = path / "config.json"
    kind = _read(file).get("model_type") if file.is_file() else None
    return {} if kind in CONFIG_MAPPING else {"config": PretrainedConfig()}


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every id that ends an answer of this model, in ascending order.

    The union of what generation_config.json, config.json and the tokenizer name; of a GGUF file,
    its ids for the end of a sequence, turn and message. Empty if nothing names one.
    """
    ids: set[int] = set()
    if path.suffix == ".gguf":
        metadata = GGUFFile(path).metadata
        keys = (f"tokenizer.ggml.{key}" for key in _GGUF_EOS_KEYS)
        ids.update(metadata[key] for key in keys if key in metadata)
    else:
        for name in ("generation_config.json", "config.json"):
            if (path / name).is_file():
                ids.update(_eos_of(_read(path / name)))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def _eos_of(config: dict[str, Any]) -> list[int]:
    # The file itself: the classes of transformers fill in an id where the file has none.
    eos = config.get("eos_token_id")
    if eos is None:
        return []
    return eos if isinstance(eos, list) else [eos]
