"""Adds LoRA adapters to a model, after checking that they fit.

An adapter's low-rank products are computed in addition to the layers' products, so rows with
different adapters share a batch. With `fold`, one adapter is added to the weights instead
(`folding.py`). The loading of a job's model calls `add_adapters`.

A *site* is a product of a layer to which adapters can be added. Its *targets* are the checkpoint's
weights that it consists of (`lora_targets.py`). A *pair* is the tensors A and B of one weight in an
adapter's file (`adapter_factors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from batchgen.engine.layers.decoder_layer import DecoderLayer, HasInputProjection
from batchgen.engine.layers.embedding import Embedding, LogitsLayer
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.weight_slot import named_parts
from batchgen.engine.loading.adapter_factors import FactorPair, factor_pairs, piece_name
from batchgen.engine.loading.folding import check_fold, fold_adapter
from batchgen.engine.loading.peft_config import FOLD_IT
from batchgen.engine.loading.peft_files import AdapterFile
from batchgen.engine.lora.layer_lora import LoRAState, num_slots
from batchgen.engine.lora.lora_targets import Factors, LoRASite, LoRATarget, stacked_rank
from batchgen.engine.models.causal_lm import EMBEDDING, LM_HEAD, CausalLM

_WEIGHT = ".weight"
_MOST_RANK = 256
"""The highest supported rank of adapters that are not folded."""
_Layer = Linear | Embedding | Experts


def check_adapter(adapter: AdapterFile, model: CausalLM, *, fold: bool = False) -> None:
    """Raise ValueError, naming the tensor, if an adapter does not fit a model or is not supported.
    The model's parameters need no values. `fold` says whether the adapter is to be added to the
    weights."""
    targets: dict[str, list[tuple[LoRATarget, LoRASite]]] = {}
    for layer, path in _layers(model):
        for site in layer.lora_sites(path):
            for target in site.targets:
                targets.setdefault(target.name, []).append((target, site))
    pairs = {} if fold else factor_pairs(adapter, model)
    for name, pair in pairs.items():
        _check_pair(adapter, model, name, pair, targets.get(name, []))
    adapted = check_fold(adapter, model) if fold else set(pairs)
    if not fold:
        _check_saved(adapter, model)
    # The names that `target_modules` may mean. It does not mean experts if all are in one tensor of
    # the checkpoint, because they are no modules then. So experts count only if one is adapted.
    expert_names = {
        name
        for name, weights_of_name in targets.items()
        if any(site.of_experts for _, site in weights_of_name)
    }
    names = [
        name
        for name, weights_of_name in targets.items()
        if len(weights_of_name) == 1 and (name not in expert_names or adapted & expert_names)
    ]
    _check_complete(adapter, adapted, names)


def _check_pair(
    adapter: AdapterFile,
    model: CausalLM,
    name: str,
    pair: FactorPair,
    targets: Sequence[tuple[LoRATarget, LoRASite]],
) -> None:
    """Raise ValueError if the model does not have the factors' weight, cannot have adapters there,
    or has another shape. `targets` are the model's weights of this name."""
    down, up, module = pair.down_name, pair.up_name, pair.module
    if not targets:
        raise ValueError(f"{adapter.folder}: tensor {down} adapts {module}{_why_not(name, model)}")
    if pair.parameter is None:
        adapter.check_rank(pair.rank, down, up)
    if pair.rank > _MOST_RANK:
        raise ValueError(
            f"{adapter.folder}: tensor {down} has rank {pair.rank}, and adapters computed beside "
            f"the weights have at most {_MOST_RANK}: {FOLD_IT}"
        )
    target, site = targets[0]
    sizes = site.in_features(target), sum(one.out_features for one, _ in targets)
    exchanged = pair.parameter is not None and pair.parameter.exchanged
    has = pair.sizes(adapter)
    # Index 0 is the input features, which A has unless A and B are exchanged; 1 is the output's.
    for tensor, index in ((down, exchanged), (up, not exchanged)):
        if has[index] != sizes[index]:
            raise ValueError(
                f"{adapter.folder}: tensor {tensor} has shape {list(adapter.shapes[tensor])}, and "
                f"{module} of the model has {sizes[index]} {'out' if index else 'in'} features: "
                "the adapter is of another model"
            )


def _check_saved(adapter: AdapterFile, model: CausalLM) -> None:
    """Raise ValueError for weights trained as a whole, unless they are the embedding or lm_head in
    the model's shape."""
    folder, saved = adapter.folder, adapter.saved()
    shape = (model.config.vocab_size, model.config.hidden_size)
    for module, tensor in saved.items():
        name = piece_name(module, model)
        if name not in _layers_with_ids(model):
            raise ValueError(f"{folder}: tensor {tensor} replaces {module}{_why_not(name, model)}")
        if adapter.shapes[tensor] != shape:
            raise ValueError(
                f"{folder}: tensor {tensor} has shape {list(adapter.shapes[tensor])}, and that of "
                f"the model has {list(shape)}: embeddings of another vocabulary are not supported"
            )
    for name in adapter.config.saved:
        if not any(f".{module}".endswith(f".{name}") for module in saved):
            raise ValueError(
                f"{folder} is damaged: modules_to_save has {name}, and its tensor is missing"
            )


def _layers_with_ids(model: CausalLM) -> dict[str, Embedding | LogitsLayer]:
    """Return the layers that have a vector for each token id, by name."""
    kinds = (Embedding, LogitsLayer)
    names = {EMBEDDING.removesuffix(_WEIGHT), LM_HEAD.removesuffix(_WEIGHT)}
    return {
        name: layer for layer, name in _layers(model) if name in names and isinstance(layer, kinds)
    }


