"""Layers of experts with random weights, for the benchmarks of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from bench_layers import microseconds
from device_rates import Rates
from torch import Tensor

from batchgen.kernels.moe.router.routing_triton import route_triton
from batchgen.kernels.moe.tiled_layout import panels_shape

DTYPE = torch.bfloat16
_ROUTINGS = 4
"""Ways in which the same tokens are routed, one launch after another."""
_GRAPH_SECONDS = 0.005
"""About how long a replay should take; launches of the shortest kernels are as many as 64."""


class Shape(NamedTuple):
    """The experts of one layer.

    Attributes:
        experts: how many there are.
        k: how many a token goes to.
        hidden: values of a token.
        inner: values between the two products of an expert.
    """

    experts: int
    k: int
    hidden: int
    inner: int


SHAPES = {
    "30b-a3b": Shape(128, 8, 2048, 768),
    "35b-a3b": Shape(256, 8, 2048, 512),
    "v2-lite": Shape(64, 6, 2048, 1408),
}


class Layer(NamedTuple):
    """Random weights of one layer: the panels of gate_up [E, 2·I, H] and of down [E, H, I]."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def make(cls, shape: Shape) -> Layer:
        gate_up = panels_shape(shape.experts, 2 * shape.inner, shape.hidden, DTYPE)
        down = panels_shape(shape.experts, shape.hidden, shape.inner, DTYPE)
        return cls(random(*gate_up).mul_(shape.hidden**-0.5), random(*down).mul_(shape.inner**-0.5))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


class Batch(NamedTuple):
    """Tokens and how they are routed.

    Attributes:
        x: [T, H].
        logits: of each routing, [T, E].
        ids, weights: of each routing, [T, k] int32 and float32.
    """

    x: Tensor
    logits: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def make(cls, shape: Shape, tokens: int) -> Batch:
        logits = [random(tokens, shape.experts) for _ in range(_ROUTINGS)]
        routed = [route_triton(some, shape.k, renormalise=True) for some in logits]
        x = random(tokens, shape.hidden)
        return cls(x, logits, [ids for ids, _ in routed], [weights for _, weights in routed])

    def touched(self) -> float:
        """The mean number of experts that the tokens go to."""
        counts = [len(ids.unique()) for ids in self.ids]
        return sum(counts) / len(counts)


def floor_microseconds(shape: Shape, batch: Batch, rates: Rates) -> tuple[float, float]:
    """The least time of both products: to read the weights of the experts that tokens go to, and to
    multiply by them."""
    weights = 3 * shape.hidden * shape.inner
    read = batch.touched() * weights * DTYPE.itemsize / rates.bandwidth
    multiply = 2 * weights * batch.ids[0].numel() / rates.flops
    return read * 1e6, multiply * 1e6


def timed(run: Callable[[int], object]) -> float:
    """The microseconds of run(i), for i of the routings in turn."""
    runs: list[Callable[[], object]] = [partial(run, i) for i in range(_ROUTINGS)]
    once = microseconds(runs, _ROUTINGS)
    return microseconds(runs, max(_ROUTINGS, min(64, int(_GRAPH_SECONDS * 1e6 / once))))


def buffers(shape: Shape, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer computes of these tokens: after gate and up, after down, and the sums."""
    slots = batch.ids[0].numel()
    return (
        random(slots, shape.inner),
        random(slots, shape.hidden),
        torch.empty_like(batch.x),
    )
