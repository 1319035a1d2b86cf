"""Loads the tokenizer of a model and finds the token ids that end its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# End of a sequence, of a turn and of a message: generation stops at each of them.
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Load the fast tokenizer of a model folder or GGUF file, with its chat template.

    Returns:
        The tokenizer; None if the model comes without one. Then prompts must be token ids, and
        answers have no text.

    Raises:
        ValueError: the tokenizer cannot be read, needs code of its own, has no fast form, or is of
            a GGUF kind that is not supported.
    """
    if path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.file import GGUFFile
        from batchgen.engine.loading.gguf.tokenizer import gguf_tokenizer

        return gguf_tokenizer(GGUFFile(path))
    if not any((path / name).is_file() for name in _VOCABULARIES):
        if not (path / _SETTINGS).is_file():
            return None
        # Without this check, transformers would make a tokenizer with an empty vocabulary.
        raise ValueError(f"{path} has {_SETTINGS} but none of {', '.join(_VOCABULARIES)}")
    from transformers import AutoTokenizer  # takes seconds, and not every model has a tokenizer

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
    """Return extra arguments for loading the tokenizer of a model that transformers does not know.

    They give it an empty configuration. The tokenizer does not need the one in the folder, and
    transformers would warn that it is of an unknown kind.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    file = path / "config.json"
    kind = _read(file).get("model_type") if file.is_file() else None
    return {} if kind in CONFIG_MAPPING else {"config": PretrainedConfig()}


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return all token ids that end an answer of this model, in ascending order.

    They are the ids that generation_config.json, config.json and the tokenizer name. For a GGUF
    file they are its ids for the end of a sequence, a turn and a message, and the tokenizer's. The
    result is empty if nothing names an id.
    """
    ids: set[int] = set()
    if path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.file import GGUFFile

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
    """Return the EOS ids that a configuration file gives; there may be none, one or several."""
    # The file itself is read, because the classes of transformers fill in an id if it has none.
    eos = config.get("eos_token_id")
    if eos is None:  # A checkpoint with a vision tower says it of its decoder.
        eos = config.get("text_config", {}).get("eos_token_id")
    if eos is None:
        return []
    return eos if isinstance(eos, list) else [eos]
