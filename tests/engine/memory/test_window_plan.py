"""How memory is divided between layers with a sliding window and all others."""

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
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.memory.window_plan import window_needs

KIB, MIB, GIB = 2**10, 2**20, 2**30
GPT_OSS_20B = [KVSpec(64, 8, 64, 128), KVSpec(64, 8, 64)] * 12
GPT_OSS_120B = [KVSpec(64, 8, 64, 128), KVSpec(64, 8, 64)] * 18
GEMMA3_27B = [KVSpec(32, 16, 128, None if i % 6 == 5 else 1024) for i in range(62)]
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
    plan = divide_memory([use_of(specs)], settings_of(131072), Room(60 * GIB))
    assert plan.kv_cache == plan.num_blocks * 16 * of_token
    assert plan.window_cache * window == plan.num_window_blocks * 16 * of_window


def test_small_windows_leave_nearly_all_memory_to_the_other_layers() -> None:
    plan = divide_memory([use_of(GPT_OSS_20B)], settings_of(131072), Room(60 * GIB))
    needs = window_needs([use_of(GPT_OSS_20B)], settings_of(131072))
    assert needs is not None and needs.row_blocks == 9
    assert plan.num_window_blocks == needs.most_blocks and plan.window_cache < 2 * GIB
    assert plan.kv_tokens > 2_400_000 and plan.window_rows is not None and plan.window_rows > 256
    assert "cache of windows" in str(plan)


def test_rows_of_a_length_that_nobody_asked_for_are_taken_to_be_shorter() -> None:
    room = Room(60 * GIB)
    asked = divide_memory([use_of(GEMMA3_27B)], settings_of(131072), room)
    plan = divide_memory([use_of(GEMMA3_27B)], settings_of(131072, asked=False), room)
    assert plan.fitting_rows(800) > 1.5 * asked.fitting_rows(800)
    assert plan.kv_tokens > 131072  # still one row of that length
    short = settings_of(2048, asked=False)
    assert divide_memory([use_of(GEMMA3_27B)], short, room) == divide_memory(
        [use_of(GEMMA3_27B)], settings_of(2048), room
    )


@pytest.mark.parametrize(
    ("row_tokens", "likely"), [((200, 1200), 1150), ((6000, 6300), 6200), ((500, 33_000), 4000)]
)
def test_memory_is_divided_by_the_rows_that_are_likely(
    row_tokens: tuple[int, int], likely: int
) -> None:
    uses, room = [use_of(GEMMA3_27B)], Room(15 * GIB)
    blind = divide_memory(uses, settings_of(131072, asked=False), room)
    plan = divide_memory(uses, settings_of(131072, asked=False, row_tokens=row_tokens), room)
    of_token = paged_token_bytes(GEMMA3_27B, (), torch.bfloat16)
    of_window = window_token_bytes(GEMMA3_27B, torch.bfloat16)
    possible = 15 * GIB / (likely * of_token + min(likely, 1024 + 32) * of_window)
    assert plan.fitting_rows(likely) > 0.9 * possible > blind.fitting_rows(likely)
    assert plan.kv_tokens >= row_tokens[1]  # the longest is not refused
    asked = settings_of(131072, row_tokens=row_tokens)
    assert divide_memory(uses, asked, room).kv_tokens >= 131072


def test_a_long_row_that_nobody_asked_for_leaves_half_of_the_room_to_windows() -> None:
    room = Room(10 * GIB)
    asked = divide_memory([use_of(GEMMA4_31B)], settings_of(120_000), room)
    assert asked.kv_tokens >= 120_000 and asked.fitting_rows(1000) <= 1
    plan = divide_memory([use_of(GEMMA4_31B)], settings_of(262_144, asked=False), room)
    assert plan.fitting_rows(1000) >= 6 and plan.kv_tokens > 60_000


def test_large_windows_share_the_memory_with_the_other_layers() -> None:
    plan = divide_memory([use_of(GEMMA4_31B)], settings_of(131072), Room(60 * GIB))
    assert plan.window_rows == plan.fitting_rows(1024) and 30 <= plan.window_rows <= 60
    assert plan.fitting_rows(512) > plan.window_rows > plan.fitting_rows(30_000) > 10


def test_rows_shorter_than_the_window_take_equal_numbers_of_both_blocks() -> None:
    plan = divide_memory([use_of(GEMMA4_31B)], settings_of(512), Room(60 * GIB))
    assert abs(plan.kv_tokens - plan.window_tokens) < 0.01 * plan.kv_tokens


def test_a_model_that_has_windows_only() -> None:
    plan = divide_memory([use_of(MISTRAL)], settings_of(131072), Room(20 * GIB))
    assert plan.kv_cache == 0 and plan.window_cache <= 20 * GIB
    assert plan.window_rows is not None and 35 <= plan.window_rows <= 40
    assert plan.fitting_rows(100_000) == plan.window_rows


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
    needs = window_needs([use_of(specs)], settings)
    assert needs is not None
    try:
        plan: MemoryPlan = divide_memory([use_of(specs)], settings, Room(room))
    except ValueError:
        of_token = paged_token_bytes(specs, (), torch.bfloat16)
        least = (needs.row_blocks + 1) * needs.block_bytes
        least += (settings.row_blocks + 1) * settings.block_size * of_token
        assert room < least
        return
    assert plan.kv_cache + plan.window_cache <= room
    assert needs.row_blocks < plan.num_window_blocks <= needs.most_blocks
    assert plan.num_blocks > (settings.row_blocks if asked else 1)
