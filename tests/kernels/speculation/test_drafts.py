"""The bookkeeping of a speculative step: Triton against the reference, and that against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.speculation import drafts as speculation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = ["reference", "triton"]


def there(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.sampled_from([1, 3, 130, 200]), k=st.integers(1, 7))
def test_a_step_is_what_a_loop_over_its_rows_says(form: str, seed: int, rows: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    newest, drafts = rng.integers(0, 9, rows), rng.integers(0, 3, (rows, k))
    counts = rng.integers(0, k + 1, rows)
    positions = rng.integers(0, 100, rows)
    limits = positions + rng.integers(0, 2 * k, rows)
    place = getattr(speculation, f"place_drafts_{form}")
    input_ids, ahead, kept = place(
        there(newest), there(drafts), there(counts, torch.int32), there(positions), there(limits)
    )
    assert input_ids.view(rows, -1).tolist() == np.column_stack((newest, drafts)).tolist()
    wanted = np.minimum(positions[:, None] + np.arange(k + 1), limits[:, None])
    assert ahead.view(rows, -1).tolist() == wanted.tolist()
    # The last token that a row can have is the model's own.
    room = np.maximum(limits - positions - 1, 0)
    assert kept.tolist() == np.minimum(counts, room).tolist() and kept.dtype == torch.int32

    sampled = np.where(rng.random((rows, k + 1)) < 0.7, np.column_stack((drafts, newest)), 8)
    valid = (rng.random((rows, k + 1)) < 0.9).astype(np.int32)
    accept = getattr(speculation, f"accept_drafts_{form}")
    # As a column slice, which leaves the rows further apart than k.
    wide = there(np.column_stack((newest, drafts)))[:, 1:]
    num_tokens, failed = accept(
        there(sampled.reshape(-1, 1)), there(valid.reshape(-1), torch.int32), wide, kept
    )
    for i in range(rows):
        tokens, broken = 0, False
        for j in range(k + 1):
            if not valid[i, j]:
                broken = True
                break
            tokens += 1
            if j == kept[i] or sampled[i, j] != drafts[i, j]:
                break
        assert (int(num_tokens[i]), bool(failed[i])) == (tokens, broken)

    steps = rng.integers(0, 50, rows)
    advance = getattr(speculation, f"advance_{form}")
    last, moved, counted = advance(
        there(sampled), num_tokens, there(positions), there(limits), there(steps, torch.int32)
    )
    for i in range(rows):
        assert last[i] == sampled[i, max(int(num_tokens[i]) - 1, 0)]
        assert moved[i] == min(positions[i] + int(num_tokens[i]), limits[i])
        assert counted[i] == steps[i] + 1
