"""From the tensors of a step to the host."""

from __future__ import annotations

import numpy as np
import torch

from batchgen.engine.interface.outputs import HostCopy, StepOutput


def test_names_of_columns_and_counts_are_free() -> None:
    """A column may be called as a field of the step, or as a count."""
    names = ("num_tokens", "token_ids", "failed", "conflicts", "columns")
    step = StepOutput(
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([[3, 4], [5, 6]]),
        torch.tensor([False, True]),
        columns={name: torch.full((2, 2), i + 0.5) for i, name in enumerate(names)},
        counts={name: torch.tensor([i, 10 + i]) for i, name in enumerate(names)},
        observed={name: torch.tensor([True, bool(i)]) for i, name in enumerate(names)},
        unread_tokens=4,
    )
    host = HostCopy(step).wait()
    assert host.num_tokens.tolist() == [1, 2] and host.token_ids.tolist() == [[3, 4], [5, 6]]
    assert host.failed.tolist() == [False, True] and host.conflicts is None
    assert host.unread_tokens == 4
    for i, name in enumerate(names):
        np.testing.assert_array_equal(host.columns[name], np.full((2, 2), i + 0.5, np.float32))
        assert host.counts[name].tolist() == [i, 10 + i]
        assert host.observed[name].tolist() == [True, bool(i)]


def test_one_row_of_a_strided_tensor_is_copied() -> None:
    step = StepOutput(
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([[7, 8, 9]])[:, 1:2],
        torch.tensor([False]),
        counts={"drafts": torch.tensor([[4, 5, 6]], dtype=torch.int32)[:, 1]},
    )
    host = HostCopy(step).wait()
    assert host.token_ids.tolist() == [[8]]
    assert host.counts["drafts"].tolist() == [5]
