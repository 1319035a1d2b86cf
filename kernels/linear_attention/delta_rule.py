"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"), and Mamba2's
rule (Dao and Gu 2024, arXiv 2405.21060), which is the same without erasing.

Each of nv value heads keeps a matrix S [dv, dk] per row. A token with key k, query q (both [dk]),
value v [dv], decay 0 < d ≤ 1 and writing strength 0 < β < 1 changes S, then reads it:

    S ← d · S
    u = β · (v − S·k)
    S ← S + u ⊗ k
    o = S·q

Mamba2's rule writes u = β · v, without subtracting S·k, and adds to the output the token's own
value times a number D per head: o = S·q + D · v.

`delta_step` computes this token by token, `delta_prefill` with matrix products in chunks of tokens,
which round differently. `delta_replay` runs many tokens one by one.
"""

from __future__ import annotations

from torch import Tensor

from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_prefill_triton import delta_prefill_triton
from batchgen.kernels.linear_attention.delta_reference import (
    delta_prefill_reference,
    delta_step_reference,
)
from batchgen.kernels.linear_attention.delta_step_triton import delta_step_triton
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows


def delta_step(inputs: DeltaInputs, state: Tensor, records: DeltaRecords, rows: StepRows) -> Tensor:
    """Run the W tokens of each row from the state in its slot and the row's pending records.

    The inputs are B · W tokens, row by row. `state` [S, nv, dv, dk] float32, each slot's
    contiguous, and the rows' records are overwritten as `StepRows` says.

    Returns o of each token [B · W, nv, dv] in qkv's dtype. On a CPU, folding the records of tokens
    gives exactly the state that a step of these tokens reaches. On a GPU the pending records are
    summed in another order, so rows whose states were written back at other times differ by
    rounding.
    """
    run = delta_step_triton if state.is_cuda else delta_step_reference
    return run(inputs, state, records, rows)


def delta_prefill(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """Run T tokens of the rows in chunks of 64, from the states in the rows' slots or from zeros.

    `state` [S, nv, dv, dk] float32, each slot's contiguous, is overwritten as `PrefillRows` says.

    Returns o of each token [T, nv, dv] in qkv's dtype. On a GPU the factors of matrix products are
    rounded to that dtype; sums and states stay in float32.
    """
    run = delta_prefill_triton if state.is_cuda else delta_prefill_reference
    return run(inputs, state, rows)
