"""Quantises layers to FP8 or 4 bits before their weights are loaded. `CausalLM` calls this for each
layer that it makes, if the checkpoint or the user asks for it."""

from __future__ import annotations

from batchgen.engine.layers.decoder_layer import DecoderLayer, HasInputProjection
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.mxfp4_format import MXFP4Format, WeightFormat
from batchgen.engine.layers.weight_slot import named_parts


def quantise_layer(layer: DecoderLayer, path: str, form: WeightFormat) -> None:
    """Keep the weights of a layer's projections and experts in FP8 or 4 bits, or only its experts'
    in MXFP4.

    The weights must not be loaded yet. Norms whose results are read only by FP8 modules quantise
    these results. `path` is the layer's name in checkpoints. Raises ValueError if only some modules
    that are computed together are excluded.
    """
    for name, part in named_parts(layer, path):
        if isinstance(part, Experts):
            part.quantise(form, name)
        elif isinstance(part, Linear) and not isinstance(form, MXFP4Format):
            part.quantise(form, name)
    if not isinstance(form, FP8Format):
        return
    for reader, norm in layer.normed_parts:
        if isinstance(reader, HasInputProjection) and reader.input_projection.computes_in_fp8:
            norm.quantise_result(form)
        if isinstance(reader, SparseMoE) and reader.experts.computes_in_fp8:
            # `keep`: the router also reads the result, and not in FP8.
            norm.quantise_result(form, keep=True)
