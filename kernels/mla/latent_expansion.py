"""The linear map that expands a token's latent to keys and values, as attention needs it. A
*latent* is the short vector that latent attention caches of each token (`mla_attention.py`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Expansion(Protocol):
    """The linear map from a latent of L values to N values of a key and V of a value per head."""

    @property
    def value_size(self) -> int:
        """V, the number of values of a head's value."""

    def absorb(self, q: Tensor) -> Tensor:
        """Turn queries [T, heads, N] of keys into queries [T, heads, L] of latents."""

    def values(self, mixed: Tensor, out: Tensor | None = None) -> Tensor:
        """Turn mixtures [T, heads, L] of latents into mixtures [T, heads, V] of values."""

    def expand(self, latents: Tensor) -> Tensor:
        """Expand latents [S, L] to [S, heads, N + V], in each head the key and then the value."""
