"""What the gated delta rule reads and keeps: see delta_rule.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NORM_EPS = 1e-6
"""What is added to the squared length of queries and keys when they are normalised."""


class DeltaInputs(NamedTuple):
    """T tokens, as the projections and the convolution leave them. The last axes are contiguous.

    Attributes:
        qkv: [T, 2 · nk · dk + nv · dv]: the nk heads of q, those of k, and the nv heads of v.
            q and k are divided by sqrt(Σx² + 1e-6), and q is divided by sqrt(dk) as well. Each key
            head serves nv / nk value heads that stand one behind the other.
        a: [T, nv]; the decay is d = exp(−exp(a_log) · softplus(a + dt_bias)).
        b: [T, nv]; the writing strength is β = sigmoid(b).
        a_log: [nv] float32.
        dt_bias: [nv] float32.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor


class DeltaRecords(NamedTuple):
    """What the tokens of decode steps do to the states: a ring of N tokens for each of R slots.

    All are float32 and contiguous.

    Attributes:
        update: [R, N, nv, dv], u of each token.
        key: [R, N, nk, dk], the normalised keys.
        decay: [R, N, nv], d of each token.
    """

    update: Tensor
    key: Tensor
    decay: Tensor
