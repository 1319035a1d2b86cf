"""What the layers of one forward need besides their activations; passed on, never global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """The R tokens that the model's hidden states are wanted of.

    Attributes:
        index: [R] int64, their places among the T tokens of the forward.
        attention: of their queries alone, part by part.
    """

    index: Tensor
    attention: Sequence[AttentionMetadata]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Attributes:
    kv_caches: one per layer.
    slots: [T] int64, where each token's KV is written.
    attention: which cached tokens each query reads, for one part of the tokens after another.
    outputs: None stands for all tokens.
    """

    kv_caches: list[KVCache]
    slots: Tensor
    attention: Sequence[AttentionMetadata]
    outputs: OutputTokens | None = None
