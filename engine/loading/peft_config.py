"""Reads adapter_config.json, in which PEFT describes an adapter. `open_adapter` (`peft_files.py`)
calls `read_adapter_config`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
_PLAIN = re.compile(r"\^?[A-Za-z_][\w.]*")
_UNUSED = (
    *("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "layer_replication"),
    *("lora_bias", "megatron_config", "trainable_token_indices", "use_bdlora", "use_qalora"),
    *("velora_config", "monteclora_config"),
)
"""PEFT's keys that change what an adapter computes and are not supported; they must be off."""
_PARTIAL = ("layers_to_transform", "exclude_modules")
"""PEFT's keys that exclude some of `target_modules`."""
_FOLDED = ("use_dora",)
"""PEFT's keys that are supported only if the adapter is folded into the weights."""
FOLD_IT = (
    "add the adapter to the weights with lora_fold=true, which takes it as the only one, or merge "
    "it into the model with PEFT's merge_and_unload"
)
"""What a user can do with an adapter that is supported only if it is folded."""
_MOST_BYTES = 16 * 2**20
"""The size from which an adapter_config.json is refused; usual ones have a kilobyte."""
_SAME_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of init_lora_weights that leave the base model's weights unchanged."""


@dataclass(frozen=True)
class AdapterConfig:
    """The values of adapter_config.json that determine what an adapter computes."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    target_modules: tuple[str, ...] = ()  # suffixes of module names; empty if it is a pattern
    is_partial: bool = False  # whether some modules in target_modules are excluded
    base: str | None = None  # the name of the model that the adapter was trained on
    parameters: tuple[str, ...] = ()  # weights of all experts in one tensor, by their last names
    saved: tuple[str, ...] = ()  # modules whose weights were trained as a whole
    bias: str = "none"  # which biases were trained
    dora: bool = False  # whether rows of weights have separate norms (DoRA)

    def rank_of(self, module: str) -> int:
        """Return the rank of the factors of a module."""
        rank: int = _by_pattern(self.rank_pattern, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """Return the factor of B·A of a module."""
        alpha: float = _by_pattern(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return float(alpha / (math.sqrt(rank) if self.rslora else rank))


def read_adapter_config(path: Path, fold: bool) -> AdapterConfig:
    """Read an adapter_config.json. With `fold`, adapters are accepted that are supported only if
    they are folded into the weights. Raises ValueError, naming the file and the key, if there is
    none, if it is damaged, or if the adapter is not supported."""
    if not path.is_file():
        raise ValueError(f"{path.parent} is not an adapter: it has no {CONFIG}, as PEFT writes it")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is damaged: it is larger than any configuration")
    values = read_adapter_json(path)
    _refuse_unsupported(path, values, fold)
    base = values.get("base_model_name_or_path")
    return AdapterConfig(
        rank=_number(path, values, "r", whole=True),
        alpha=_number(path, values, "lora_alpha"),
        rank_pattern=_pattern(path, values, "rank_pattern", whole=True),
        alpha_pattern=_pattern(path, values, "alpha_pattern"),
        rslora=values.get("use_rslora") is True,
        target_modules=_texts(values.get("target_modules")),
        is_partial=any(values.get(key) is not None for key in _PARTIAL),
        base=base if isinstance(base, str) and base else None,
        parameters=_texts(values.get("target_parameters")),
        saved=_texts(values.get("modules_to_save")),
        bias=str(values.get("bias", "none")),
        dora=values.get("use_dora") is True,
    )


def read_adapter_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of an adapter. Raises ValueError if it is damaged or does not hold an
    object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return content


def _texts(value: Any) -> tuple[str, ...]:
    """Return the strings of a list; nothing for another value, such as a pattern."""
    names = value if isinstance(value, list) else []
    return tuple(name for name in names if isinstance(name, str))


def _refuse_unsupported(path: Path, values: Mapping[str, Any], fold: bool) -> None:
    """Raise ValueError for a key that changes what the adapter computes and is not supported."""
    if (kind := values.get("peft_type")) != "LORA":
        raise ValueError(f"{path}: peft_type is {kind!r}, and only LORA adapters are supported")
    if not fold and values.get("bias", "none") != "none":
        raise ValueError(
            f"{path}: bias is {values['bias']!r}, so it changes biases of the base model: {FOLD_IT}"
        )
    if values.get("fan_in_fan_out"):
        raise ValueError(f"{path}: fan_in_fan_out is true, which no model of batchgen has")
    for key in () if fold else _FOLDED:
        if values.get(key):
            raise ValueError(
                f"{path}: {key} is {str(values[key])[:100]}, which is not computed beside the "
                f"weights: {FOLD_IT}"
            )
    if (start := values.get("init_lora_weights", True)) not in _SAME_BASE:
        raise ValueError(
            f"{path}: init_lora_weights is {start!r}, which changes the base model's weights: save "
            "the adapter with PEFT's path_initial_model_for_weight_conversion, or merge it"
        )
    for key in _UNUSED:
        if values.get(key):
            raise ValueError(
                f"{path}: {key} is {str(values[key])[:100]}, which is not supported: merge the "
                "adapter into the model with PEFT's merge_and_unload"
            )


_MOST = 1e18
_LEAST = {True: 1, False: -_MOST}
"""The smallest value of a key, by whether it must be a whole number."""


def _number(path: Path, values: Mapping[str, Any], key: str, *, whole: bool = False) -> Any:
    value = values.get(key)
    return _checked(path, key, value, whole)


def _checked(path: Path, key: str, value: Any, whole: bool) -> Any:
    """Return the value of a key if it is a number in range, or a whole number from 1 on with
    `whole`; else raise ValueError."""
    kind = "a whole number from 1 on" if whole else "a finite number, at most 1e18"
    is_number = isinstance(value, int if whole else int | float)
    if not is_number or isinstance(value, bool) or not _LEAST[whole] <= value <= _MOST:
        raise ValueError(f"{path}: {key} must be {kind}, got {str(value)[:100]}")
    return value


def _pattern(
    path: Path, values: Mapping[str, Any], key: str, *, whole: bool = False
) -> dict[str, Any]:
    """Read a mapping from module names to values. PEFT regards the names as regular expressions;
    here only plain names are accepted, because a stranger's expression could take unlimited
    time."""
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{path}: {key} must be an object, got {str(pattern)[:100]}")
    plain = {}
    for name, value in pattern.items():
        text = name.replace("\\.", ".").removesuffix("$")
        if _PLAIN.fullmatch(text) is None:
            raise ValueError(
                f"{path}: {key} has the pattern {name[:100]!r}; only names of modules are supported"
            )
        plain[text] = _checked(path, f"{key}[{name[:100]!r}]", value, whole)
    return plain


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first name that equals the module's name or its end, as PEFT does;
    else the default."""
    for name, value in pattern.items():
        plain = name.removeprefix("^")
        if module == plain or (plain == name and module.endswith(f".{name}")):
            return value
    return default
