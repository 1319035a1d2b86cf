"""How layers with a sliding window and all others share the memory of pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.caches.model_caches import paged_token_bytes, window_token_bytes
from batchgen.engine.interface.engine_config import EngineConfig, ResolvedConfig, Sizes
from batchgen.engine.memory.memory_plan import MemoryPlan, Room, divide_memory
from batchgen.engine.memory.model_use import ModelUse, page_bytes
from batchgen.engine.memory.window_plan import window_needs

KIB, MIB, GIB = 2**10, 2**20, 2**30
GPT_OSS_20B = [KVSpec(64, 8, 64, 128), KVSpec(64, 8, 64)] * 12
GPT_OSS_120B = [KVSpec(64, 8, 64, 128), KVSpec(64, 8, 64)] * 18
GEMMA3_27B = [KVSpec(32, 16, 128, None if i % 6 == 5 else 1024) for i in range(62)]
GEMMA4_26B = [KVSpec(16, 2, 512) if i % 6 == 5 else KVSpec(16, 8, 256, 1024) for i in range(30)]
EXAONE_MOE = [KVSpec(64, 8, 128, None if i % 4 == 3 else 128) for i in range(48)]
GEMMA4_31B = [KVSpec(32, 4, 512) if i % 6 == 5 else KVSpec(32, 16, 256, 1024) for i in range(60)]
MISTRAL = [KVSpec(32, 8, 128, 4096)] * 32


def use_of(specs: list[KVSpec]) -> ModelUse:
    window = max((spec.window or 0 for spec in specs), default=0) or None
    model = SimpleNamespace(
        cache_specs=specs,
        dtype=torch.bfloat16,
        window=window,
        has_row_states=False,
        weight_bytes=0,
        tower=None,
    )
    return ModelUse(cast(Any, model), widths=(1,))


def settings_of(longest: int, asked: bool = True, **options: Any) -> ResolvedConfig:
    config = EngineConfig(max_model_len=longest if asked else None, **options)
    return config.resolve(torch.device("cpu"), Sizes(1, 1, 0, 1), longest)


@pytest.mark.parametrize(
    ("specs", "of_token", "of_window"),
    [
        (GPT_OSS_20B, 24 * KIB, 3 * MIB),
        (GPT_OSS_120B, 36 * KIB, 4.5 * MIB),
        (GEMMA3_27B, 10 * 8 * KIB, 52 * 8 * MIB),
        (GEMMA4_31B, 10 * 4 * 512 * 4, 50 * 16 * 256 * 4 * 1024),
    ],
)
def test_bytes_of_a_token_and_of_a_window(
    specs: list[KVSpec], of_token: int, of_window: float
) -> None:
    assert paged_token_bytes(specs, (), torch.bfloat16) == of_token
    window = max(spec.window or 0 for spec in specs)
    assert window * window_token_bytes(specs, torch.bfloat16) == of_window


@pytest.mark.parametrize(
    ("specs", "blocks", "unused"),
    [
        (GPT_OSS_20B, (1, 1), 0),
        (GPT_OSS_120B, (1, 1), 0),
        (GEMMA3_27B, (1, 5), 0.04),
        (GEMMA4_31B, (2, 20), 0),
        (GEMMA4_26B, (2, 20), 0),
        (EXAONE_MOE, (1, 3), 0),
    ],
)
def test_a_page_has_room_for_either_kind_of_block(
    specs: list[KVSpec], blocks: tuple[int, int], unused: float
) -> None:
    needs = window_needs([use_of(specs)], settings_of(131072))
    assert needs is not None
    layout = needs.layout
    assert (layout.window_blocks, layout.full_blocks) == blocks
    of_page = page_bytes([use_of(specs)], layout, 16)
    windows = 16 * blocks[0] * window_token_bytes(specs, torch.bfloat16)
    full = 16 * blocks[1] * paged_token_bytes(specs, (), torch.bfloat16)
    assert max(windows, full) == of_page and min(windows, full) >= (1 - unused) * of_page
    plan = divide_memory([use_of(specs)], settings_of(131072), Room(60 * GIB))
    assert plan.pages is not None and plan.kv_cache == plan.pages.layout.num_pages * of_page
    assert 60 * GIB - of_page < plan.kv_cache <= 60 * GIB


@pytest.mark.parametrize("length", [300, 1150, 6200, 33_000])
@pytest.mark.parametrize("specs", [GPT_OSS_20B, GEMMA3_27B, GEMMA4_31B, GEMMA4_26B])
def test_memory_goes_where_rows_need_it(specs: list[KVSpec], length: int) -> None:
    plan = divide_memory([use_of(specs)], settings_of(131072, False), Room(60 * GIB))
    of_token = paged_token_bytes(specs, (), torch.bfloat16)
    of_window = window_token_bytes(specs, torch.bfloat16)
    window = max(spec.window or 0 for spec in specs)
    possible = 60 * GIB / (length * of_token + min(length, window + 32) * of_window)
    assert plan.fitting_rows(length) + 1 > (0.85 if length < window else 0.93) * possible


def test_the_plan_says_what_the_cache_holds() -> None:
    plan = divide_memory([use_of(GEMMA4_26B)], settings_of(131072), Room(20 * GIB))
    assert "KV cache 20.00 GiB (1,037,440 tokens of one row, or the windows of 99)" in str(plan)
    assert plan.kv_tokens == 1_037_440
    of_all, of_row = plan.window_tokens(5000)
    assert of_row == 33 * 320 and of_all == plan.kv_tokens + of_row


def test_a_model_that_has_windows_only() -> None:
    plan = divide_memory([use_of(MISTRAL)], settings_of(131072), Room(20 * GIB))
    assert plan.kv_cache <= 20 * GIB and plan.num_blocks < 10**8
    assert 35 <= plan.fitting_rows(8_000) <= 40
    assert plan.fitting_rows(100_000) > 0.9 * plan.fitting_rows(8_000)


@pytest.mark.parametrize("specs", [GEMMA4_31B, MISTRAL])
def test_memory_for_less_than_a_window_is_refused(specs: list[KVSpec]) -> None:
    with pytest.raises(ValueError, match=r"the windows of one row need .* raise kv_cache_gib"):
        divide_memory([use_of(specs)], settings_of(8192, kv_cache_gib=0.1), Room(GIB))


@given(
    specs=st.sampled_from([GPT_OSS_20B, GEMMA3_27B, GEMMA4_31B, MISTRAL]),
    room=st.integers(1, 400 * GIB),
    longest=st.sampled_from([64, 1000, 8192, 131072]),
    rows=st.integers(1, 600),
    asked=st.booleans(),
    caching=st.booleans(),
)
def test_the_memory_is_enough_for_a_row_and_not_exceeded(
    specs: list[KVSpec], room: int, longest: int, rows: int, asked: bool, caching: bool
) -> None:
    settings = settings_of(longest, asked, max_num_seqs=rows, prefix_caching=caching)
    try:
        plan: MemoryPlan = divide_memory([use_of(specs)], settings, Room(room))
    except ValueError:
        needs = window_needs([use_of(specs)], settings)
        assert needs is not None
        least = max(needs.of_row(longest) if asked else 0, needs.row_pages + 1) + 1
        assert room < least * page_bytes([use_of(specs)], needs.layout, settings.block_size)
        return
    assert plan.pages is not None and plan.kv_cache <= room
    assert plan.pages.usable > plan.pages.row_pages
    assert plan.kv_tokens >= (longest if asked else 1)
