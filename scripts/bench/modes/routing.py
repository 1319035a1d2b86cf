"""Runs of rows, and the routing of experts in models of random weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from measuring import synchronize
from torch import Tensor, nn

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.moe_model import MoEConfig

Routing = Literal["model", "uniform", "same"]
"""What chooses the experts. "model": its own routers; "uniform": chance; "same": all tokens go to
the same experts, because all scores are equal. That happens to routers with tiny weights that round
scores to bfloat16, such as the dummy weights of other engines."""
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
_MOST_DRAWN = 2048
"""The most tokens of a forward for which the logits of all layers are drawn at once."""


def run_rows(
    engine: LLMEngine,
    rows: Iterable[tuple[Any, ...]],
    after_step: Callable[[int], object] = lambda finished: None,
) -> tuple[float, list[RequestOutput]]:
    """Run rows to their ends; returns the seconds and the outputs in the order of the rows.

    A row is the arguments of `LLMEngine.add_request` after the id. `after_step` is called with the
    number of rows that have ended.

    Raises:
        RuntimeError: a row has ended with an error.
    """
    rows, outputs = list(rows), dict[int, RequestOutput]()
    gc.collect()
    synchronize()
    start = time.perf_counter()
    for index, row in enumerate(rows):
        engine.add_request(str(index), *row)
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"row {output.request_id}: {output.error}")
            outputs[int(output.request_id)] = output
        after_step(len(outputs))
    synchronize()
    return time.perf_counter() - start, [outputs[index] for index in range(len(rows))]


class Chance:
    """Random logits for the routers of all layers, new ones in each forward.

    They come from torch's generator of the device, whose state a CUDA graph advances at each
    replay. In a forward of few tokens one launch draws the logits of all layers, because a launch
    in each layer would add time that real routers do not take.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_layers, self._num_experts = num_layers, num_experts
        self._drawn: Tensor | None = None
        self._last = num_layers

    def logits(self, layer: int, tokens: int, device: torch.device) -> Tensor:
        """Return [tokens, E] float32 for the router of this index; layers ask in order."""
        if tokens > _MOST_DRAWN:
            return torch.rand((tokens, self._num_experts), device=device)
        # The logits of a layer are used once; the last layer may have fewer tokens than the others.
        if layer <= self._last or self._drawn is None or self._drawn.shape[1] != tokens:
            shape = (self._num_layers, tokens, self._num_experts)
            self._drawn = torch.rand(shape, device=device)
        self._last = layer
        return self._drawn[layer]


def expert_layers(model: nn.Module) -> list[SparseMoE]:
    """Return the parts of a model that have experts, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, SparseMoE)]


def set_routing(model: CausalLM, routing: Routing) -> None:
    """Route the tokens of a model with random weights, and of its extra heads, this way from now
    on. The routers' own products are still computed, since their time counts. Chance is seeded.
    """
    if routing == "model":
        return
    layers = [layer for part in (model, *model.heads.values()) for layer in expert_layers(part)]
    if not layers:
        raise ValueError(f"{routing} routing is for models with experts, and this one has none")
    torch.manual_seed(0)
    num_experts = model.config.family_as(MoEConfig).num_experts
    chance = Chance(len(layers), num_experts)

    def force(index: int, _: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        (x,) = inputs
        if routing == "uniform":
            return chance.logits(index, len(x), x.device)
        return torch.zeros((len(x), num_experts), device=x.device)

    for index, layer in enumerate(layers):
        layer.gate.register_forward_hook(partial(force, index))
