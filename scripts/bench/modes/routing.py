"""Runs of rows, the routing of experts in random models, and the experts that steps touch."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from measuring import DEVICE, synchronize
from torch import Tensor, nn
from workloads import BenchRequest

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.base.step_timing import StepTimer
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.transformer.moe_model import MoEConfig
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.kernels.moe.router.routing import route
from batchgen.strategies.ar.strategy import ARStrategy

Routing = Literal["model", "uniform", "same"]
"""Who chooses the experts: the model's own routers; chance; or nobody, so that all tokens go to the
same ones. The last is what becomes of routers with tiny weights that round scores to bfloat16: all
scores are equal then, as with the dummy weights of other engines."""
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
_MOST_DRAWN = 2048
"""The most tokens of a forward for which the logits of all layers are drawn at once."""
_PROMPT_TOKENS, _DECODE_STEPS = 64, 16


def run_rows(
    engine: LLMEngine,
    rows: Iterable[tuple[list[int], SamplingParams]],
    after_step: Callable[[int], object] = lambda finished: None,
) -> tuple[float, list[RequestOutput]]:
    """Run rows to their ends; returns the seconds and the outputs in the order of the rows.

    `after_step` gets the number of rows that have ended.
    """
    rows, outputs = list(rows), dict[int, RequestOutput]()
    gc.collect()
    synchronize()
    start = time.perf_counter()
    for index, (prompt, params) in enumerate(rows):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished():
        outputs |= {int(output.request_id): output for output in engine.step()}
        after_step(len(outputs))
    synchronize()
    return time.perf_counter() - start, [outputs[index] for index in range(len(rows))]


class Chance:
    """Random logits for the routers of all `num_layers` layers, others in each forward.

    They come from torch's generator of the device, whose state a CUDA graph advances at each
    replay. In a forward of few tokens one launch draws those of all layers, since one in each layer
    would take time that no router takes.
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
    """Let this choose the experts of tokens from now on, in a model of random weights and its
    heads; chance chooses alike after every start.

    The routers' own products are computed all the same, since their time counts.
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


@dataclass(frozen=True, slots=True)
class Touched:
    """The steps of one kind ("prefill", "decode" or "mixed"), the mean number of their rows, and of
    the distinct experts of a layer that a step's tokens went to, of all that a layer has."""

    kind: str
    steps: int
    rows: float
    experts: float
    of: int

    def line(self) -> str:
        return (
            f"{self.kind} steps of {self.rows:.1f} rows touch {self.experts:.1f} of {self.of} "
            "experts in a layer"
        )


def count_touched(model: CausalLM, load: Sequence[BenchRequest], rows: int) -> list[Touched]:
    """Count the experts that some steps touch, in an engine beside the one that is timed.

    The first `rows` requests run, their prompts and outputs cut short, one step at a time and
    without CUDA graphs.
    """
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=_PROMPT_TOKENS + _DECODE_STEPS + 1,
        kv_cache_gib=2.5 if DEVICE.type == "cuda" else 0.02,
        prefix_caching=False,
        cuda_graph=False,
        overlap=False,
    )
    timer = StepTimer(model.device)
    engine = LLMEngine(model, None, (), ARStrategy(), config, timer=timer)
    timer.reset()
    layers, touched = expert_layers(model), list[Tensor]()
    family = model.config.family_as(MoEConfig)

    def count(layer: nn.Module, _: object, logits: Tensor) -> None:
        ids, _weights = route(logits, family.experts_per_token, renormalise=False)
        used = torch.zeros(logits.shape[1], device=logits.device)
        touched.append(used.index_fill_(0, ids.flatten().long(), 1).sum())

    hooks = [layer.gate.register_forward_hook(count) for layer in layers]
    params = SamplingParams(temperature=0.6, max_new_tokens=_DECODE_STEPS, ignore_eos=True)
    run_rows(
        engine,
        [(r.prompt[:_PROMPT_TOKENS], replace(params, seed=i)) for i, r in enumerate(load[:rows])],
    )
    for hook in hooks:
        hook.remove()
    steps = timer.steps()
    of_steps = torch.stack(touched).view(len(steps), len(layers)).mean(1).tolist()
    found = []
    for kind in dict.fromkeys(step.kind for step in steps):
        own = [i for i, step in enumerate(steps) if step.kind == kind]
        mean_rows = statistics.mean(steps[i].rows for i in own)
        mean_touched = statistics.mean(of_steps[i] for i in own)
        found.append(Touched(kind, len(own), mean_rows, mean_touched, family.num_experts))
    return found
