"""Folds an adapter into the loaded weights of a model.

The adapter then applies to all rows. Folding also supports what `adapters.py` cannot compute
separately, such as DoRA and biases that were trained as a whole. `adapters.py` calls this module
for `fold`.

DoRA (Liu et al. 2024, arXiv 2402.09353) stores a norm for each row of a weight: after B·A has been
added, every row is scaled to that norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.loading.adapter_factors import expert_parameter, experts_of
from batchgen.engine.loading.peft_files import NESTED, PREFIX, AdapterFile
from batchgen.engine.models.causal_lm import EMBEDDING, LM_HEAD, CausalLM, full_name

_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
"""The name of a factor; its groups are the module, `embedding_` if it is of one, and A or B."""
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?")


@dataclass(frozen=True)
class _Change:
    """What an adapter does to one tensor of a checkpoint."""

    target: str  # the name of the tensor in the model's slots
    tensor: str  # the adapter's tensor that causes the change, for messages
    # Computes, from the adapter's tensors by name, what is added to the tensor or replaces it.
    value: Callable[[Mapping[str, Tensor]], Tensor]
    replaces: bool = False
    magnitude: str | None = None  # DoRA's tensor of row norms; None without DoRA


def check_fold(adapter: AdapterFile, model: CausalLM) -> set[str]:
    """Raise ValueError, naming the tensor, if an adapter cannot be folded into a model. The model's
    parameters need no values. Returns the names of the changed modules."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in adapter.shapes.items()}
    _apply(adapter, model, tensors, write=False)
    return {change.target.removesuffix(".weight") for change in _changes(adapter, model)}


def fold_adapter(adapter: AdapterFile, model: CausalLM) -> None:
    """Add an adapter to the loaded weights of a model, computing sums in float32."""
    _apply(adapter, model, adapter.tensors(), write=True)


def _apply(
    adapter: AdapterFile, model: CausalLM, tensors: Mapping[str, Tensor], *, write: bool
) -> None:
    """Compute all changes, and raise ValueError if one does not fit the model. With `write` they
    are written to the model's parameters; without, `tensors` may be on the meta device."""
    slots = {slot.sources[0]: slot for slot in model.checkpoint_slots() if len(slot.sources) == 1}
    # Replaced weights come first, because factors may be added to one of them.
    for change in sorted(_changes(adapter, model), key=lambda change: not change.replaces):
        if (slot := slots.get(change.target)) is None:
            kind = model.config.architecture
            raise ValueError(
                f"{adapter.folder}: tensor {change.tensor} changes {change.target}, which {kind} "
                "does not have: the adapter is of another model"
            )
        device = slot.parameter.device if write else torch.device("meta")
        factors = {name: tensors[name].to(device) for name in _names(change, adapter)}
        try:
            value = _in_slot(slot, change.target, change.value(factors), device)
        except (ValueError, RuntimeError) as error:
            shape = list(adapter.shapes[change.tensor])
            raise ValueError(
                f"{adapter.folder}: tensor {change.tensor} of shape {shape} does not fit "
                f"{change.target}: {error}"
            ) from None
        if value is None or not write:
            continue
        if not change.replaces:
            value += slot.parameter.float()
        if change.magnitude is not None:
            # The norms go through the slot as rows of a tensor, to get the parameter's order.
            norms = factors[change.magnitude].float().reshape(-1, 1)
            rows = norms.expand(-1, adapter.shapes[change.tensor][1])
            wanted = _in_slot(slot, change.target, rows, device)
            assert wanted is not None
            own_norms = value.flatten(1).norm(dim=1)
            value *= (wanted.flatten(1)[:, 0] / own_norms).view(-1, *[1] * (value.ndim - 1))
        slot.parameter.copy_(value)


def _names(change: _Change, adapter: AdapterFile) -> list[str]:
    """Return the adapter's tensors of the module that a change affects."""
    stem = _stem(change.tensor)
    return [name for name in adapter.shapes if _stem(name) == stem]


def _stem(name: str) -> str:
    """Return a tensor's name without `.lora_A.weight` or the like."""
    match = _FACTOR.fullmatch(name) or _MAGNITUDE.fullmatch(name)
    return name if match is None else match[1]


def _in_slot(slot: WeightSlot, name: str, value: Tensor, device: torch.device) -> Tensor | None:
    """Return a checkpoint's tensor as this rank's slot would hold it; None if the slot is on
    another rank."""
    if slot.elsewhere:
        return None
    target = torch.empty_like(slot.parameter, dtype=torch.float32, device=device)
    replace(slot, parameter=target, form=None, scales=None).fill({name: value})
    return target


