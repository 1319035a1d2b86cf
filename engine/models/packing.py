"""Converts loaded weights to the layout for computing, and tests whether this CPU's matrix products
give a row the same bits in any batch. `TokenModel.pack` calls this when an engine starts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from batchgen.engine.caches.cache_specs import AttentionSpec
from batchgen.engine.layers.cpu_products import CPUProducts
from batchgen.engine.layers.embedding import Embedding
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.kernels.attention.attention_reference import cpu_row_multiple
from batchgen.kernels.rules import BitRules


def pack_layers(
    model: nn.Module,
    attention: Iterable[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    rules: BitRules,
) -> str | None:
    """Convert the weights of linear layers and experts to the layout for computing. Afterwards they
    cannot be loaded again.

    On a CPU, the libraries decide whether a row's bits depend on its batch. So each shape of
    product is tried with torch's current threads, and a method that keeps the bits is chosen if
    there is one. This takes as long as 800 tokens in one layer and the head.

    Args:
        rules: what the bits of a row may depend on, for the linear layers.

    Returns:
        Why a token's bits depend on its batch, as a sentence for the user. None if they do not, and
            on a GPU, where the rules decide.
    """
    products = CPUProducts()
    for module in model.modules():
        if isinstance(module, Linear | Embedding | Experts | KVExpansion):
            module.pack(products)
        if isinstance(module, Linear):
            module.rules = rules
    if device.type != "cpu":
        return None
    unsteady = products.unsteady
    for shape in attention:
        if cpu_row_multiple(shape.num_kv_heads, shape.head_dim, dtype) is None:
            unsteady.append(f"attention with heads of {shape.head_dim}")
    if not unsteady:
        return None
    threads = torch.get_num_threads()
    return (
        f"with {threads} thread{'s' if threads > 1 else ''} this CPU's matrix products round a "
        f"row differently in a batch than alone ({', '.join(unsteady)})"
    )
