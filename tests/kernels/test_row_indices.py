"""`row_indices` is `torch.repeat_interleave`."""

import pytest
import torch

from batchgen.kernels.row_indices import row_indices


@pytest.mark.parametrize("counts", [[], [0], [3], [2, 0, 3], [0, 0, 1, 0], [1] * 70, [400, 1, 7]])
def test_every_index_comes_as_often_as_its_count_says(counts: list[int]) -> None:
    given = torch.tensor(counts, dtype=torch.int64)
    assert torch.equal(row_indices(given), torch.repeat_interleave(given))
