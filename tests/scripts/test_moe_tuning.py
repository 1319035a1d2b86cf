"""The list of tiles that bench_moe tries, and the lines it prints for the table."""

import pytest
from moe_tuning import candidates, table_code

from batchgen.kernels.moe import moe_tiles as table
from batchgen.kernels.moe.moe_tiles import TABLE


@pytest.mark.parametrize("slots", [0.0625, 1, 16, 32, 64, 512, 1024])
def test_there_is_something_to_try_for_any_number_of_tokens(slots: float) -> None:
    found = candidates(slots)
    assert found and all(gate_up and down for _, gate_up, down in found)
    for block_m, gate_up, down in found:
        assert len(set(gate_up)) == len(gate_up) and len(set(down)) == len(down)
        assert not any(product.halve for product in gate_up + down) or block_m > 64


def test_printed_lines_are_code() -> None:
    for _, tiles in TABLE:
        assert eval(table_code(tiles), vars(table)) == tiles