def _changes(adapter: AdapterFile, model: CausalLM) -> Iterator[_Change]:
    """Yield the changes that an adapter makes to the tensors of a checkpoint. Raises ValueError for
    a tensor that is unknown or not supported."""
    config, shapes = adapter.config, adapter.shapes
    # The names of the tensors by letter, A or B, for each stem and whether it is of an embedding.
    factors: dict[tuple[str, bool], dict[str, str]] = {}
    magnitudes = {m[1]: name for name in shapes if (m := _MAGNITUDE.fullmatch(name))}
    for name in shapes:
        if (match := _FACTOR.fullmatch(name)) is not None:
            factors.setdefault((match[1], match[2] is not None), {})[match[3]] = name
        elif _MAGNITUDE.fullmatch(name) is None:
            yield _saved(adapter, model, name)
    experts = experts_of(model)
    for (stem, of_embedding), factor_tensors in factors.items():
        down, up = adapter.both(stem, factor_tensors)
        module = stem.removeprefix(PREFIX).replace(NESTED, "")
        path = _target(module + ".weight", model).removesuffix(".weight")
        _refuse_shared(adapter, model, down, f"{path}.weight")
        if (part := experts.get(path)) is not None:
            yield _of_experts(adapter, part, (stem, path), down, up)
            continue
        adapter.check_rank(config.rank_of(module), down, up)
        scale = config.scale_of(module)
        if of_embedding and stem in magnitudes:
            raise ValueError(
                f"{adapter.folder}: tensor {magnitudes[stem]} is of DoRA of an embedding, which is "
                "not supported: merge the adapter into the model with PEFT's merge_and_unload"
            )

        # The defaults keep the values of this round of the loop.
        def value(
            tensors: Mapping[str, Tensor],
            names: tuple[str, str] = (down, up),
            scale: float = scale,
            turned: bool = of_embedding,
        ) -> Tensor:
            added = tensors[names[1]].float() @ tensors[names[0]].float() * scale
            return added.t() if turned else added

        yield _Change(f"{path}.weight", down, value, magnitude=magnitudes.get(stem))


def _of_experts(
    adapter: AdapterFile, experts: Experts, of: tuple[str, str], down: str, up: str
) -> _Change:
    """Return the change that factors of a weight of all experts make."""
    stem, path = of
    parameter = expert_parameter(adapter, experts, stem, path, (down, up))
    turned, scale = experts.variant.interleaved, parameter.scale

    def value(tensors: Mapping[str, Tensor]) -> Tensor:
        a, b = tensors[down].float(), tensors[up].float()
        added: Tensor = parameter.up(a, b) @ parameter.down(a, b) * scale
        return added.transpose(1, 2) if turned else added

    return _Change(f"{path}.{parameter.name}", down, value)


def _saved(adapter: AdapterFile, model: CausalLM, name: str) -> _Change:
    """Return the change for a weight or bias that was trained, or kept, as a whole."""
    plain = name.removeprefix(PREFIX).replace(NESTED, "")
    module, _, kind = plain.rpartition(".")
    config, target = adapter.config, _target(plain, model)
    listed = any(f".{module}".endswith(f".{one}") for one in config.saved)
    is_bias = kind == "bias" and config.bias != "none"
    if not (listed or is_bias or target in (EMBEDDING, LM_HEAD)):
        raise ValueError(
            f"{adapter.folder}: tensor {name} is neither a factor nor of modules_to_save "
            f"({', '.join(config.saved) or 'none'})"
        )
    _refuse_shared(adapter, model, name, target)
    return _Change(target, name, lambda tensors: tensors[name].float(), replaces=True)


def _refuse_shared(adapter: AdapterFile, model: CausalLM, tensor: str, target: str) -> None:
    """Raise ValueError for a change of one of two layers that share a weight."""
    if target in (EMBEDDING, LM_HEAD) and model.config.tie_word_embeddings:
        raise ValueError(
            f"{adapter.folder}: tensor {tensor} changes {target}, and embedding and lm_head of "
            "this model share one weight: merge the adapter into the model with PEFT's "
            "merge_and_unload"
        )


def _target(name: str, model: CausalLM) -> str:
    """Return the model's name of a tensor that the adapter's file names like this."""
    return model.piece_name(full_name(name), model.config)
