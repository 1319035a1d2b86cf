"""The inputs and the records of the gated delta rule (`delta_rule.py`), and of Mamba2's rule, which
is the same without erasing."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before they are normalised."""


class DeltaInputs(NamedTuple):
    """T tokens, as the projections and the convolution leave them. The last axes are contiguous.

    q and k are divided by sqrt(Σx² + 1e-6), and q by sqrt(dk) as well. Each key head serves nv / nk
    adjacent value heads. The decay is d = exp(−exp(a_log) · softplus(a + dt_bias)), the writing
    strength β = sigmoid(b).

    Without b the rule is Mamba2's: q and k are not normalised, and β = softplus(a + dt_bias).
    """

    qkv: Tensor  # [T, 2 · nk · dk + nv · dv]: nk heads of q, nk of k, nv of v
    a: Tensor  # [T, nv]
    b: Tensor | None  # [T, nv]
    a_log: Tensor  # [nv] float32
    dt_bias: Tensor  # [nv] float32
    skip: Tensor | None = None  # [nv] float32, how much of its value a token adds to its output

    def take(self, tokens: slice | Tensor) -> DeltaInputs:
        """Return the inputs of some tokens."""
        b = None if self.b is None else self.b[tokens]
        return self._replace(qkv=self.qkv[tokens], a=self.a[tokens], b=b)


class DeltaRecords(NamedTuple):
    """What decode steps did to the state: contiguous float32 rings of N tokens for each of R
    slots."""

    update: Tensor  # [R, N, nv, dv], u of each token
    key: Tensor  # [R, N, nk, dk], the normalised keys
    decay: Tensor  # [R, N, nv], d of each token
