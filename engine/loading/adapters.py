"""Puts adapters beside the layers of a model, after it was checked that they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from batchgen.engine.layers.decoder_layer import DecoderLayer, HasInputProjection
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.lora import (
    Factors,
    LoRAPlace,
    LoRAState,
    adapted_parts,
    num_slots,
    stacked_rank,
)
from batchgen.engine.layers.weight_slot import named_parts
from batchgen.engine.loading.folding import check_fold, fold_adapter
from batchgen.engine.loading.peft_config import FOLD_IT
from batchgen.engine.loading.peft_files import AdapterFile
from batchgen.engine.models.causal_lm import CausalLM, full_name

_WEIGHT = ".weight"


def check_adapter(adapter: AdapterFile, model: CausalLM, *, fold: bool = False) -> None:
    """Raise ValueError if an adapter does not fit a model, whose parameters need no values, or if
    it cannot stand beside its weights, nor be added to them with `fold`; the message names the
    tensor."""
    places: dict[str, list[tuple[LoRAPlace, int]]] = {}
    for layer, path in _layers(model):
        for place in layer.lora_places(path):
            depth = layer.in_features if place.columns is None else place.columns.size
            places.setdefault(place.name, []).append((place, depth))
    single = [name for name, found in places.items() if len(found) == 1]
    if fold:
        _check_complete(adapter, check_fold(adapter, model), single)
        return
    adapted = set()
    for module, (down, up) in adapter.modules().items():
        name = _piece_name(module, model)
        if name not in places:
            raise ValueError(
                f"{adapter.folder}: tensor {down} adapts {module}{_why_not(name, model)}"
            )
        adapted.add(name)
        outs = sum(place.out_features for place, _ in places[name])
        depth, shapes = places[name][0][1], adapter.shapes
        for tensor, axis, size in ((down, 1, depth), (up, 0, outs)):
            if shapes[tensor][axis] != size:
                raise ValueError(
                    f"{adapter.folder}: tensor {tensor} has shape {list(shapes[tensor])}, and "
                    f"{module} of the model has {size} {'in' if axis else 'out'} features: the "
                    "adapter is of another model"
                )
    _check_complete(adapter, adapted, single)


def _check_complete(adapter: AdapterFile, adapted: set[str], names: list[str]) -> None:
    """Refuse an adapter that lacks tensors which its configuration says it has."""
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
    """Read adapters, by their names, and put them beside a model's layers, before it is packed.

    Rows that ask for no adapter have `default`. There are `slots` adapter slots, or one for each
    adapter; with fewer, the others wait in the host's memory. With `fold` there is one adapter,
    which is added to the weights instead; all of them are in the model's dtype. Raises ValueError
    as `check_adapter` does.
    """
    if fold:
        (only,) = adapters.values()
        check_adapter(only, model, fold=True)
        fold_adapter(only, model)
        return
    factors: list[dict[str, Factors]] = []
    for adapter in adapters.values():
        check_adapter(adapter, model)
        read = adapter.read()
        factors.append({_piece_name(module, model): own for module, own in read.items()})
    ranks = tuple(max(one.rank for one in own.values()) for own in factors)
    in_slots = list(range(1, num_slots(len(adapters), slots) + 1))
    model.lora = state = LoRAState(tuple(adapters), ranks, default, in_slots)
    for layer, path in _layers(model):
        layer.add_lora(path, factors, state)
        if layer.lora is not None:
            state.layers.append(layer.lora)
    for part in model.layers:
        _read_unquantised(part)
    model.weight_bytes += state.num_bytes


def slot_numbers(model: CausalLM, adapters: Sequence[AdapterFile]) -> int:
    """Return how many numbers an adapter slot has on a GPU, for adapters that fit the model, whose
    parameters need no values."""
    names = [{_piece_name(module, model) for module in one.modules()} for one in adapters]
    rank = stacked_rank([one.highest_rank for one in adapters])
    found = 0
    for layer, path in _layers(model):
        if parts := adapted_parts(list(layer.lora_places(path)), names):
            found += rank * (len(parts) * layer.in_features + layer.out_features)
    return found


def _read_unquantised(layer: DecoderLayer) -> None:
    """Let norms leave results as they are where an adapter reads them."""
    for reader, norm in ((layer.mixer, layer.mixer_norm), (layer.mlp, layer.mlp_norm)):
        if norm is None or not isinstance(reader, HasInputProjection):
            continue
        if reader.input_projection.lora is not None:
            norm.quantise_result(None)


def _layers(model: CausalLM) -> Iterator[tuple[Linear, str]]:
    """Yield the linear layers of a model's decoder, each with its name in checkpoints."""
    for path, part in named_parts(model.model, "model"):
        if isinstance(part, Linear):
            yield part, path


def _piece_name(module: str, model: CausalLM) -> str:
    """Return what the model calls a module of a checkpoint."""
    name = model.piece_name(full_name(module + _WEIGHT), model.config)
    return name.removesuffix(_WEIGHT)


def _why_not(name: str, model: CausalLM) -> str:
    """Say why an adapter cannot stand beside a module, which the model calls by this name."""
    kind = model.config.architecture
    known = {piece for slot in model.checkpoint_slots() for piece in slot.pieces}
    if name + _WEIGHT in known or any(piece.startswith(f"{name}.") for piece in known):
        return (
            f", and adapters of this module of {kind} are not computed beside the weights: "
            f"{FOLD_IT}"
        )
    return f", which {kind} does not have: the adapter is of another model"
