"""Loads a checkpoint into a model. Every parameter is filled exactly once, or the load fails.

A *slot* is a parameter, or a part of one, that tensors of the checkpoint fill: its *sources*. It
consists of *pieces*, and several slots may have the same piece, because checkpoints differ in how
they merge weights (`WeightSlot`).

`load_model` is called for the target and for a strategy's other models.
"""

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
    dtype: torch.dtype | None = None,  # None: the checkpoint's, or float32 for a GGUF file
    load_format: LoadFormat = "auto",
    heads: Collection[str] = (),  # which of the model's heads to load
    quantization: Quantization | None = None,  # `fp8` rounds 16-bit weights of layers to FP8
    # Whether FP8 and 4-bit weights are not dequantised; None: if the device has kernels.
    native_fp8: bool | None = None,
    parallel: TensorParallel = ALONE,  # the ranks; only this rank's weights are read
    vision: bool = False,  # whether to load the vision tower
    hidden_layers: tuple[int, ...] = (),  # `ModelConfig.hidden_layers`
    kv_cache_dtype: KVCacheDtype = "auto",  # the dtype of the KV cache
) -> CausalLM:
    """Build the model of a checkpoint and load its weights, one tensor at a time.

    The load format `auto` depends on what is at the path; `gguf` accepts only a GGUF file; `dummy`
    makes small random weights, equal in every run, from a configuration.

    Raises:
        ValueError: the model is not supported, or a tensor is missing, unexpected or of a wrong
            shape.
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
    """Return the format of the weights of a model's layers; None for the model's dtype.

    Args:
        quantization: as for `load_model`.
        units: the formats that the device can compute from.

    Raises:
        ValueError: `quantization` asks for FP8 weights, and the checkpoint's format does not allow
            it.
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
    """Raise ValueError if a head of the checkpoint has its own embedding or output layer."""
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
    """Yield a checkpoint's weights. If embedding and output layer share a weight, and only the
    output layer names it, it is also yielded as the embedding."""
    shared: dict[str, CheckpointTensor] = {}
    for weight_name, tensor in weights:
        name = model.piece_name(full_name(weight_name), model.config)
        if name in (EMBEDDING, LM_HEAD):
            shared[name] = tensor
        yield weight_name, tensor
    if model.config.tie_word_embeddings and shared.keys() == {LM_HEAD}:
        yield EMBEDDING, shared[LM_HEAD]


def _fill(model: CausalLM, weights: Iterable[tuple[str, CheckpointTensor]], path: Path) -> None:
    """Fill every piece of the model exactly once with a checkpoint's tensors."""
    slots = model.checkpoint_slots()
    by_source: dict[str, list[WeightSlot]] = defaultdict(list)
    for slot in slots:
        for source in slot.sources:
            by_source[source].append(slot)
    # The sources that have arrived of slots that need several, by the slot's identity.
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
    # Of a slot with several sources that got only some, the missing sources are named.
    for slot in slots:
        if (came := waiting.get(id(slot), {})) and missing.issuperset(slot.pieces):
            missing = missing.difference(slot.pieces).union(slot.sources) - came.keys()
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"{path}: {problem} tensors: {abbreviate(sorted(names))}")


def _is_no_bias(name: str, tensor: CheckpointTensor) -> bool:
    """Return whether a tensor is a bias of zeros, which some quantised checkpoints have
    needlessly."""
    return name.endswith(".bias") and isinstance(tensor, Tensor) and not tensor.any()


def _check_dtype(path: Path, name: str, tensor: CheckpointTensor, slot: WeightSlot) -> None:
    """Raise ValueError if a tensor without scales has a dtype that the slot does not take."""
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
    """Fill a model with each slot's `dummy` value, or with random numbers from a generator per
    slot."""
    plain = {slot.pieces[0]: slot for slot in model.checkpoint_slots() if len(slot.pieces) == 1}
    for index, (_, slot) in enumerate(sorted(plain.items())):
        if slot.dummy is not None:
            slot.parameter.fill_(slot.dummy)
        elif not slot.elsewhere:
            slot.fill_dummy(partial(_fill_normal, seed=index))


def _fill_normal(parameter: Tensor, seed: int) -> None:
    """Fill a parameter with normally distributed numbers of this seed."""
    generator = torch.Generator(device=parameter.device).manual_seed(seed)
    parameter.normal_(0.0, 0.02, generator=generator)
