"""Finds the tokenizer of a job's model on this machine, to show the texts of token ids.

Nothing is downloaded. Without a tokenizer, pages show the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME
from batchgen.util.paths import user_path

if TYPE_CHECKING:
    from batchgen.engine.constraint.vocabulary import Vocabulary
    from batchgen.pages.tokens.token_boxes import Decode


def job_decode(config: Mapping[str, Any]) -> Decode | None:
    """Return a function that turns token ids into text, with special tokens; None without a
    tokenizer. A tokenizer.json is read without transformers, whose import takes seconds.
    """
    path = _model_path(config)
    if path is None:
        return None
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            fast = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            if type(error) is not Exception:
                raise
            return None
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    from batchgen.engine.loading.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except (ValueError, OSError):
        return None
    return None if tokenizer is None else decode_with(tokenizer)


def job_vocabulary(config: Mapping[str, Any]) -> Vocabulary | None:
    """Return the bytes of each token of a job's model; None without a tokenizer."""
    from batchgen.engine.constraint.vocabulary import Vocabulary
    from batchgen.engine.interface.constraint_error import ConstraintError
    from batchgen.engine.loading.tokenizer import load_tokenizer

    path = _model_path(config)
    try:
        tokenizer = None if path is None else load_tokenizer(path)
        return None if tokenizer is None else Vocabulary(tokenizer, len(tokenizer), ())
    except (ValueError, OSError, ConstraintError):
        return None


def decode_with(tokenizer: Any) -> Decode:
    """Return a function that turns token ids into text with a tokenizer of transformers."""
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _model_path(config: Mapping[str, Any]) -> Path | None:
    """Return the folder or file of a job's model on this machine; None if there is none."""
    model = config.get("model") or {}
    try:
        return _local(str(model.get("path")), model.get("revision"))
    except ConfigError:
        return None


def _local(name: str, revision: str | None) -> Path | None:
    """Return the folder or file of the model with this path or hub name; None if there is none.

    Raises:
        ConfigError: a package is not installed, or the name cannot be a path.
    """
    from batchgen.inputs.model.model_source import resolve_model

    if name.startswith(PACKAGE_SCHEME) or user_path(name, "model.path").exists():
        return resolve_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    # OWNER/REPO/FILE names one file of a repository.
    repo, file = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    try:
        folder = snapshot_download(
            repo, revision=revision, local_files_only=True, allow_patterns=["tokenizer*", file]
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    path = Path(folder, file)
    return path if path.exists() else None
