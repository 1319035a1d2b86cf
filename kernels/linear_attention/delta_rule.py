"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks").

Each of nv value heads keeps a matrix S [dv, dk] for each row. A token with key k, query q (both
[dk]), value v [dv], decay 0 < d ≤ 1 and writing strength 0 < β < 1 changes it, and reads it:

    S ← d · S
    u = β · (v − S·k)
    S ← S + u ⊗ k
    o = S·q

There are two forms. `delta_step` does this token by token, `delta_prefill` for chunks of tokens
with matrix products. Their results differ in how they are rounded. `delta_replay` reads many tokens
in the first form.
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

    On a CPU, to fold the records of some tokens gives the very bits of the state that a step of
    these tokens reaches. On a GPU the pending records are summed in another order, so that the
    results of rows whose states were written back at other times differ by roundings.

    Args:
        inputs: B · W tokens, row by row.
        state: [S, nv, dv, dk] float32, each slot's contiguous; overwritten as `StepRows` says.
        records: those of the slots; overwritten.
        rows: the B rows.

    Returns:
        [B · W, nv, dv], dtype of `inputs.qkv`, contiguous: o of each token.
    """
    run = delta_step_triton if state.is_cuda else delta_step_reference
    return run(inputs, state, records, rows)


def delta_prefill(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """Run the tokens of each row from the state in its slot, or from zeros, in chunks of 64.

    On a GPU the factors of matrix products are rounded to the dtype of `inputs.qkv`; the sums and
    the state stay in float32.

    Args:
        inputs: T tokens, row by row.
        state: [S, nv, dv, dk] float32, each slot's contiguous; overwritten as `PrefillRows` says.
        rows: the B rows.

    Returns:
        [T, nv, dv], dtype of `inputs.qkv`, contiguous: o of each token.
    """
    run = delta_prefill_triton if state.is_cuda else delta_prefill_reference
    return run(inputs, state, rows)
