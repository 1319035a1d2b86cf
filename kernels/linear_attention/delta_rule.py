"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"), and Mamba2's
(Dao and Gu 2024, arXiv 2405.21060), which is the same without erasing.

Each of nv value heads keeps a matrix S [dv, dk] for each row. A token with key k, query q (both
[dk]), value v [dv], decay 0 < d ≤ 1 and writing strength 0 < β < 1 changes it, and reads it:

    S ← d · S
    u = β · (v − S·k)
    S ← S + u ⊗ k
    o = S·q

Mamba2 adds β · v without taking S·k out of it, and the token's own value to its output, times a
number of the head: u = β · v and o = S·q + D · v.

`delta_step` does this token by token, `delta_prefill` for chunks of tokens with matrix products,
which round otherwise. `delta_replay` reads many tokens in the first form.
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
    """Run W tokens of each row from the state in its slot and the records that are pending.

    The inputs are B · W tokens, row by row. `state` [S, nv, dv, dk] float32, each slot's
    contiguous, is overwritten as `StepRows` says, and the rows' records are. Returns o of each
    token [B · W, nv, dv] in qkv's dtype. On a CPU, folding the records of tokens gives the very
    bits of the state that a step of these tokens reaches. On a GPU the pending records are summed
    in another order, so rows whose states were written back at other times differ by roundings.
    """
    run = delta_step_triton if state.is_cuda else delta_step_reference
    return run(inputs, state, records, rows)


def delta_prefill(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """Run T tokens of the rows from the states in their slots, or from zeros, in chunks of 64.

    `state` [S, nv, dv, dk] float32, each slot's contiguous, is overwritten as `PrefillRows` says.
    Returns o of each token [T, nv, dv] in qkv's dtype. On a GPU the factors of matrix products are
    rounded to that dtype; sums and states stay in float32.
    """
    run = delta_prefill_triton if state.is_cuda else delta_prefill_reference
    return run(inputs, state, rows)
