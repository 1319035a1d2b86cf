"""Decodes the tokens of a finished job with its model's tokenizer, if that is on this machine."""

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
    """A function from token ids to their text with special tokens; None without a tokenizer.

    Nothing is downloaded. A tokenizer.json is read without transformers, which takes seconds.
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
    """What the tokens of a job's model spell, in bytes; None without a tokenizer. Nothing is
    downloaded."""
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
    """The text of token ids, by a tokenizer of transformers."""
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _model_path(config: Mapping[str, Any]) -> Path | None:
    """Where the model of a job is on this machine; None if it is not there."""
    model = config.get("model") or {}
    try:
        return _local(str(model.get("path")), model.get("revision"))
    except ConfigError:
        return None


def _local(name: str, revision: str | None) -> Path | None:
    """The model's folder or file on this machine; None if it is not there.

    Raises:
        ConfigError: a package is not installed, or the name cannot be a path.
    """
    from batchgen.inputs.model.model_source import resolve_model

    if name.startswith(PACKAGE_SCHEME) or user_path(name, "model.path").exists():
        return resolve_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repo, file = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    try:
        folder = snapshot_download(
            repo, revision=revision, local_files_only=True, allow_patterns=["tokenizer*", file]
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    path = Path(folder, file)
    return path if path.exists() else None
