"""Reads from a sentence-transformers checkpoint how an embedding is made of hidden states.

Such a checkpoint lists modules in modules.json: the Transformer, then Pooling, which makes one
vector of the hidden states of all tokens, then perhaps Normalize, which scales it to length 1. The
way of pooling is in the folder of the module Pooling::

    modules.json           [{"type": "sentence_transformers.models.Transformer", "path": ""},
                            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    1_Pooling/config.json  {"pooling_mode": "mean"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.engine.interface.hidden_columns import Pooling
from batchgen.util.shorten import some_names

MODULES = "modules.json"
"""The file that lists the modules; it exists only in embedding models."""
_KINDS = ("Transformer", "Pooling", "Normalize")
"""The supported modules, in the only supported order."""
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""The ways of pooling that are supported: their names in checkpoints and here."""
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
"""Older files have a Boolean flag for each way of pooling, in place of `pooling_mode`."""


def pooling_file(path: Path) -> str | None:
    """Return the path, in a model's folder, of the file that says how it pools; None if
    modules.json lists no Pooling.

    Raises:
        ValueError: modules.json is damaged, or names a path outside the model's folder.
    """
    for kind, folder in _modules(path):
        if kind == "Pooling":
            if re.fullmatch(r"\w[\w.-]*", folder) is None:
                raise ValueError(
                    f"{path / MODULES}: path is {folder[:60]!r}, and must name a folder next to it"
                )
            return f"{folder}/config.json"
    return None


def check_modules(path: Path) -> None:
    """Raise ValueError if a model's folder lists modules that are not supported."""
    kinds = [kind for kind, _ in _modules(path)]
    if kinds != [*_KINDS[: len(kinds)]]:
        raise ValueError(
            f"{path / MODULES} lists the modules {some_names(kinds)}, and "
            f"batchgen supports only {', '.join(_KINDS)}, in this order: set output.pooling and "
            "output.normalise both to write hidden states without the others"
        )


def normalises(path: Path) -> bool | None:
    """Return whether a model's folder lists Normalize; None if it lists no Pooling, so that it does
    not say how embeddings are made."""
    kinds = [kind for kind, _ in _modules(path)]
    return "Normalize" in kinds if "Pooling" in kinds else None


def checkpoint_pooling(path: Path) -> Pooling | None:
    """Return the way of pooling that a model's folder states; None if it states none.

    Raises:
        ValueError: the way is not supported, or a file is damaged or missing.
    """
    name = pooling_file(path)
    if name is None:
        return None
    file = path / name
    instead = "set output.pooling to last, mean or cls"
    if not file.is_file():
        raise ValueError(
            f"{file} is missing, which says how the model pools: fetch it, or {instead}"
        )
    from batchgen.engine.loading.safetensors_files import read_json  # it loads torch

    values = read_json(file)
    modes = values.get("pooling_mode")
    if modes is None:
        # "mean" is the default of sentence-transformers.
        modes = [mode for flag, mode in _FLAGS.items() if values.get(flag)] or ["mean"]
    names = modes if isinstance(modes, list) else [modes]
    pooling = _POOLINGS.get(str(names[0])) if len(names) == 1 else None
    if pooling is None:
        texts = some_names([str(name)[:60] for name in names]) or "nothing"
        raise ValueError(
            f"{file} pools by {texts}, but batchgen supports only one of {', '.join(_POOLINGS)}: "
            f"{instead}"
        )
    if values.get("include_prompt") is False:
        raise ValueError(
            f"{file} has include_prompt=false, which leaves out the tokens of an instruction, and "
            f"rows do not say which these are: {instead} to pool all tokens"
        )
    return pooling


def _modules(path: Path) -> Sequence[tuple[str, str]]:
    """Return the kind (the name of its class) and the path of each module; empty without
    modules.json.

    Raises:
        ValueError: the file is damaged.
    """
    file = path / MODULES
    if not file.is_file():
        return ()
    try:
        entries: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    modules = []
    for entry in entries if isinstance(entries, list) else [entries]:
        kind, folder = (
            entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path")
        )
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise ValueError(f"{file} must hold a list of modules, each with a type and a path")
        modules.append((kind.rpartition(".")[2][:60], folder))
    return modules
