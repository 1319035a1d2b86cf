"""Split-KV decode attention against a plain float64 computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention.decode import DecodeConfig, paged_attention_decode
from batchgen.kernels.attention.decode_plan import DecodePlan, plan_decode
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.rules import BY_BATCH, BY_ROW, Splits
from tests.support.kernels.fp8_cache import dequantised, in_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SameBits = Callable[[Tensor, Tensor], None]
SPLIT = 64  # tests cut short contexts
CUT = Splits(512, 32)
SMALL = DecodeConfig(block_n=32, num_warps=4, num_stages=3, programs_per_sm=1)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that the launcher asks for is full of garbage: what it does not write shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    monkeypatch.setattr("batchgen.kernels.attention.decode.torch.empty", poisoned)
    yield


class Case(NamedTuple):
    """B rows of W queries whose contexts end at `ends`; blocks are out of order."""

    q: Tensor
    cache: KVCache
    positions: Tensor
    tables: Tensor
    scale: float
    width: int
    block_length: int

    def rows(self, index: Sequence[int]) -> Case:
        tokens = [row * self.width + w for row in index for w in range(self.width)]
        return self._replace(
            q=self.q[tokens], positions=self.positions[tokens], tables=self.tables[list(index)]
        )


def make_case(
    ends: Sequence[int],
    *,
    width: int = 1,
    block_length: int = 1,
    repeats: int = 0,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
    seed: int = 0,
) -> Case:
    """Keys that no row holds are NaN; table entries past a context are stale: of any block.

    repeats: queries of a row that stand at its last position, besides the first that does.
    """
    generator = torch.Generator().manual_seed(seed)
    used = [-(-end // block_size) for end in ends]
    num_blocks = 1 + sum(used) + 2
    shape = (kv_heads, num_blocks, block_size, head_dim)
    key = torch.randn(shape, generator=generator).to(dtype)
    value = torch.randn(shape, generator=generator).to(dtype)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    columns = max(used) + spare
    tables = torch.randint(0, num_blocks, (len(ends), columns), generator=generator)
    held = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for row, (end, count) in enumerate(zip(ends, used, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(blocks)
        held[blocks] = True
        held[blocks[-1], end - (count - 1) * block_size :] = False
    key[:, ~held] = float("nan")
    q = torch.randn(len(ends) * width, kv_heads * group, head_dim, generator=generator).to(dtype)
    last = torch.tensor(ends).unsqueeze(1) - 1
    first = last - width + 1 + repeats
    positions = (first + torch.arange(width)).clamp(min=0).minimum(last).flatten()
    cache = KVCache(key.to(DEVICE), value.to(DEVICE))
    scale = head_dim**-0.5
    return Case(
        q.to(DEVICE), cache, positions.to(DEVICE), tables.to(DEVICE), scale, width, block_length
    )


def plan_of(case: Case, split_tokens: int = SPLIT, max_splits: int = 8) -> DecodePlan:
    cut = Splits(split_tokens, max_splits)
    return plan_decode(case.positions, case.tables, case.width, case.cache.block_size, cut)


def run(case: Case, config: DecodeConfig | None = SMALL, max_splits: int = 8) -> Tensor:
    plan = plan_of(case, max_splits=max_splits)
    return paged_attention_decode(*case[:5], plan, config, block_length=case.block_length)


def oracle(case: Case) -> Tensor:
    """Query by query in float64."""
    kv_heads, _, _, head_dim = case.cache.key.shape
    group = case.q.shape[1] // kv_heads
    out = torch.empty(case.q.shape, dtype=torch.float64, device=case.q.device)
    lasts = case.positions.view(-1, case.width)[:, -1].tolist()
    for token, position in enumerate(case.positions.tolist()):
        row = token // case.width
        block_end = (position // case.block_length + 1) * case.block_length
        seen = min(block_end, lasts[row] + 1)
        blocks = case.tables[row].long()
        key, value = (
            part[:, blocks].reshape(kv_heads, -1, head_dim)[:, :seen].double()
            for part in dequantised(case.cache)
        )
        q = case.q[token].double().view(kv_heads, group, head_dim)
        weights = torch.softmax(q @ key.transpose(1, 2) * case.scale, dim=-1)
        out[token] = (weights @ value).view(-1, head_dim)
    return out


def check(case: Case, config: DecodeConfig | None = SMALL, max_splits: int = 8) -> None:
    out = run(case, config, max_splits)
    assert out.dtype == case.q.dtype
    torch.testing.assert_close(
        out.double(), oracle(case), rtol=0, atol=TOLERANCE[case.q.dtype], equal_nan=True
    )


@given(
    ends=st.lists(
        st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 200, 300]),
        min_size=1, max_size=4,
    ),
    width=st.integers(1, 8) | st.sampled_from([16, 32]),
    block_length=st.sampled_from([1, 2, 3, 4, 8, 32, 64]),
    repeats=st.sampled_from([0, 0, 1, 5]),
    group=st.sampled_from([1, 2, 3, 4]),
    kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    head_dim=st.sampled_from([16, 32, 64, 80, 96]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(deadline=None, max_examples=settings().max_examples // 10)
def test_matches_float64(
    ends: list[int],
    width: int,
    block_length: int,
    repeats: int,
    group: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    check(
        make_case(
            ends, width=width, block_length=block_length, repeats=repeats, group=group,
            kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype, seed=seed,
        )
    )  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_own_config_of_large_heads(head_dim: int, dtype: torch.dtype) -> None:
    check(make_case([70, 5], head_dim=head_dim, group=4, dtype=dtype), config=None)


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("width", "group", "block_length", "dtype"),
    [
        pytest.param(*shape, dtype, marks=[] if i % 2 == j else [pytest.mark.slow])
        for i, shape in enumerate(
            [(2, 8, 1), (4, 8, 1), (8, 8, 1), (8, 16, 1), (32, 4, 32), (64, 2, 64)]
        )
        for j, dtype in enumerate([torch.float32, torch.bfloat16])
    ],
)
def test_own_config_of_many_queries(
    width: int, group: int, block_length: int, dtype: torch.dtype
) -> None:
    case = make_case([150, 64], width=width, group=group, block_length=block_length, dtype=dtype)
    check(case, config=None)


def test_the_only_query_of_a_row_sees_no_more_of_its_block(same_bits: SameBits) -> None:
    case = make_case([70, 5], dtype=torch.bfloat16)
    same_bits(run(case._replace(block_length=32)), run(case))


@pytest.mark.thorough
def test_a_block_that_lies_across_two_splits_is_full() -> None:
    case = make_case([130], width=24, block_length=24, group=1)  # of positions 120 and on
    nan_key = case.tables[0, 128 // 16]
    case.cache.key[:, nan_key, 0] = float("nan")
    seeing = (case.positions >= 120).tolist()
    assert run(case).isnan().all(-1).all(-1).tolist() == seeing and not all(seeing)


def test_many_rows_of_many_queries_are_cut_less_often() -> None:
    assert [BY_BATCH.splits(64, 8, width).max_splits for width in (1, 4, 32)] == [32, 8, 2]
    assert BY_BATCH.splits(2, 8, 32).max_splits == 32


@given(rows=st.integers(1, 4000), kv_heads=st.integers(1, 16), width=st.integers(1, 32))
def test_by_row_a_context_is_cut_by_its_length_alone(rows: int, kv_heads: int, width: int) -> None:
    assert BY_ROW.splits(rows, kv_heads, width) == BY_ROW.splits(1, 1, 1)
    assert BY_ROW.latent_splits(rows, width) == BY_ROW.latent_splits(1, 1)
    assert not BY_ROW.takes_wide_tiles(rows, 132)


@given(width=st.integers(1, 32), group=st.sampled_from([1, 2, 4, 5, 8, 16]))
def test_by_row_a_program_has_as_many_queries_as_keep_their_bits(width: int, group: int) -> None:
    for room, window in ((4096, False), (4096, True), (1 << 17, False)):
        pieces = BY_ROW.pieces(width, group, room, window=window)
        assert width % pieces == 0 and (width // pieces == 1 or width // pieces * group <= 32)
        assert pieces == width or (not window and room == 4096)
        assert BY_BATCH.pieces(width, group, room, window=window) == 1


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 80), (torch.bfloat16, 80), (torch.bfloat16, 64)]
)
def test_splits_of_keys_and_values_in_fp8(dtype: torch.dtype, head_dim: int) -> None:
    """One query is larger than float16 takes, in which products with FP8 are computed."""
    case = make_case([600, 40, 300], head_dim=head_dim, group=4, width=2, dtype=dtype)
    case.q[1] *= 2**17
    case = case._replace(cache=in_fp8(case.cache))
    check(case, max_splits=4)
    check(case, config=None)


@pytest.mark.thorough
def test_long_contexts_have_equal_splits() -> None:
    case = make_case([600, 40, 300], head_dim=16)
    assert plan_of(case, max_splits=4).splits.tolist() == [3, 1, 3]  # of 256, 64 and 128 tokens
    check(case, max_splits=4)


@pytest.mark.thorough
def test_combines_more_splits_than_a_chunk() -> None:
    check(make_case([64 * 17 + 1], head_dim=96, group=8), max_splits=32)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("width", "block_length"), [(1, 1), pytest.param(3, 1, marks=pytest.mark.slow), (4, 4)]
)
def test_row_has_the_same_bits_alone(width: int, block_length: int, same_bits: SameBits) -> None:
    ends = [1, 65, 200, 64, 129, 400]
    case = make_case(ends, width=width, block_length=block_length, dtype=torch.bfloat16)
    together = run(case).unflatten(0, (-1, width))
    for row in range(6):
        same_bits(run(case.rows([row])), together[row])
    same_bits(run(case.rows([4, 3, 1])), together[[4, 3, 1]].flatten(0, 1))


@pytest.mark.thorough
def test_bits_do_not_depend_on_the_table_width(same_bits: SameBits) -> None:
    case = make_case([65, 130], spare=20)
    narrow = case._replace(tables=case.tables[:, :9].contiguous())
    same_bits(run(narrow), run(case))
    same_bits(run(case._replace(tables=case.tables[:, :9])), run(case))
    same_bits(run(case._replace(tables=case.tables.int())), run(case))


def test_queries_as_a_slice_of_a_wider_projection(same_bits: SameBits) -> None:
    case = make_case([70, 20], width=2)
    wide = torch.full((4, 9, 32), float("nan"), device=DEVICE)
    wide[:, 2:6] = case.q
    same_bits(run(case._replace(q=wide[:, 2:6])), run(case))


def test_only_queries_that_see_a_nan_key_are_nan() -> None:
    width, ends = 3, [100, 100]
    case = make_case(ends, width=width)
    for position, block_row in ((98, 0), (10, 1)):
        block = case.tables[block_row, position // 16]
        case.cache.key[1, block, position % 16] = float("nan")
        case.cache.value[1, block, position % 16] = 0
    nan = run(case).isnan().all(-1)  # [tokens, heads]
    assert torch.equal(run(case).isnan().any(-1), nan)
    expected = torch.zeros(6, 4, dtype=torch.bool)
    expected[1:, 2:] = True  # positions 97, 98, 99 of the first row; heads of the second KV head
    assert torch.equal(nan.cpu(), expected)
    check(case)


def test_padding_rows_read_the_scratch_block(same_bits: SameBits) -> None:
    case = make_case([70, 1, 1])
    case.tables[1:] = 0
    out = run(case)
    same_bits(out[:1], run(case.rows([0])))
    assert out[1:].isnan().all()  # the scratch block's keys are NaN here


def test_position_beyond_the_table_stays_in_it(same_bits: SameBits) -> None:
    case = make_case([64], spare=0)
    beyond = case._replace(positions=torch.tensor([10_000], device=DEVICE))
    same_bits(run(beyond), run(case))


@given(
    ends=st.lists(st.integers(1, 900), min_size=1, max_size=9),
    width=st.integers(1, 3),
    max_splits=st.integers(1, 9),
)
@settings(deadline=None, max_examples=settings().max_examples // 8)
def test_plan_covers_every_context_once(ends: list[int], width: int, max_splits: int) -> None:
    tables = torch.zeros(len(ends), -(-max(ends) // 16), dtype=torch.int64, device=DEVICE)
    positions = torch.tensor([max(end - width + w, 0) for end in ends for w in range(width)])
    plan = plan_decode(positions.to(DEVICE), tables, width, 16, Splits(SPLIT, max_splits))
    count = plan.count.item()
    units = [tuple(unit) for unit in plan.units[:count].tolist()]
    assert count == sum(plan.splits.tolist())
    lengths = [stop - start for _, start, stop, _ in units]
    assert lengths == sorted(lengths, reverse=True)
    for row, end in enumerate(ends):
        own = sorted(unit[1:] for unit in units if unit[0] == row)
        assert len(own) == plan.splits[row] <= max_splits
        assert [start for start, _, _ in own] == [0] + [stop for _, stop, _ in own[:-1]]
        assert own[-1][1] == end
        slots = range(row * plan.max_splits, (row + 1) * plan.max_splits)
        assert [slot for *_, slot in own] == ([-1] if len(own) == 1 else list(slots[: len(own)]))


@pytest.mark.slow  # a program a row
def test_plan_of_more_rows_than_a_pass() -> None:
    ends = [1 + 7 * row % 200 for row in range(260)]
    tables = torch.zeros(260, 13, dtype=torch.int64, device=DEVICE)
    positions = torch.tensor(ends, device=DEVICE) - 1
    plan = plan_decode(positions, tables, 1, 16, Splits(SPLIT, 32))
    units = plan.units[: plan.count.item()]
    assert plan.count.item() == sum(-(-end // SPLIT) for end in ends)
    assert len({(row, start) for row, start, _, _ in units.tolist()}) == len(units)
    assert (units[:, 2] - units[:, 1]).sum().item() == sum(ends)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize(
    ("width", "block_length"), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (8, 8), (32, 32)]
)
def test_real_sizes_in_a_graph_whose_contexts_grow(
    group: int, width: int, block_length: int
) -> None:
    ends = [1, 100, 512, 513, 1024, 2000, 16384, 20000]
    case = make_case(
        ends, width=width, block_length=block_length, kv_heads=8, group=group, head_dim=128,
        dtype=torch.bfloat16, block_size=16,
    )  # fmt: skip
    positions = torch.zeros_like(case.positions)
    graph = torch.cuda.CUDAGraph()

    def forward() -> Tensor:
        plan = plan_decode(positions, case.tables, width, 16, CUT)
        return paged_attention_decode(
            case.q, case.cache, positions, *case[3:5], plan, block_length=block_length
        )

    forward()
    with torch.cuda.graph(graph):
        out = forward()
    middles = torch.tensor(ends, device=DEVICE).repeat_interleave(width) // 2
    for shorter in ((case.positions - middles).clamp(min=0), case.positions):
        positions.copy_(shorter)
        graph.replay()
        assert torch.equal(out, forward())
        expected = oracle(case._replace(positions=shorter))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("programs_per_sm", [1, 2, 3, 4])
def test_bits_do_not_depend_on_how_many_programs_run(programs_per_sm: int) -> None:
    case = make_case([1000, 3000, 70] * 20, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    plan = plan_decode(case.positions, case.tables, 1, 16, CUT)
    config = DecodeConfig(64, 4, 3, 2)
    first = paged_attention_decode(*case[:5], plan, config)
    other = replace(config, programs_per_sm=programs_per_sm)
    assert torch.equal(paged_attention_decode(*case[:5], plan, other), first)
