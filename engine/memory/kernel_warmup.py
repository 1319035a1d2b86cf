"""Compiles an engine's Triton kernels in threads while its weights are loaded.

It runs the engine's forwards without computing anything, only to find out which kernels they
launch. `engine_recipe.py` loads a model inside `compiling_kernels`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from batchgen.engine.caches.cache_specs import has_window
from batchgen.engine.device.host_limits import usable_cores
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.memory.largest_steps import largest_decode, largest_prefill, scratch_runner
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.token_model import TokenModel
from batchgen.kernels.compile_ahead import can_compile_ahead, compiling_ahead

Plan = Callable[[], tuple[Sequence[ModelUse], ResolvedConfig]]

_META = torch.device("meta")
_MOST_THREADS = 16
"""The most kernels that are compiled at once. An engine has about fifty, and few take long."""


@contextmanager
def compiling_kernels(device: torch.device, plan: Plan) -> Iterator[None]:
    """Compile an engine's kernels in other threads while its weights are loaded inside the context.

    The context ends when all kernels are compiled. It only saves time: kernels that are not
    compiled here are compiled by the first forwards, as on a CPU, and with a Triton that does not
    compile in threads.

    Args:
        plan: returns the models that will run, with parameters without values, and the engine's
            settings. It is called in another thread, so it must not import from a library whose
            modules import each other lazily, such as transformers.
    """
    if device.type != "cuda" or not can_compile_ahead():
        yield
        return
    index = torch.cuda.current_device()
    thread = Thread(target=_compile, args=(index, plan), name="kernels")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _compile(index: int, plan: Plan) -> None:
    """Compile an engine's kernels for the GPU with this index."""
    # Triton compiles for the current device, and each thread has its own.
    start_thread = partial(torch.cuda.set_device, index)
    start_thread()
    try:
        try:
            with ShapesOnly(torch.device("cuda", index)):
                uses, config = plan()
        except ValueError:  # a user's mistake, which the engine itself will report
            return
        with compiling_ahead(min(usable_cores(), _MOST_THREADS), start_thread):
            warm_up(uses, config)
    except Exception as error:
        message = f"kernels are compiled one after another, as they are needed: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


@torch.inference_mode()
def warm_up(uses: Sequence[ModelUse], config: ResolvedConfig) -> None:
    """Run the forwards of the engine's first steps without a device.

    All kernel launches are made, so the caller must keep them from running. Of layers that are
    built alike, only one takes part, because the others launch the same kernels. The models'
    parameters must have been made inside `ShapesOnly` for their device, or be on it.
    """
    with ShapesOnly(uses[0].model.device):
        for use in uses:
            runner, shapes = scratch_runner(use, config), use.graph_shapes(config)
            with _one_layer_of_each_kind(use.model):
                largest_prefill(runner, use, config)
                tower = use.model.tower
                if tower is not None and tower.config.rules.sees_whole:
                    largest_prefill(runner, use, config, looks_ahead=True)
                largest_decode(runner, use, config)
                if config.cuda_graph:
                    runner.run_uncaptured(shapes)


@contextmanager
def _one_layer_of_each_kind(model: TokenModel) -> Iterator[None]:
    """Leave out the layers of a model that have the same modules and shapes as an earlier layer."""
    if not isinstance(model, CausalLM):  # a head has only one layer
        yield
        return
    decoder, layers, rotaries = model.model, model.layers, model.model.rotaries
    # The last layer always takes part, because it may compute fewer tokens than the others.
    firsts = {_kind(layer): layer for layer in reversed(layers[:-1])}
    kept = [i for i, layer in enumerate(layers) if layer is firsts.get(_kind(layer))]
    kept.append(len(layers) - 1)
    decoder.layers = nn.ModuleList(layers[i] for i in kept)
    decoder.rotaries = tuple(rotaries[i] for i in kept)
    try:
        yield
    finally:
        decoder.layers, decoder.rotaries = nn.ModuleList(layers), rotaries


def _kind(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that launch the same kernels."""
    spec = layer.cache_spec if isinstance(layer, DecoderLayer) else None
    window = spec.window if has_window(spec) else None
    modules = [(name, type(module)) for name, module in layer.named_modules()]
    shapes = [(name, p.shape, p.dtype) for name, p in layer.named_parameters()]
    return tuple(modules), tuple(shapes), window


class ShapesOnly(TorchFunctionMode):
    """A mode in which operations on tensors of a device compute only shapes and dtypes.

    Tensors made on the device are really on `meta`, but report the device. Tensors that were on the
    device before take part as if they were on `meta`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # Maps the id of a tensor on the device to the tensor and its copy on `meta`.
        self._shapes: dict[int, tuple[Tensor, Tensor]] = {}
        # The operations that are not simply run on `meta`.
        self._own: dict[Any, Callable[..., Any]] = {
            Tensor.is_cuda.__get__: lambda x: x.is_meta or x.is_cuda,  # type: ignore[attr-defined]
            Tensor.device.__get__: self._device_of,
            Tensor.pin_memory: lambda x: x,
            torch.device: torch.device,
            Tensor.addmm_: self._addmm,
            Tensor.__getitem__: self._item,
            torch.cat: self._cat,
            F.linear: self._linear,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = self._own.get(func)
        options = {name: self._on_meta(value) for name, value in (kwargs or {}).items()}
        options.pop("pin_memory", None)
        if handler is not None:
            return handler(*args, **options)
        return func(*map(self._on_meta, args), **options)

    def _on_meta(self, value: Any) -> Any:
        """Replace the device by `meta`, and tensors on it by tensors on `meta`."""
        if isinstance(value, Tensor) and value.is_cuda:
            # Kept together with the tensor, so that no other tensor can get its id.
            if id(value) not in self._shapes:
                self._shapes[id(value)] = value, value.to(_META)
            return self._shapes[id(value)][1]
        if isinstance(value, torch.device) and value.type == self._device.type:
            return _META
        if type(value) in (list, tuple):
            return type(value)(map(self._on_meta, value))
        return value

    def _device_of(self, x: Tensor) -> torch.device:
        return self._device if x.is_meta else x.device

    # For these operations, torch would first import its operator decompositions, its compiler or
    # its symbolic shapes, each of which takes about a second.

    def _addmm(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return x if x.is_meta else x.addmm_(*args, **options)

    def _item(self, x: Tensor, index: Any) -> Any:
        if isinstance(index, Tensor) and x.is_meta:
            return x.new_empty((*index.shape, *x.shape[1:]))
        return self._on_meta(x)[self._on_meta(index)]

    def _cat(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        first: Tensor = self._on_meta(tensors[0])
        if not first.is_meta:
            return torch.cat(list(tensors), dim)
        shape = list(first.shape)
        shape[dim] = sum(x.shape[dim] for x in tensors)
        return first.new_empty(shape)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:-1], len(weight))
        on_meta: Tensor = self._on_meta(x)
        return on_meta.new_empty(shape) if on_meta.is_meta else F.linear(x, weight, bias)
