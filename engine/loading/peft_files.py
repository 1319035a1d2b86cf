"""Reads adapters that PEFT has written: a folder with safetensors and adapter_config.json.
`open_adapter` returns an `AdapterFile`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from batchgen.engine.loading.peft_config import (
    CONFIG,
    FOLD_IT,
    AdapterConfig,
    read_adapter_config,
)

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the base model's names of modules."""
NESTED = ".base_layer"
"""What PEFT appends to the name of a wrapped module, for the tensors of the module itself."""
_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
"""The name of a factor; its groups are the module, and A or B."""
_COPY = re.compile(r"(.+)\.base_layer\.weight")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter whose tensors have not been read yet.

    Attributes:
        shapes: the shapes of the tensors, by their names in the file.
    """

    folder: Path
    config: AdapterConfig
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_parameters(self) -> int:
        """The number of values in all tensors that do not repeat the base model's."""
        copies = self.copies().values()
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in copies)

    def modules(self) -> dict[str, tuple[str, str]]:
        """Return the names of A and B in the file, by the name of the base model's module. Raises
        ValueError if one of the two is missing, or a tensor is neither a factor nor one of `copies`
        and `saved`."""
        modules: dict[str, dict[str, str]] = {}
        others = {*self.copies().values(), *self.saved().values()}
        for name in self.shapes:
            match = _FACTOR.fullmatch(name)
            if match is not None:
                modules.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = name
            elif name not in others:
                raise ValueError(f"{self.folder}: tensor {name} {_what_it_is(name)}")
        return {module: self.both(module, factors) for module, factors in modules.items()}

    def copies(self) -> dict[str, str]:
        """Return the tensors that repeat weights of the base model, by the module's name. PEFT
        saves the embedding and lm_head in addition to their factors."""
        copies: dict[str, str] = {}
        for name in self.shapes:
            match = _COPY.fullmatch(name)
            if match is not None and any(
                factor is not None and factor[1] == match[1]
                for factor in map(_FACTOR.fullmatch, self.shapes)
            ):
                copies[match[1].removeprefix(PREFIX)] = name
        return copies

    def saved(self) -> dict[str, str]:
        """Return the names of the weights that were trained as a whole, by the module's name."""
        weights = {}
        for name in self.shapes:
            module, _, kind = name.removeprefix(PREFIX).rpartition(".")
            if kind == "weight" and any(f".{module}".endswith(f".{o}") for o in self.config.saved):
                weights[module] = name
        return weights

    def both(self, module: str, factors: Mapping[str, str]) -> tuple[str, str]:
        """Return the names of A and B of a module. Raises ValueError if one is missing."""
        for factor, other in (("A", "B"), ("B", "A")):
            if factor not in factors:
                lack = factors[other].replace(f"_{other}", f"_{factor}")
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

    def check_values(self) -> None:
        """Read all tensors. Raises ValueError if a tensor has values that are not finite, or that
        are not finite in float32 after scaling."""
        for name, values in self.tensors().items():
            if not values.isfinite().all():
                raise ValueError(
                    f"{self.folder}: tensor {name} has NaN or infinity: the training has diverged "
                    "or the file is damaged; take an earlier checkpoint of the adapter"
                )
            if (factor := _FACTOR.fullmatch(name)) is None or factor[2] == "A":
                continue
            module = factor[1].removeprefix(PREFIX)
            scale = self.config.scale_of(module)
            if not (values.float() * scale).isfinite().all():
                raise ValueError(
                    f"{self.folder}: tensor {name} times {scale:g} is more than float32 holds: "
                    f"{CONFIG} says lora_alpha or alpha_pattern wrong"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors. Returns them by name."""
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(self.folder / WEIGHTS)
        return tensors


def open_adapter(folder: Path, *, fold: bool = False) -> AdapterFile:
    """Read an adapter's configuration, and the names and shapes of its tensors.

    Args:
        fold: whether to accept adapters that are supported only if they are folded into the
            weights.

    Raises:
        ValueError: the folder is not an adapter, or the adapter is damaged or not supported. The
            message names the file, and the key or the tensor.
    """
    from safetensors import SafetensorError, safe_open

    config = read_adapter_config(folder / CONFIG, fold)
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
        with safe_open(path, framework="pt", device="cpu") as opened:
            for name in opened.keys():
                piece = opened.get_slice(name)
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
        adapter.modules()  # raises ValueError for tensors that are not factors
    return adapter


def _what_it_is(name: str) -> str:
    """Say, as the end of a message, why a tensor of this name is not supported."""
    if "lora_magnitude_vector" in name:
        return f"is of DoRA, which is not computed beside the weights: {FOLD_IT}"
    return "is not part of a low-rank adapter (….lora_A.weight, ….lora_B.weight)"
