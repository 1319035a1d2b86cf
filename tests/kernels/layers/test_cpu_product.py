"""What is tried of a CPU's products, and what is done where they do not keep a row's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.attention import cpu_rows
from batchgen.kernels.layers import cpu_product
from batchgen.kernels.layers import linear as linear_module
from batchgen.kernels.layers.cpu_product import (
    CPUProduct,
    choose_product,
    few_keep_bits,
    product_keeps_bits,
)
from batchgen.kernels.layers.linear import MOST_ROWS, linear, pack_weight

HALF = torch.linspace(-1, 1, 48 * 40).sin().view(48, 40)
WEIGHT = torch.cat((HALF, HALF.flip(1)), 1)  # small sums, which 16 bits hold with their rounding
X = torch.linspace(-2, 2, 300 * 80).cos().view(300, 80)


def steady(x: Tensor) -> Tensor:
    """Each element by itself, one term after another."""
    out = torch.zeros(len(x), len(WEIGHT), dtype=x.dtype)
    for k in range(x.shape[1]):
        out += x[:, k : k + 1] * WEIGHT[:, k]
    return out


def otherwise(x: Tensor) -> Tensor:
    """Sums that are added in another order."""
    half = x.shape[1] // 2
    zeros = torch.zeros_like(x[:, :half])
    return steady(torch.cat((x[:, :half], zeros), 1)) + steady(torch.cat((zeros, x[:, half:]), 1))


def other_from(rows: int) -> Callable[[Tensor], Tensor]:
    return lambda x: steady(x) if len(x) < rows else otherwise(x)


def other_last_rows(x: Tensor) -> Tensor:
    """As a kernel that computes 14 rows at a time and the rest in another way."""
    whole = len(x) // 14 * 14
    return torch.cat((steady(x[:whole]), otherwise(x[whole:])))


def test_steady_products_keep_bits() -> None:
    assert product_keeps_bits(steady, 80, torch.float32, 64)
    assert product_keeps_bits(otherwise, 80, torch.float32, 64)


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_a_product_that_changes_with_the_number_of_rows_is_found(rows: int) -> None:
    assert not product_keeps_bits(other_from(rows), 80, torch.float32, 128)
    assert product_keeps_bits(other_from(rows), 80, torch.float32, rows - 16)


@pytest.mark.parametrize("most_rows", [16, 128])
def test_a_product_that_changes_with_a_row_s_place_is_found(most_rows: int) -> None:
    assert not product_keeps_bits(other_last_rows, 80, torch.float32, most_rows)


def test_a_product_that_changes_before_it_is_rounded_to_16_bits_is_found() -> None:
    def rounded(x: Tensor) -> Tensor:
        return other_from(64)(x.float()).bfloat16()

    assert not product_keeps_bits(rounded, 80, torch.bfloat16, 128)


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 128, 129, 300])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("most_rows", [16, MOST_ROWS, None])
def test_linear_in_pieces(rows: int, packed: bool, most_rows: int | None) -> None:
    weight, bias = pack_weight(WEIGHT) if packed else WEIGHT, X[0, :48]
    out = linear(X[:rows], weight, bias, most_rows)
    assert out.shape == (rows, 48)
    torch.testing.assert_close(out, F.linear(X[:rows], WEIGHT, bias))


@pytest.mark.parametrize("bias", [None, X[0, :48]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_chosen_keeps_bits(dtype: torch.dtype, bias: Tensor | None) -> None:
    weight, x = WEIGHT.to(dtype), X.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    product = choose_product(weight, bias)
    if product.most_rows is None:
        pytest.skip("this CPU has no such product")
    laid_out = pack_weight(weight) if product.packed else weight
    whole = linear(x, laid_out, bias, product.most_rows)
    for start, stop in ((0, 1), (3, 4), (1, 90), (100, 300)):
        part = linear(x[start:stop].clone(), laid_out, bias, product.most_rows)
        assert torch.equal(part, whole[start:stop])


def test_products_in_small_pieces_where_large_ones_change(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def only_small(product: object, features: int, dtype: object, most_rows: int) -> bool:
        tried.append(most_rows)
        return most_rows == 16

    monkeypatch.setattr(cpu_product, "product_keeps_bits", only_small)
    assert choose_product(WEIGHT, None) == CPUProduct(False, 16)
    assert set(tried) == {16, MOST_ROWS}
    monkeypatch.setattr(cpu_product, "_SMALL_WEIGHT", 0)
    assert choose_product(WEIGHT, None) == CPUProduct(pack_weight(WEIGHT) is not WEIGHT, 16)


def test_layouts_are_tried_by_the_size_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    if pack_weight(WEIGHT) is WEIGHT:
        pytest.skip("there is one layout on this CPU")
    for small, first in ((WEIGHT.numel(), False), (WEIGHT.numel() - 1, True)):
        monkeypatch.setattr(cpu_product, "_SMALL_WEIGHT", small)
        assert [packed for packed, _, _ in cpu_product._ways(WEIGHT)][:2] == [first, not first]


def test_whole_products_where_none_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_product, "product_keeps_bits", lambda *_: False)
    assert choose_product(WEIGHT, None).most_rows is None


def test_a_weight_that_onednn_refuses_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: Tensor, rows: int) -> Tensor:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    assert pack_weight(WEIGHT) is WEIGHT
    assert not choose_product(WEIGHT, None).packed


def test_batched_products_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows than 8, unless they are a multiple of 16."""
    real = torch.bmm

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        rows, half = a.shape[1], a.shape[2] // 2
        if rows <= 8 or rows % 16 == 0:
            return real(a, b)
        return real(a[..., :half], b[:, :half]) + real(a[..., half:], b[:, half:])

    monkeypatch.setattr(torch, "bmm", bmm)
    arguments = (2, 64, 32, 8)
    assert not cpu_rows.attention_keeps_bits(*arguments, multiple=4)
    assert cpu_rows.attention_keeps_bits(*arguments, multiple=16)


def test_rows_of_batched_products() -> None:
    a, b = X[:, :64].reshape(2, 150, 64), X[:128, :40].reshape(2, 64, 40)
    torch.testing.assert_close(cpu_rows.row_batches(a, b), torch.bmm(a, b))


@pytest.mark.parametrize("changes_below", [0, 2, 15])
def test_few_rows_that_are_computed_otherwise_are_found(
    changes_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return otherwise(x) if len(x) < changes_below else steady(x)

    monkeypatch.setattr(linear_module, "_product", product)
    assert few_keep_bits(WEIGHT, CPUProduct(False, 128)) == (changes_below == 0)
    assert not few_keep_bits(WEIGHT, CPUProduct(False, None))


def test_few_rows_are_filled_up_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(linear_module, "_product", product)
    for rows in (1, 15, 16, 17, 40):
        for pad_few in (True, False):
            found = linear(X[:rows], WEIGHT, pad_few=pad_few)
            torch.testing.assert_close(found, X[:rows] @ WEIGHT.T)
    assert seen == [16, 1, 16, 15, 16, 16, 32, 32, 48, 48]
