"""What the memory plan keeps room for besides the steps that it measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.engine.engine_models import planned_uses
from batchgen.engine.interface.engine_config import EngineConfig, Sizes
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.largest_steps import largest_prefill, replay_bytes, scratch_runner
from batchgen.strategies.ar.strategy import ARStrategy
from tests.engine.models.test_long_rope import ROPE as LONG_ROPE
from tests.support.engine.vision_models import vision_folder


@pytest.mark.parametrize("reads_images", [True, False])
def test_the_largest_prefill_has_rows_of_two_lengths(
    reads_images: bool, tiny_model: Callable[..., Path]
) -> None:
    """As where the most tokens of a batch are no multiple of those of a row, and rows may be turned
    by other positions than their own: with images, and over the border of LongRoPE."""
    folder = vision_folder("qwen3_vl") if reads_images else tiny_model("phi3", **LONG_ROPE)
    model = load_model(folder, device=torch.device("cpu"), vision=reads_images)
    config = EngineConfig(max_model_len=24, max_batched_tokens=64, kv_cache_gib=0.01)
    uses, resolved = planned_uses(model, {}, ARStrategy(), config, [])
    use = next(iter(uses.values()))
    largest_prefill(scratch_runner(use, resolved), use, resolved)


def test_tokens_that_are_read_again_have_room_under_rules_by_row_alone() -> None:
    def room(*, rows: int, length: int, by_row: bool) -> int:
        config = EngineConfig(max_num_seqs=rows, max_batched_tokens=8192, deterministic=by_row)
        sizes = Sizes(weights=1, weights_per_token=1, memory=2**36, width=1)
        return replay_bytes(2**20, config.resolve(torch.device("cuda"), sizes, length))

    assert room(rows=256, length=32768, by_row=False) == 0
    # 8,192 tables of 2,048 blocks, twice, and a decode step.
    assert room(rows=256, length=32768, by_row=True) == 2 * 8192 * 2048 * 8 + 2**20
    # As 256 tokens are read at once, a step of 100 rows is too small three times over.
    assert room(rows=100, length=16, by_row=True) == 2 * 8192 * 8 + 3 * 2**20
