"""Triton functions that compute a token's decay and writing strength in the gated delta rule
(`delta_rule.py`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_decay_of(a, a_log, dt_bias):
    """Return −exp(a_log) · softplus(a + dt_bias), accurate for small results too."""
    return -tl.exp(a_log) * time_step_of(a, dt_bias)


@triton.jit
def time_step_of(a, dt_bias):
    """Return softplus(a + dt_bias), the writing strength of Mamba2's rule."""
    x = a.to(tl.float32) + dt_bias
    power = tl.exp(tl.minimum(x, 20.0))
    # log(1 + p) as log(u) · p / (u − 1) with u = 1 + p, so that the rounding of u cancels.
    above = 1.0 + power
    log1p = tl.where(above == 1.0, power, tl.log(above) * (power / tl.maximum(above - 1.0, 1e-30)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def strength_of(b):
    """Return sigmoid(b), the writing strength of the gated delta rule."""
    return 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
