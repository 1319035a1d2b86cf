"""The tiles that bench_kernels tries for experts, and the lines it prints for the table."""

import pytest
from cases.experts import product_candidates

from batchgen.kernels.moe import moe_tiles as table
from batchgen.kernels.moe.moe_tiles import TABLE


@pytest.mark.parametrize("slots", [0.0625, 1, 16, 32, 64, 512, 1024])
def test_there_is_something_to_try_for_any_number_of_tokens(slots: float) -> None:
    found = product_candidates(slots)
    assert found and all(gate_up and down for gate_up, down in found.values())
    for block_m, (gate_up, down) in found.items():
        assert len(set(gate_up)) == len(gate_up) and len(set(down)) == len(down)
        assert not any(product.halve for product in gate_up + down) or block_m > 64


def test_printed_lines_are_code() -> None:
    for _, tiles in TABLE:
        assert eval(str(tiles), vars(table)) == tiles
