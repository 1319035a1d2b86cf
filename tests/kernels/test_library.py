"""What is found out of the library's products at start."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.library import Product, first_unsteady

CPU = torch.device("cpu")


def by_row(x: Tensor) -> Tensor:
    return x * 2


def by_batch(x: Tensor) -> Tensor:
    return x * (1 + 2**-7 * (len(x) < 17))


def test_the_first_product_is_named_whose_rows_depend_on_their_number() -> None:
    steady, unsteady = Product("one", 8, by_row), Product("another", 4, by_batch)
    assert first_unsteady([steady, steady], CPU) is None
    assert first_unsteady([steady, unsteady], CPU) == "another, at 1 rows"
