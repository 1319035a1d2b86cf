"""Turns layers to FP8 before their weights are loaded."""

from __future__ import annotations

from torch import nn

from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.moe import Experts
from batchgen.engine.layers.weight_slot import named_parts


def quantise_layer(layer: nn.Module, path: str, form: FP8Format) -> None:
    """Keep the weights of a layer's projections and experts in FP8, as `FP8Format` says.

    Args:
        layer: a layer of a decoder, whose weights are not loaded yet.
        path: the layer's name in checkpoints.
        form: how, and which modules are not.

    Raises:
        ValueError: the form excludes some of several modules that are computed together.
    """
    for place, part in named_parts(layer, path):
        if isinstance(part, Linear | Experts):
            part.quantise(form, place)
