"""What the layers of one forward need besides their activations; passed on, never global."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchgen.kernels.attention import AttentionMetadata
from batchgen.kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Attributes:
    kv_caches: one per layer.
    slots: [T] int64, where each token's KV is written.
    attention: which cached tokens each query reads.
    """

    kv_caches: list[KVCache]
    slots: Tensor
    attention: AttentionMetadata
