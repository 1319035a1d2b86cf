"""Finds which factors in an adapter's file belong to which weight of a checkpoint, and reads them.

A LoRA adapter changes a weight W to W + B·A; A and B are its *factors*. PEFT keeps the factors of a
weight of all experts in two tensors for all experts, which are split here. `adapters.py` and
`folding.py` use this module.

A *stem* is a module's name in the adapter's file, such as `model.layers.0.self_attn.q_proj`; its
factors have that name with `.lora_A.weight` and `.lora_B.weight`. If PEFT adapts several weights of
one module, the stem contains `NESTED` once or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.weight_slot import named_parts
from batchgen.engine.loading.peft_files import NESTED, AdapterFile
from batchgen.engine.lora.lora_targets import Factors
from batchgen.engine.models.causal_lm import CausalLM, full_name

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """The factors of a weight of all E experts: A [E · R, in] and B [out, R · E], in whose columns
    the experts alternate (PEFT, tuners/lora/layer.py, ParamWrapper)."""

    name: str  # the name of the weight
    experts: int  # E
    rank: int  # R, the rank of one expert's factors
    scale: float
    exchanged: bool  # whether A and B are swapped and transposed, as in older versions of PEFT

    def down(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A of each expert, [E, R, in]."""
        if self.exchanged:
            return _in_turns(b, self.experts).transpose(1, 2)
        return a.view(self.experts, self.rank, -1)

    def up(self, a: Tensor, b: Tensor) -> Tensor:
        """Return B of each expert, [E, out, R]."""
        if self.exchanged:
            return a.view(self.experts, self.rank, -1).transpose(1, 2)
        return _in_turns(b, self.experts)


def _in_turns(columns: Tensor, experts: int) -> Tensor:
    """Return columns [N, R · E], in which experts alternate, as [E, N, R]."""
    return columns.view(len(columns), -1, experts).permute(2, 0, 1)


def expert_parameter(
    adapter: AdapterFile, experts: Experts, stem: str, path: str, tensors: tuple[str, str]
) -> ExpertParameter:
    """Return which weight the tensors A and B of an adapter are factors of, for the experts at
    `path`. Raises ValueError if the configuration does not list such a weight, or ranks differ.

    Args:
        path: the name of the experts in the model.
        tensors: the names of A and B in the file.
    """
    config, (down, up) = adapter.config, tensors
    # PEFT wraps the weights of a module one after another, the first one innermost.
    wanted = [
        name
        for name in experts.names
        if any(f".{path}.{name}".endswith(f".{each}") for each in config.parameters)
    ]
    depth = stem.count(NESTED)
    if depth >= len(wanted):
        raise ValueError(
            f"{adapter.folder} is damaged: tensor {down} adapts a weight of all experts, and "
            f"target_parameters has {', '.join(config.parameters) or 'none'}"
        )
    if experts.variant.transposed:
        raise ValueError(
            f"{adapter.folder}: tensor {down} adapts a weight of all experts whose axes are the "
            "other way round, which is not supported: merge the adapter into the model with "
            "PEFT's merge_and_unload"
        )
    name = wanted[len(wanted) - 1 - depth]
    count, out, width = experts.sizes(name)
    rank, scale = config.rank_of(f"{path}.{name}"), config.scale_of(f"{path}.{name}")
    adapter.check_rank(rank * count, down, up)
    # Older versions of PEFT assumed the axes of gpt-oss for all weights. If both sizes are equal,
    # the newer form is assumed.
    sides = adapter.shapes[up][0], adapter.shapes[down][1]
    exchanged = not experts.variant.interleaved and sides == (width, out) and out != width
    return ExpertParameter(name, count, rank, scale, exchanged)


@dataclass(frozen=True, slots=True)
class FactorPair:
    """The tensors A and B in an adapter's file that belong to one weight of a checkpoint."""

    module: str  # the module's name in the file
    down_name: str  # the name of A in the file
    up_name: str  # the name of B in the file
    rank: int
    scale: float
    parameter: ExpertParameter | None = None  # if A and B are for all experts
    expert: int = 0  # with `parameter`: the expert of this weight
    in_turns: bool = False  # whether the rows of two projections alternate in B

    def sizes(self, adapter: AdapterFile) -> tuple[int, int]:
        """Return the input and output features that the shapes of A and B imply."""
        shapes = adapter.shapes
        depth, width = shapes[self.down_name][1], shapes[self.up_name][0]
        exchanged = self.parameter is not None and self.parameter.exchanged
        return (width, depth) if exchanged else (depth, width)

    def read(self, tensors: Mapping[str, Tensor]) -> Factors:
        """Return the factors as views of the file's tensors."""
        a, b = tensors[self.down_name], tensors[self.up_name]
        if (of := self.parameter) is not None:
            a, b = of.down(a, b)[self.expert], of.up(a, b)[self.expert]
        if self.in_turns:
            b = torch.cat((b[::2], b[1::2]))
        return Factors(a, b, self.scale)


def factor_pairs(adapter: AdapterFile, model: CausalLM) -> dict[str, FactorPair]:
    """Return an adapter's factors by the model's names of the weights; the model may lack some of
    these weights. Raises ValueError if a tensor is not a factor, or its rank differs from the
    configuration."""
    experts = experts_of(model)
    by_module: dict[str, FactorPair] = {}
    for stem, (down, up) in adapter.modules().items():
        path = piece_name(stem.replace(NESTED, ""), model)
        pairs = [(path, _plain_pair(adapter, stem, down, up))]
        if (part := experts.get(path)) is not None:
            pairs = list(_of_experts(adapter, part, stem, path, (down, up)))
        for name, pair in pairs:
            if (other := by_module.get(name)) is not None:
                raise ValueError(
                    f"{adapter.folder} is damaged: tensors {other.down_name} and {down} adapt the "
                    f"same weight, {name}"
                )
            by_module[name] = pair
    return by_module


def _plain_pair(adapter: AdapterFile, stem: str, down: str, up: str) -> FactorPair:
    config, module = adapter.config, stem.replace(NESTED, "")
    return FactorPair(module, down, up, config.rank_of(module), config.scale_of(module))


def _of_experts(
    adapter: AdapterFile, experts: Experts, stem: str, path: str, tensors: tuple[str, str]
) -> Iterator[tuple[str, FactorPair]]:
    """Yield the factors of each expert under the names of `Experts.lora_sites`."""
    of = expert_parameter(adapter, experts, stem, path, tensors)
    in_turns = experts.variant.interleaved and of.name == experts.names[0]
    for expert in range(of.experts):
        pair = FactorPair(
            stem.replace(NESTED, ""), *tensors, of.rank, of.scale, of, expert, in_turns
        )
        yield f"{path}.{expert}.{of.name}", pair


def experts_of(model: CausalLM) -> dict[str, Experts]:
    """Return the experts of a model's decoder by their names in checkpoints."""
    parts = named_parts(model.model, "model")
    return {path: part for path, part in parts if isinstance(part, Experts)}


def piece_name(module: str, model: CausalLM) -> str:
    """Return the model's name of a checkpoint's module."""
    name = model.piece_name(full_name(module + _WEIGHT), model.config)
    return name.removesuffix(_WEIGHT)
