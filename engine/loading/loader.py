"""Loads a checkpoint into a model. Every parameter is filled exactly once, or the load fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from batchgen.engine.device.transfer import release_cached_memory
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.mxfp4_format import MXFP4Format, Units, WeightFormat, units_of
from batchgen.engine.layers.packed_format import FourBitFormat, PackedFormat
from batchgen.engine.layers.weight_slot import CheckpointTensor, WeightSlot
from batchgen.engine.loading.config_file import LoadFormat, load_model_config
from batchgen.engine.loading.packed_weights import packed_weights
from batchgen.engine.loading.safetensors_files import (
    abbreviate,
    tensor_names,
    tensors,
    tensors_equal,
    tensors_with_scales,
)
from batchgen.engine.models.causal_lm import EMBEDDING, LM_HEAD, CausalLM, full_name
from batchgen.engine.models.model_config import KVCacheDtype, ModelConfig
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel

Quantization = Literal["fp8"]


def load_model(
    path: Path,  # a folder with config.json and safetensors, or a .gguf file
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,  # None: the checkpoint's, float32 for a GGUF file
    load_format: LoadFormat = "auto",
    heads: Collection[str] = (),  # the model's heads to load with it
    quantization: Quantization | None = None,  # `fp8` rounds weights of layers that are not in FP8
    # Keep FP8 or 4 bits instead of dequantising; None: what the device computes from.
    native_fp8: bool | None = None,
    parallel: TensorParallel = ALONE,  # the ranks; only this one's weights are read
    vision: bool = False,  # load the tower that reads images
    hidden_layers: tuple[int, ...] = (),  # `ModelConfig.hidden_layers`
    kv_cache_dtype: KVCacheDtype = "auto",  # of keys and values
) -> CausalLM:
    """Build the model of a checkpoint and load its weights, one tensor at a time.

    Raises ValueError if the model is not supported, or a tensor is missing, unexpected or of the
    wrong shape. The format `auto` decides by what lies at the path, `gguf` takes a GGUF file alone,
    and `dummy` makes small random weights, equal in every run, from a configuration.
    """
    if load_format == "gguf" and path.suffix != ".gguf":
        raise ValueError(f"{path} is not a .gguf file, which load_format=gguf asks for")
    config = load_model_config(path, load_format)
    config = replace(config, hidden_layers=hidden_layers, kv_cache_dtype=kv_cache_dtype)
    kind = model_class(config.architecture, path)
    release_cached_memory(device)
    dtype = dtype or config.dtype
    units = units_of(device, dtype) if native_fp8 is None else Units(native_fp8, native_fp8, dtype)
    form = chosen_form(config, quantization, units)
    model = kind(
        config,
        device=device,
        dtype=dtype,
        heads=heads,
        form=form,
        parallel=parallel,
        vision=vision,
    )
    if load_format == "dummy":
        _fill_dummy(model)
    elif path.suffix == ".gguf":
        from batchgen.engine.loading.gguf.gguf_file import GGUFFile
        from batchgen.engine.loading.gguf.gguf_model import gguf_weights

        _fill(model, gguf_weights(GGUFFile(path), model), path)
    else:
        in_fp8 = isinstance(config.form, FP8Format)
        if heads:
            _check_copies(model, path)
        weights: Iterable[tuple[str, CheckpointTensor]]
        if isinstance(config.form, PackedFormat):
            weights = packed_weights(path, config.form)
        else:
            weights = tensors_with_scales(path) if in_fp8 else tensors(path)
        _fill(model, _with_embedding(weights, model), path)
    return model


def chosen_form(
    config: ModelConfig, quantization: Quantization | None, units: Units
) -> WeightFormat | None:
    """Return the format of the weights of a model's layers; None if it is the model's dtype.

    `units` say from which formats products are computed; `quantization` is as for `load_model`.
    Raises ValueError if the weights are not rounded to FP8 as it asks for.
    """
    form = config.form.kept if isinstance(config.form, PackedFormat) else config.form
    if quantization is not None and isinstance(form, MXFP4Format):
        raise ValueError(
            f"model.quantization is {quantization}, and the checkpoint's experts are in MXFP4, "
            "which is smaller: leave it out"
        )
    if quantization is not None and not isinstance(form, FP8Format):
        form = FP8Format(at_load=True)
    if form is None:
        return None
    native = units.computes_from(form)
    if isinstance(form, FourBitFormat) and not native:
        return None
    return replace(form, native=native)


def _check_copies(model: CausalLM, path: Path) -> None:
    """Refuse a checkpoint in which a head has an embedding or a layer for logits of its own."""
    names = {model.piece_name(full_name(name), model.config): name for name in tensor_names(path)}
    for copy, piece in model.copies.items():
        if names.keys() >= {copy, piece} and not tensors_equal(path, names[copy], names[piece]):
            raise ValueError(
                f"{path}: {names[copy]} differs from {names[piece]}, and a head that does not "
                "share it with the model is not supported: do not use the head"
            )


def _with_embedding(
    weights: Iterable[tuple[str, CheckpointTensor]], model: CausalLM
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield a checkpoint's weights, and the shared embedding if only the logits' layer names it."""
    shared: dict[str, CheckpointTensor] = {}
    for weight_name, tensor in weights:
        name = model.piece_name(full_name(weight_name), model.config)
        if name in (EMBEDDING, LM_HEAD):
            shared[name] = tensor
        yield weight_name, tensor
    if model.config.tie_word_embeddings and shared.keys() == {LM_HEAD}:
        yield EMBEDDING, shared[LM_HEAD]


