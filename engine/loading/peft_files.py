"""Reads adapters that PEFT has written: adapter_config.json, and safetensors beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from batchgen.engine.layers.lora import Factors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_PLAIN = re.compile(r"\^?[A-Za-z_][\w.]*")
_UNUSED = (
    *("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "layer_replication"),
    *("lora_bias", "megatron_config", "trainable_token_indices", "use_bdlora", "use_qalora"),
    *("velora_config", "monteclora_config"),
)
"""Keys of PEFT that change what an adapter computes, and which must be off."""
_FOLDED = ("modules_to_save", "target_parameters", "use_dora")
"""Keys of PEFT for what is added to weights alone, and never computed beside them."""
FOLD_IT = (
    "add the adapter to the weights with lora_fold=true, which takes it as the only one, or merge "
    "it into the model with PEFT's merge_and_unload"
)
"""What to do with an adapter that does not stand beside the weights."""
_SAME_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights after which the base model's weights are what they were."""


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says, of what decides what an adapter computes."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    target_modules: tuple[str, ...] = ()  # names that modules end with; empty if it is a pattern
    layers: tuple[int, ...] | None = None  # the layers that have the modules; None: all
    base: str | None = None  # the model that it was trained on, by its name
    parameters: tuple[str, ...] = ()  # weights of all experts in one tensor, by their last names
    saved: tuple[str, ...] = ()  # modules whose weights were trained as a whole
    bias: str = "none"  # which biases were trained
    dora: bool = False  # whether rows of weights have norms of their own

    def rank_of(self, module: str) -> int:
        """The rank at the module of this name."""
        rank: int = _by_pattern(self.rank_pattern, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """What B·A is multiplied by at the module of this name."""
        alpha: float = _by_pattern(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class AdapterFile:
    """An adapter whose tensors are not read yet.

    Attributes:
        shapes: of the tensors, by the names that the file has for them.
    """

    folder: Path
    config: AdapterConfig
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_parameters(self) -> int:
        """The numbers in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def highest_rank(self) -> int:
        """The highest rank of its factors, which stand beside the weights."""
        return max(self.shapes[down][0] for down, _ in self.modules().values())

    def modules(self) -> dict[str, tuple[str, str]]:
        """Return the names of A and B in the file by the name of the module of the base model that
        they stand beside. Raises ValueError if one of the two is missing, or a tensor is neither.
        """
        found: dict[str, dict[str, str]] = {}
        for name in self.shapes:
            match = _FACTOR.fullmatch(name)
            if match is None:
                raise ValueError(f"{self.folder}: tensor {name} {_what_it_is(name)}")
            found.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = name
        return {module: self.both(module, factors) for module, factors in found.items()}

    def both(self, module: str, factors: Mapping[str, str]) -> tuple[str, str]:
        """Return the names of A and B of a module. Raises ValueError if one is missing."""
        for one, other in ("AB", "BA"):
            if one not in factors:
                lack = factors[other].replace(f"_{other}", f"_{one}")
                raise ValueError(
                    f"{self.folder} is damaged: tensor {lack} is missing, and there is "
                    f"{factors[other]} for {module}"
                )
        return factors["A"], factors["B"]

    def check_rank(self, rank: int, down: str, up: str) -> None:
        """Raise ValueError unless A and B have this rank."""
        for name, axis in ((down, 0), (up, 1)):
            shape = self.shapes[name]
            if len(shape) != 2 or shape[axis] != rank:
                expected = f"[{rank}, …]" if axis == 0 else f"[…, {rank}]"
                raise ValueError(
                    f"{self.folder}: tensor {name} has shape {list(shape)}, and {CONFIG} says that "
                    f"its rank is {rank}, which is {expected}"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors, by their names."""
        from safetensors.torch import load_file

        found: dict[str, Tensor] = load_file(self.folder / WEIGHTS)
        return found

    def read(self) -> dict[str, Factors]:
        """Read the tensors; returns what the adapter adds by the name of the module."""
        tensors = self.tensors()
        return {
            module: Factors(down, up, tensors[down], tensors[up], self.config.scale_of(module))
            for module, (down, up) in self.modules().items()
        }


def open_adapter(folder: Path, *, fold: bool = False) -> AdapterFile:
    """Read what an adapter is, and the names and shapes of its tensors; with `fold` also one that
    can be added to the weights alone.

    Raises ValueError if it is none, is damaged, or computes what is not supported; the message
    names the file and the key or the tensor.
    """
    from safetensors import SafetensorError, safe_open

    config = _read_config(folder / CONFIG, fold)
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(
            file.name for end in ("bin", "pt", "pth") for file in folder.glob(f"*.{end}")
        )
        why = (
            f"; {pickles[0]} is a pickle, which can run code: save it as safetensors"
            if pickles
            else ""
        )
        raise ValueError(f"{folder} has no {WEIGHTS}{why}")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as found:
            for name in found.keys():
                piece = found.get_slice(name)
                if piece.get_dtype() not in ("F16", "BF16", "F32", "F64"):
                    raise ValueError(
                        f"{path}: tensor {name} is in {piece.get_dtype()}, and factors are "
                        "floating-point numbers"
                    )
                shapes[name] = tuple(piece.get_shape())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from None
    if not shapes:
        raise ValueError(f"{path} has no tensors: the adapter adds nothing")
    adapter = AdapterFile(folder, config, shapes)
    if not fold:
        for module, (down, up) in adapter.modules().items():
            adapter.check_rank(config.rank_of(module), down, up)
    return adapter


def _read_config(path: Path, fold: bool) -> AdapterConfig:
    if not path.is_file():
        raise ValueError(f"{path.parent} is no adapter: it has no {CONFIG}, as PEFT writes it")
    try:
        given = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    _refuse_unsupported(path, given, fold)
    layers, targets = given.get("layers_to_transform"), given.get("target_modules")
    if isinstance(layers, int):
        layers = [layers]
    base = given.get("base_model_name_or_path")
    return AdapterConfig(
        rank=_number(path, given, "r", whole=True),
        alpha=_number(path, given, "lora_alpha"),
        rank_pattern=_pattern(path, given, "rank_pattern", whole=True),
        alpha_pattern=_pattern(path, given, "alpha_pattern"),
        rslora=given.get("use_rslora") is True,
        target_modules=_texts(targets),
        layers=tuple(layers) if isinstance(layers, list) else None,
        base=base if isinstance(base, str) and base else None,
        parameters=_texts(given.get("target_parameters")),
        saved=_texts(given.get("modules_to_save")),
        bias=str(given.get("bias", "none")),
        dora=given.get("use_dora") is True,
    )


def _texts(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else []
    return tuple(name for name in names if isinstance(name, str))


def _refuse_unsupported(path: Path, values: Mapping[str, Any], fold: bool) -> None:
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


def _number(path: Path, values: Mapping[str, Any], key: str, *, whole: bool = False) -> Any:
    value = values.get(key)
    return _checked(path, key, value, whole)


def _checked(path: Path, key: str, value: Any, whole: bool) -> Any:
    kind = "a whole number from 1 on" if whole else "a finite number"
    is_number = isinstance(value, int) if whole else isinstance(value, int | float)
    if (
        not is_number
        or isinstance(value, bool)
        or not math.isfinite(value)
        or (whole and value < 1)
    ):
        raise ValueError(f"{path}: {key} must be {kind}, got {str(value)[:100]}")
    return value


def _pattern(
    path: Path, values: Mapping[str, Any], key: str, *, whole: bool = False
) -> dict[str, Any]:
    """Read a mapping of module names. PEFT takes them for regular expressions; those of strangers
    could take any time, so they must be plain."""
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {key} must be an object, got {str(found)[:100]}")
    plain = {}
    for name, value in found.items():
        text = name.replace("\\.", ".").removesuffix("$")
        if _PLAIN.fullmatch(text) is None:
            raise ValueError(
                f"{path}: {key} has the pattern {name[:100]!r}; only names of modules are supported"
            )
        plain[text] = _checked(path, f"{key}[{name[:100]!r}]", value, whole)
    return plain


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first name that the module is or ends with, as PEFT finds it."""
    for name, value in pattern.items():
        whole = name.removeprefix("^")
        if module == whole or (whole == name and module.endswith(f".{name}")):
            return value
    return default


def _what_it_is(name: str) -> str:
    if "lora_embedding" in name:
        return f"adapts an embedding, which is not computed beside the weights: {FOLD_IT}"
    if "lora_magnitude_vector" in name:
        return f"is of DoRA, which is not computed beside the weights: {FOLD_IT}"
    return "is none of a low-rank adapter (….lora_A.weight, ….lora_B.weight)"