def _check_complete(adapter: AdapterFile, adapted: set[str], names: list[str]) -> None:
    """Raise ValueError if an adapter lacks tensors that its configuration lists: if it adapts some
    modules of a target and not all. `adapted` are the modules that it adapts, and `names` those
    that the model has."""
    config = adapter.config
    if config.is_partial:
        return
    for target in config.target_modules:
        fitting = [name for name in names if name == target or name.endswith(f".{target}")]
        if adapted.intersection(fitting) and (lack := sorted(set(fitting) - adapted)):
            raise ValueError(
                f"{adapter.folder} is damaged: target_modules has {target}, and tensor "
                f"{lack[0]}.lora_A.weight is missing"
            )


def add_adapters(
    model: CausalLM,
    adapters: Mapping[str, AdapterFile],
    default: str | None = None,
    *,
    fold: bool = False,
    slots: int | None = None,
) -> None:
    """Read adapters and add them to a model's layers. Must be called before the model is packed.

    Args:
        adapters: the adapters by name; exactly one with `fold`.
        default: the adapter of rows that name none.
        fold: add the adapter to the weights, which must all be in the model's dtype.
        slots: the number of adapter slots; None means one per adapter. With fewer slots than
            adapters, the other adapters stay in the host's memory.

    Raises:
        ValueError: as for `check_adapter`.
    """
    if fold:
        (only,) = adapters.values()
        check_adapter(only, model, fold=True)
        fold_adapter(only, model)
        return
    factors, saved = list[dict[str, Factors]](), list[dict[str, Tensor]]()
    for adapter in adapters.values():
        check_adapter(adapter, model)
        tensors, pairs = adapter.tensors(), factor_pairs(adapter, model)
        _check_copies(adapter, tensors, model)
        factors.append({name: pair.read(tensors) for name, pair in pairs.items()})
        saved.append(
            {piece_name(module, model): tensors[name] for module, name in adapter.saved().items()}
        )
    ranks = tuple(max((one.rank for one in weights.values()), default=1) for weights in factors)
    # At first, adapter i is in slot i. Adapters count from 1.
    in_slots = list(range(1, num_slots(len(adapters), slots) + 1))
    model.lora = state = LoRAState(tuple(adapters), ranks, default, in_slots)
    for layer, path in _layers(model):
        layer.add_lora(path, factors, state)
    for path, layer in _layers_with_ids(model).items():
        layer.add_saved([weights.get(path) for weights in saved], state)
    for part in model.layers:
        _read_unquantised(part)
    model.weight_bytes += state.num_bytes


def slot_numbers(model: CausalLM, adapters: Sequence[AdapterFile]) -> int:
    """Return how many values of the model's dtype an adapter slot takes on a GPU. The adapters must
    fit the model, whose parameters need no values."""
    pairs = [factor_pairs(adapter, model) for adapter in adapters]
    rank = stacked_rank(
        [pair.rank for factors_of_layer in pairs for pair in factors_of_layer.values()]
    )
    saved = {piece_name(module, model) for one in adapters for module in one.saved()}
    whole = sum(layer.saved_numbers for n, layer in _layers_with_ids(model).items() if n in saved)
    return whole + sum(
        site.slot_numbers(pairs, rank)
        for layer, path in _layers(model)
        for site in layer.lora_sites(path)
    )


def _check_copies(adapter: AdapterFile, tensors: Mapping[str, Tensor], model: CausalLM) -> None:
    """Raise ValueError if an adapter's file repeats a weight of its base model that differs from
    this model's. One of the two may be rounded to the other's dtype."""
    slots = {slot.sources[0]: slot for slot in model.checkpoint_slots()}
    for module, name in adapter.copies().items():
        target = piece_name(module, model) + _WEIGHT
        slot, whole = slots[model.copies.get(target, target)], tensors[name]
        copy = whole if slot.shard is None else slot.shard.take(whole)
        weight = slot.parameter.cpu()
        if not (
            torch.equal(copy.to(weight.dtype), weight) or torch.equal(weight.to(copy.dtype), copy)
        ):
            raise ValueError(
                f"{adapter.folder}: tensor {name} is not the model's own {target}: the adapter was "
                f"trained on another model, or {FOLD_IT}"
            )


def _read_unquantised(layer: DecoderLayer) -> None:
    """Switch off the quantisation of norms' results that an adapter reads, because adapters read
    values that are not rounded."""
    for reader, norm in layer.normed_parts:
        if isinstance(reader, HasInputProjection) and reader.input_projection.lora is not None:
            norm.quantise_result(None)


def _layers(model: CausalLM) -> Iterator[tuple[_Layer, str]]:
    """Yield the layers of a model that may have adapters, each with its name in checkpoints."""
    parts = list(named_parts(model.model, "model"))
    if model.lm_head is not None:
        parts.append((LM_HEAD.removesuffix(_WEIGHT), model.lm_head))
    for path, part in parts:
        if isinstance(part, Linear | Embedding | Experts):
            yield part, path


def _why_not(name: str, model: CausalLM) -> str:
    """Say why a module, given by the model's name, cannot have an adapter."""
    kind = model.config.architecture
    known = {piece for slot in model.checkpoint_slots() for piece in slot.pieces}
    if name + _WEIGHT in known or any(piece.startswith(f"{name}.") for piece in known):
        return (
            f", and adapters of this module of {kind} are not computed beside the weights: "
            f"{FOLD_IT}"
        )
    return f", which {kind} does not have: the adapter is of another model"