def _fill(model: CausalLM, weights: Iterable[tuple[str, CheckpointTensor]], path: Path) -> None:
    """Fill every piece of the model exactly once, with a checkpoint's named values."""
    slots = model.checkpoint_slots()
    by_source: dict[str, list[WeightSlot]] = defaultdict(list)
    for slot in slots:
        for source in slot.sources:
            by_source[source].append(slot)
    # The sources found so far of slots that need several, by the slot's identity.
    waiting: dict[int, dict[str, CheckpointTensor]] = defaultdict(dict)
    filled: set[str] = set()
    unexpected: list[str] = []
    skipped: set[str] = set()
    for weight_name, tensor in weights:
        if (part := model.skipped_part(weight_name)) is not None:
            skipped.add(part)
            continue
        name = model.piece_name(full_name(weight_name), model.config)
        targets = by_source.pop(name, [])
        if not targets and not model.is_derived(name) and not _is_no_bias(name, tensor):
            unexpected.append(weight_name)
        for slot in targets:
            _check_dtype(path, weight_name, tensor, slot)
            sources = waiting[id(slot)]
            sources[name] = tensor
            if len(sources) == len(slot.sources):
                if twice := filled.intersection(slot.pieces):
                    raise ValueError(f"{path}: {weight_name} holds {min(twice)}, which came before")
                try:
                    slot.fill(waiting.pop(id(slot)))
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
                filled.update(slot.pieces)
    model.skipped_parts = tuple(sorted(skipped))
    missing = {piece for slot in slots for piece in slot.pieces} - filled
    for slot in slots:
        if (came := waiting.get(id(slot), {})) and missing.issuperset(slot.pieces):
            missing = missing.difference(slot.pieces).union(slot.sources) - came.keys()
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"{path}: {problem} tensors: {abbreviate(sorted(names))}")


def _is_no_bias(name: str, tensor: CheckpointTensor) -> bool:
    """Whether a tensor is a bias of zeros, as quantised checkpoints have them without need."""
    return name.endswith(".bias") and isinstance(tensor, Tensor) and not tensor.any()


def _check_dtype(path: Path, name: str, tensor: CheckpointTensor, slot: WeightSlot) -> None:
    """Refuse a tensor of another type than the slot takes, unless it comes with scales."""
    if isinstance(tensor, Tensor) and tensor.dtype not in slot.dtypes:
        if torch.uint8 in slot.dtypes:
            raise ValueError(
                f"{path}: tensor {name} is in {str(tensor.dtype).removeprefix('torch.')}, and "
                "quantization_config says that it is in MXFP4: leave that out of config.json, or "
                "list the experts in modules_to_not_convert"
            )
        raise ValueError(
            f"{path}: tensor {name} is in {str(tensor.dtype).removeprefix('torch.')}, and no "
            "quantization_config in config.json says how its values are meant: use the original "
            "weights, or a checkpoint in FP8 with its quantization_config"
        )


def _fill_dummy(model: CausalLM) -> None:
    """Fill a model with each slot's `dummy` value or random numbers of its own generator."""
    plain = {slot.pieces[0]: slot for slot in model.checkpoint_slots() if len(slot.pieces) == 1}
    for index, (_, slot) in enumerate(sorted(plain.items())):
        if slot.dummy is not None:
            slot.parameter.fill_(slot.dummy)
        elif not slot.elsewhere:
            slot.fill_dummy(partial(_fill_normal, seed=index))


def _fill_normal(parameter: Tensor, seed: int) -> None:
    generator = torch.Generator(device=parameter.device).manual_seed(seed)
    parameter.normal_(0.0, 0.02, generator=generator)
