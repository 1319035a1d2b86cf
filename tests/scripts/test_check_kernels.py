"""check_kernels counts the launches of all kernels, wherever their modules lie."""

import ast
from pathlib import Path

import expert_products
import fp8_products
import pytest
import rank_sums
import torch
from check_kernels import KERNELS, launched_kernels
from expert_products import EXPERTS, IN_PANELS, IN_ROWS, K, differences, token_counts
from fp8_products import expert_tokens, linear_rows

from batchgen.kernels.fp8.fp8_tiles import EXPERTS as FP8_EXPERTS
from batchgen.kernels.fp8.fp8_tiles import LINEAR, expert_tiles, linear_tiles
from batchgen.kernels.moe.moe_align_triton import FEW_SLOTS
from batchgen.kernels.moe.moe_tiles import TABLE, choose_tiles
from batchgen.kernels.moe.tiled_layout import keeps_panels, panels_shape


def launching_files() -> set[Path]:
    """The files under kernels/ in which something is called as `name[...](...)`."""
    return {
        path
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }


def test_kernels_are_found_in_every_file_that_launches_some() -> None:
    found = list(launched_kernels())
    files = {
        KERNELS.joinpath(*module.__name__.split(".")[2:]).with_suffix(".py") for module, _ in found
    }
    assert files == launching_files()
    names = {f"{module.__name__}.{name}" for module, name in found}
    assert "batchgen.kernels.attention.decode._decode_kernel" in names
    assert len(names) == len(found)


def test_the_checked_experts_take_every_line_of_the_table_and_both_sorts() -> None:
    hidden, inner = IN_PANELS
    panels = panels_shape(EXPERTS, 2 * inner, hidden, torch.bfloat16)
    weight = torch.empty(panels, dtype=torch.bfloat16, device="meta")
    slots = [tokens * K for tokens in token_counts()]
    assert {choose_tiles(n, weight) for n in slots} == {tiles for _, tiles in TABLE}
    assert min(slots) <= FEW_SLOTS < max(slots)
    kept = [keeps_panels(torch.device("cuda"), weight.dtype, *of) for of in (IN_PANELS, IN_ROWS)]
    assert kept == [True, False]


@pytest.mark.slow
def test_kernels_in_fp8_are_checked_at_every_line_of_their_tables() -> None:
    assert [linear_tiles(rows) for rows in linear_rows()] == [tiles for _, tiles in LINEAR]
    slots = [tokens * fp8_products._K for tokens in expert_tokens()]
    found = [expert_tiles(n, fp8_products._EXPERTS) for n in slots]
    assert found == [tiles for _, tiles in FP8_EXPERTS]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not list(fp8_products.rounding_differences(device))
    assert not list(fp8_products.linear_differences(40, device))
    for sizes in (fp8_products.IN_PANELS, fp8_products.IN_ROWS):
        assert not list(fp8_products.expert_differences(8, sizes, device))


def test_ranks_are_checked_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not rank_sums.check_ranks(device)
    monkeypatch.setattr(rank_sums, "gather", lambda own, *_: own.repeat(1, 2))
    assert len(rank_sums.check_ranks(device)) == 4


def test_a_wrong_product_in_fp8_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "fp8_linear_triton", lambda *parts: parts[-1].fill_(1.0))
    assert len(list(fp8_products.linear_differences(3, torch.device("cpu")))) == 4


def test_wrong_experts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not list(differences(2, torch.float32, IN_ROWS, device))
    monkeypatch.setattr(expert_products, "grouped_mlp_triton", lambda x, *_, tiles: x)
    assert list(differences(2, torch.float32, IN_ROWS, device))
