"""The gated delta rule token by token over rows of any length, on a CPU.

When a row has lost its state, the tokens that decode steps computed must be computed again token by
token, because the chunked form rounds differently. Where steps leave records pending, as on a GPU,
decode steps recompute them (`delta_step`) and this module is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_reference import delta_step_reference
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows

_WIDTH = 64
"""The most tokens per decode step."""


def delta_replay(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """Run the tokens of each row one by one, from the state in its slot or from zeros.

    Arguments are those of `delta_prefill`; the rows have no snapshots. Outputs and states have the
    bits of decode steps that fold every token's record at once.
    """
    assert rows.snapshots is None
    _, value_heads, value_dim, key_dim = state.shape
    key_heads = (inputs.qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    shapes = ((value_heads, value_dim), (key_heads, key_dim), (value_heads,))
    records = DeltaRecords(*(state.new_empty((1, 2 * _WIDTH, *shape)) for shape in shapes))
    out = inputs.qkv.new_zeros((len(inputs.qkv), value_heads, value_dim))
    first, none = 0, torch.zeros(1, dtype=torch.int32)
    for row, length in enumerate(rows.lengths()):
        slot, end = int(rows.slots[row]), first + length
        slot_state = state[slot : slot + 1]
        if length and not rows.positions[first]:
            slot_state.zero_()
        # One row, whose slot is 0 in `slot_state` and in `records`. Its tokens are run up to 64 at
        # a time; each step folds the records of the step before.
        step = StepRows(none.long(), pending=none.clone(), first=none.clone(), width=0, fold=1)
        for start in range(first, end, _WIDTH):
            tokens = slice(start, min(end, start + _WIDTH))
            width = tokens.stop - start
            out[tokens] = delta_step_reference(
                inputs.take(tokens), slot_state, records, step._replace(width=width)
            )
            step.first.add_(step.pending).remainder_(2 * _WIDTH)
            step.pending.fill_(width)
        # A step without tokens folds the last records.
        delta_step_reference(inputs.take(slice(0, 0)), slot_state, records, step)
        first = end
    return out
