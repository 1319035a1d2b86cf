"""`Expansion`: the interface of the linear map that expands latents to keys and values.

A *latent* is the short vector that latent attention caches for each token (`mla_attention.py`). The
engine's attention layer implements the map.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Expansion(Protocol):
    """The linear map from a latent of L values to a key of N values and a value of V values per
    head."""

    @property
    def value_size(self) -> int:
        """V, the length of a head's value."""

    def absorb(self, q: Tensor) -> Tensor:
        """Multiply queries [T, heads, N] by the map's keys: return queries [T, heads, L] that
        attend to latents."""

    def values(self, mixed: Tensor, out: Tensor | None = None) -> Tensor:
        """Expand weighted sums of latents [T, heads, L] to weighted sums of values [T, heads,
        V]."""

    def expand(self, latents: Tensor) -> Tensor:
        """Expand latents [S, L] to [S, heads, N + V], in each head the key and then the value."""
