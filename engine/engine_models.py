"""Collects the models that a strategy runs (the target, and others such as a draft model) and
checks that they fit together.

`EngineParts` calls this module when an engine starts. `engine_estimate.py` calls it to forecast an
engine's memory before any weight is loaded.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import StateSpec
from batchgen.engine.caches.model_caches import row_bytes
from batchgen.engine.device.host_limits import available_memory
from batchgen.engine.interface.engine_config import (
    EngineConfig,
    ResolvedConfig,
    Sizes,
    folded_at_once,
)
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.layers.linear import Linear, RowParallelLinear
from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.memory.memory_plan import CPU_SHARE
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.parallel.tensor_parallel import summed
from batchgen.engine.strategy import TARGET, Head, Strategy
from batchgen.kernels.library import Product, first_unsteady

_ACTIVATIONS = 3 * 2**30
"""The bytes that the activations of a step take, besides weights and caches: a guess, used before
they can be measured."""


def planned_uses(
    target: CausalLM,
    others: Mapping[str, CausalLM],
    strategy: Strategy,
    config: EngineConfig,
    context_columns: abc.Sequence[str],
) -> tuple[dict[str, ModelUse], ResolvedConfig]:
    """Return the models of an engine by name, each with how the engine runs it, and the engine's
    settings with all defaults filled in.

    Only shapes are read, so the models may be on the meta device.

    Args:
        others: the models besides the target, as for `model_uses`.
        context_columns: the names of the columns of context scope to compute. These have a value
            for every token that the model reads, such as hidden states.

    Raises:
        ValueError: the model or the device does not allow the configuration, the model has no
            column of such a name, or one of `others` does not fit the target.
    """
    longest = config.model_len(target.config.max_position_embeddings)
    max_model_len = strategy.model_len(longest, target.config)
    columns = chosen_columns(target, context_columns)
    sizes = sizes_of(target, strategy, config)
    resolved = config.resolve(target.device, sizes, max_model_len)
    return model_uses(target, others, strategy, columns, max_model_len), resolved


def model_uses(
    target: CausalLM,
    others: Mapping[str, CausalLM],
    strategy: Strategy,
    columns: tuple[OutputColumn, ...],
    max_model_len: int,
) -> dict[str, ModelUse]:
    """Return all models of the strategy by name, each with how the engine runs it.

    Args:
        others: the models that have checkpoints of their own, by name. Their weights are packed in
            place.
        columns: the target's columns of context scope to compute.
        max_model_len: the most tokens that a row can have.

    Raises:
        ValueError: a model is missing, the strategy does not use a model of `others`, or a model
            does not fit the target.
    """
    uses: dict[str, ModelUse] = {}
    for name, role in strategy.models.items():
        model: TokenModel = target
        if isinstance(role.source, Head):
            if role.source.name not in target.heads:
                raise ValueError(
                    f"strategy {strategy.name} needs the model's head {role.source.name!r}, which "
                    "was not loaded"
                )
            model = target.heads[role.source.name]
        elif role.source is not None:
            if name not in others:
                raise ValueError(f"strategy {strategy.name} needs a {name} model: none was given")
            model = others[name]
            model.pack()
            _check_compatible(name, others[name], target, max_model_len)
        target_columns = columns if model is target else ()
        all_hidden = strategy.needs_hidden and model is target
        uses[name] = ModelUse(model, role.widths, role.forward_rows, target_columns, all_hidden)
    if unused := [name for name in others if name not in uses]:
        raise ValueError(f"strategy {strategy.name} has no use for a {unused[0]} model")
    return uses


def _check_compatible(name: str, model: CausalLM, target: CausalLM, max_model_len: int) -> None:
    """Raise ValueError if a draft model cannot be run together with the target."""
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"the {name} model's vocabulary has {model.vocab_size} ids and the model's has "
            f"{target.vocab_size}: choose a {name} model with the same tokenizer"
        )
    longest = model.config.max_position_embeddings
    if longest < max_model_len:
        raise ValueError(
            f"the {name} model has positions for {longest} tokens and rows may get "
            f"{max_model_len}: lower max_model_len or choose another {name} model"
        )
    # None: the model's angles do not depend on the length of the row.
    borders = model.config.rope_border, target.config.rope_border
    if borders[0] != borders[1] and min(filter(None, borders)) < max_model_len:
        raise ValueError(
            f"rows of more than {min(filter(None, borders)):,} tokens are rotated by other "
            f"angles (LongRoPE) in the model or in the {name} model, but not in both: lower "
            f"max_model_len to that, or choose another {name} model"
        )
    if model.window is not None and model.window < max_model_len:
        raise ValueError(
            f"the {name} model has layers that see only the last {model.window} tokens, which it "
            f"cannot read again after steps without drafts, and rows may have {max_model_len}: "
            f"lower max_model_len to {model.window} or choose another {name} model"
        )
    if model.has_row_states:
        raise ValueError(
            f"the {name} model has recurrent layers, whose state cannot follow drafts that are "
            f"rejected: choose a {name} model with attention only"
        )


@torch.inference_mode()
def check_products(model: CausalLM) -> None:
    """Check that every linear layer computes a row to the same bits in any batch. Raises ValueError
    if one does not."""
    products = [product for module in model.modules() for product in _products(module)]
    distinct = {product.name: product for product in products}.values()
    if (unsteady := first_unsteady(distinct, model.device)) is not None:
        raise ValueError(
            "deterministic is true, and the GPU's library computes a row differently in a batch "
            f"than alone ({unsteady}): make the engine before anything else computes on the GPU "
            "in this process, or set deterministic to false"
        )


def _products(layer: nn.Module) -> Iterator[Product]:
    """Yield the matrix products that a layer computes.

    A linear layer has one for the plain product. A row-parallel layer has another one for the
    product that is added to a residual, unless its weight is divided among ranks: then the ranks'
    partial sums are added in rank order, row by row, which no batch can change.
    """
    if isinstance(layer, KVExpansion):
        size = layer.weight.shape[2]
        yield Product(f"an expansion of latents of {size} values", size, layer.expand)
    if not isinstance(layer, Linear):
        return
    width, depth = layer.out_features, layer.in_features
    biased = "" if layer.bias is None else " and a bias"
    packed = layer.in_four_bits
    format_name = layer.weight.dtype if packed is None else packed.layout.code
    name = f"a product with a weight of {width}×{depth}{biased} in {format_name}"
    yield Product(name, depth, layer)
    if isinstance(layer, RowParallelLinear) and not layer.is_divided:
        ones = torch.ones((1, width), dtype=torch.bfloat16, device=layer.weight.device)

        def added(x: Tensor) -> Tensor:
            return summed(layer.add_to(ones.repeat(len(x), 1), x))

        yield Product(f"{name}, added to a residual", depth, added)


def chosen_columns(model: CausalLM, names: abc.Sequence[str]) -> tuple[OutputColumn, ...]:
    """Return the model's columns of context scope that have these names. Raises ValueError if the
    model has no column of one of them."""
    known = {column.name: column for column in model.declared_columns(model.config)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"{model.config.architecture} has no context column {name!r}; it has "
                f"{', '.join(known) or 'none'}"
            )
    return tuple(known[name] for name in names)


def chunk_multiple(model: CausalLM) -> int:
    """Return the number of tokens that the length of every prefill chunk but a row's last must be a
    multiple of.

    It is the least common multiple of what the model's recurrent layers require; 1 for a model
    without recurrent layers.
    """
    specs = model.cache_specs
    return int(np.lcm.reduce([1, *(s.chunk_multiple for s in specs if isinstance(s, StateSpec))]))


def sizes_of(target: CausalLM, strategy: Strategy, config: EngineConfig) -> Sizes:
    """Return the sizes that the defaults of the engine's settings are computed from."""
    device = target.device
    weights, width = target.weight_bytes, max(strategy.models[TARGET].widths)
    memory, room = 0, int(available_memory() * CPU_SHARE)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        room = int(memory * config.gpu_memory_utilization) - weights - _ACTIVATIONS
    specs, parallel = target.cache_specs, target.parallel
    # All ranks take the smallest memory among them, so that they choose the same defaults.
    return Sizes(
        weights=weights,
        weights_per_token=target.weight_bytes_per_token,
        memory=parallel.least(memory),
        width=width,
        row_states=row_bytes(specs, width, folded_at_once(device)),
        cache_room=parallel.least(max(room, 0)),
    )
