"""Routing in benchmarks of random weights, by routers or not, and the experts a step touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from workloads import BenchRequest

from batchgen.engine.base.engine_config import EngineConfig
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
_PROMPT_TOKENS = 64
_DECODE_STEPS = 16


class Chance:
    """Random logits for the routers of all layers, others in each forward.

    They come from torch's generator of the device, whose state a CUDA graph advances at each
    replay. In a forward of few tokens those of all layers are drawn by one launch, since one in
    each layer would take time that no router takes.

    Args:
        num_layers: how many routers ask for logits in a forward, always in the same order.
        num_experts: E.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_layers, self._num_experts = num_layers, num_experts
        self._drawn: Tensor | None = None
        self._last = num_layers

    def logits(self, layer: int, tokens: int, device: torch.device) -> Tensor:
        """Return [tokens, E] float32 for the router of this index."""
        if tokens > _MOST_DRAWN:
            return torch.rand((tokens, self._num_experts), device=device)
        # The logits of a layer are used once; the last layer may have fewer tokens than the others.
        if layer <= self._last or self._drawn is None or self._drawn.shape[1] != tokens:
            shape = (self._num_layers, tokens, self._num_experts)
            self._drawn = torch.rand(shape, device=device)
        self._last = layer
        return self._drawn[layer]


class ForcedRouter(nn.Module):
    """Takes the place of a router; its logits are all equal, or those of chance.

    The router's own product is computed all the same, since its time counts.

    Args:
        router: the model's own.
        num_experts: E.
        layer: the index of this router among all.
        chance: draws the logits; None makes them all equal.
    """

    def __init__(
        self, router: nn.Module, num_experts: int, layer: int, chance: Chance | None
    ) -> None:
        super().__init__()
        self.router, self.num_experts = router, num_experts
        self._layer, self._chance = layer, chance

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, num_experts] float32 for x [T, hidden_size]."""
        self.router(x)
        if self._chance is None:
            return torch.zeros((len(x), self.num_experts), device=x.device)
        return self._chance.logits(self._layer, len(x), x.device)


def expert_layers(model: nn.Module) -> list[SparseMoE]:
    """Return the parts of a model that have experts, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, SparseMoE)]


def set_routing(model: CausalLM, routing: Routing) -> None:
    """Let this choose the experts of tokens from now on, in the model and its heads; chance does so
    in the same ways after every start.

    Only a model whose weights are random should be treated so.

    Raises:
        ValueError: if the model has no experts, and its own routers are not wanted.
    """
    if routing == "model":
        return
    layers = [layer for part in (model, *model.heads.values()) for layer in expert_layers(part)]
    if not layers:
        raise ValueError(f"{routing} routing is for models with experts, and this one has none")
    torch.manual_seed(0)
    num_experts = model.config.family_as(MoEConfig).num_experts
    chance = Chance(len(layers), num_experts) if routing == "uniform" else None
    for index, layer in enumerate(layers):
        layer.add_module("gate", ForcedRouter(layer.gate, num_experts, index, chance))


@dataclass(frozen=True, slots=True)
class Touched:
    """The experts that the steps of one kind touched.

    Attributes:
        kind: "prefill", "decode" or "mixed".
        steps: how many steps there were.
        rows: the mean number of rows of a step.
        experts: the mean number of distinct experts of a layer that a step's tokens went to.
        of: how many experts a layer has.
    """

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


def count_touched(
    model: CausalLM, load: Sequence[BenchRequest], rows: int, kv_cache_gib: float
) -> list[Touched]:
    """Count the experts that some steps touch, in an engine beside the one that is timed.

    Args:
        model: with experts; random weights.
        load: the requests of a workload; the first `rows` of them are run, their prompts and
            outputs cut short, one step at a time and without CUDA graphs.
        rows: how many.
        kv_cache_gib: the size of the KV cache.
    """
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=_PROMPT_TOKENS + _DECODE_STEPS + 1,
        kv_cache_gib=kv_cache_gib,
        prefix_caching=False,
        cuda_graph=False,
        overlap=False,
    )
    timer = StepTimer(model.device)
    engine = LLMEngine(model, None, (), ARStrategy(), config, timer=timer)
    timer.reset()
    layers, touched = expert_layers(model), list[Tensor]()

    def count(layer: nn.Module, _: object, logits: Tensor) -> None:
        ids, _weights = route(logits, k, renormalise=False)
        used = torch.zeros(logits.shape[1], device=logits.device)
        touched.append(used.index_fill_(0, ids.flatten().long(), 1).sum())

    family = model.config.family_as(MoEConfig)
    k, experts = family.experts_per_token, family.num_experts
    hooks = [layer.gate.register_forward_hook(count) for layer in layers]
    params = SamplingParams(temperature=0.6, max_new_tokens=_DECODE_STEPS, ignore_eos=True)
    for index, request in enumerate(load[:rows]):
        prompt = request.prompt[:_PROMPT_TOKENS]
        engine.add_request(str(index), prompt, replace(params, seed=index))
    while engine.has_unfinished():
        engine.step()
    for hook in hooks:
        hook.remove()
    steps = timer.steps()
    of_steps = torch.stack(touched).view(len(steps), len(layers)).mean(1).tolist()
    found = []
    for kind in dict.fromkeys(step.kind for step in steps):
        own = [i for i, step in enumerate(steps) if step.kind == kind]
        mean_rows = sum(steps[i].rows for i in own) / len(own)
        mean_touched = sum(of_steps[i] for i in own) / len(own)
        found.append(Touched(kind, len(own), mean_rows, mean_touched, experts))
    return found
