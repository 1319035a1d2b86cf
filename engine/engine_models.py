"""Collects the models that a strategy runs, the target and others such as a draft model, and checks
that they fit together. `EngineParts` calls this when an engine starts, and `engine_estimate.py` to
forecast one."""

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
"""The bytes that steps need besides weights and caches, as a guess before it is measured."""


def planned_uses(
    target: CausalLM,
    others: Mapping[str, CausalLM],
    strategy: Strategy,
    config: EngineConfig,
    context_columns: abc.Sequence[str],
) -> tuple[dict[str, ModelUse], ResolvedConfig]:
    """Return the models of an engine by name, with how it runs each of them, and its settings with
    all defaults filled in. The models may be without values. Raises ValueError if the model or
    device does not allow the configuration, has no such column, or another model does not fit.

    Args:
        others: as for `model_uses`.
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
    """Return the strategy's models by name, with how it runs each of them. `others` are those
    with checkpoints of their own, by name, whose weights are packed in place. Raises ValueError if
    a model is missing, is not used by the strategy, or does not fit the target."""
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
            _check_beside(name, others[name], target, max_model_len)
        of_target = columns if model is target else ()
        all_hidden = strategy.needs_hidden and model is target
        uses[name] = ModelUse(model, role.widths, role.forward_rows, of_target, all_hidden)
    if unused := [name for name in others if name not in uses]:
        raise ValueError(f"strategy {strategy.name} has no use for a {unused[0]} model")
    return uses


def _check_beside(name: str, model: CausalLM, target: CausalLM, max_model_len: int) -> None:
    """Check that a model can run beside the target."""
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
    """Check that the products of linear layers keep the bits of rows, or raise ValueError."""
    products = [checked for module in model.modules() for checked in _products(module)]
    once = {product.name: product for product in products}.values()
    if (unsteady := first_unsteady(once, model.device)) is not None:
        raise ValueError(
            "deterministic is true, and the GPU's library computes a row differently in a batch "
            f"than alone ({unsteady}): make the engine before anything else computes on the GPU "
            "in this process, or set deterministic to false"
        )


def _products(layer: nn.Module) -> Iterator[Product]:
    """Yield the products of a layer: by itself, and added to a residual where it may be. Where
    ranks share a layer, their parts are added to it in the order of the ranks, row by row."""
    if isinstance(layer, KVExpansion):
        size = layer.weight.shape[2]
        yield Product(f"an expansion of latents of {size} values", size, layer.expand)
    if not isinstance(layer, Linear):
        return
    width, depth = layer.out_features, layer.in_features
    biased = "" if layer.bias is None else " and a bias"
    packed = layer.in_four_bits
    kept = layer.weight.dtype if packed is None else packed.layout.code
    name = f"a product with a weight of {width}×{depth}{biased} in {kept}"
    yield Product(name, depth, layer)
    if isinstance(layer, RowParallelLinear) and not layer.is_divided:
        ones = torch.ones((1, width), dtype=torch.bfloat16, device=layer.weight.device)

        def added(x: Tensor) -> Tensor:
            return summed(layer.add_to(ones.repeat(len(x), 1), x))

        yield Product(f"{name}, added to a residual", depth, added)


def chosen_columns(model: CausalLM, names: abc.Sequence[str]) -> tuple[OutputColumn, ...]:
    """Find the model's columns of context scope by their names. Raises ValueError if the model has
    no column of one of these names."""
    known = {column.name: column for column in model.declared_columns(model.config)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"{model.config.architecture} has no context column {name!r}; it has "
                f"{', '.join(known) or 'none'}"
            )
    return tuple(known[name] for name in names)


def chunk_multiple(model: CausalLM) -> int:
    """Return the number of tokens of which every cut of a row's prefill must be a multiple. It is
    the least common multiple of what the model's recurrent layers ask for; 1 without any."""
    specs = model.cache_specs
    return int(np.lcm.reduce([1, *(s.chunk_multiple for s in specs if isinstance(s, StateSpec))]))


def sizes_of(target: CausalLM, strategy: Strategy, config: EngineConfig) -> Sizes:
    """Return what the defaults of the engine's settings depend on."""
    device = target.device
    weights, width = target.weight_bytes, max(strategy.models[TARGET].widths)
    memory, room = 0, int(available_memory() * CPU_SHARE)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        room = int(memory * config.gpu_memory_utilization) - weights - _ACTIVATIONS
    specs, parallel = target.cache_specs, target.parallel
    return Sizes(
        weights=weights,
        weights_per_token=target.weight_bytes_per_token,
        memory=parallel.least(memory),
        width=width,
        row_states=row_bytes(specs, width, folded_at_once(device)),
        cache_room=parallel.least(max(room, 0)),
    )
