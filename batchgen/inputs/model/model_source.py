"""Finds the files of a model: in a folder, in an installed package, or on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from batchgen.inputs.model.embedder_files import MODULES, pooling_file
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME, find_in_package
from batchgen.util.paths import user_path

_WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
_OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that say how large images may be. They are not among `model_files`, which identify a
model: what matters of them is in the digests of the job's images."""


def resolve_model(path: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Find the folder or .gguf file of a model on this machine; a hub model is downloaded first.

    Args:
        path: a folder, a .gguf file, `package://PACKAGE/PATH` (one of these inside an installed
            Python package, which is not imported), a hub name `owner/name`, or a file of a hub
            model `owner/name/FILE.gguf`. A path that exists on this machine is not looked for on
            the hub.
        revision: the commit, branch or tag of a hub model; None is its main branch.
        weights: whether the weights of a hub model are downloaded as well.

    Raises:
        ConfigError: the model cannot be found or downloaded; the message says what to do.
    """
    local = user_path(path, "model.path")
    on_hub = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:/(.+\.gguf))?", path)
    if not path.startswith(PACKAGE_SCHEME) and not local.exists() and on_hub:
        return _from_hub(on_hub[1], on_hub[2], revision, weights)
    if revision is not None:
        raise ConfigError(f"model {path}: a revision ({revision}) needs a hub name, owner/name")
    if path.startswith(PACKAGE_SCHEME):
        local = find_in_package(path, "model")
    if not local.exists():
        raise ConfigError(
            f"model {path} does not exist; give a folder, a .gguf file or a hub name, owner/name"
        )
    if local.is_file() and local.suffix != ".gguf":
        raise ConfigError(f"model {path} is a file but not a .gguf file; give the model's folder")
    # Links are not resolved, because those in the hub's cache lead to files without a suffix.
    return local.absolute()


def model_files(path: Path) -> list[Path]:
    """The files that define a model and its tokenizer, sorted by name. `path` is what
    `resolve_model` returned."""
    if path.is_file():
        return [path]
    patterns = ("*.safetensors", *_WEIGHT_FILES, *_OTHER_FILES)
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})


def _from_hub(repo: str, file: str | None, revision: str | None, weights: bool) -> Path:
    """Download the missing files of a hub model, or one .gguf file of it."""
    model = f"model {repo}" + (f" at revision {revision}" if revision else "")
    try:
        if file is not None:
            return Path(hf_hub_download(repo, file, revision=revision))
        patterns = [
            *_OTHER_FILES,
            *_IMAGE_FILES,
            MODULES,
            *(_WEIGHT_FILES if weights else ()),
        ]
        # A pattern's * matches slashes too, and subfolders hold the weights in other formats.
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"
        )
        _fetch_pooling(repo, Path(folder))
    except GatedRepoError as error:
        raise ConfigError(
            f"{model} is gated: accept its terms on https://huggingface.co/{repo} and log in "
            "(hf auth login, or set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model}: the hub has the model but not this revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model} is neither a folder here nor on the hub (or it is private: run hf auth login)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{model} is not on this machine and the hub cannot be reached: check the network (and "
            "HF_HUB_OFFLINE), or give a local folder"
        ) from error
    except EntryNotFoundError as error:
        raise ConfigError(f"{model} has no file {file}") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"{model}: the hub answered with an error: {error}") from error
    return Path(folder)


def _fetch_pooling(repo: str, folder: Path) -> None:
    """Download the file that says how an embedder pools, at the commit of a folder in the hub's
    cache. If the hub has none, a job that needs it is refused later; other jobs run."""
    try:
        if (name := pooling_file(folder)) is not None:
            hf_hub_download(repo, name, revision=folder.name)
    except (EntryNotFoundError, ValueError):
        pass
