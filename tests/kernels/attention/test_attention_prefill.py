"""Triton prefill attention compared with float64; equal bits in any batch; NaN in its rows only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.kv_gather import does_gathering_pay, gather_context, plan_gather
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import (
    PrefillConfig,
    PrefillPlan,
    cut_equal_tiles,
    cut_tiles,
    plan_prefill,
)
from tests.support.kernels.fp8_cache import dequantised, in_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
SameBits = Callable[[Tensor, Tensor], None]
TINY = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
"""Several tiles of queries and of keys for rows of a few dozen tokens."""
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SLOW = [pytest.mark.slow]


@dataclass(frozen=True)
class Rows:
    """A batch: what the kernel takes, on DEVICE.

    Attributes:
        prefixes: cached tokens before the new ones.
        repeats: new tokens of a row that stand at its last position, besides the first that does.
        gather: as for `plan_prefill`.
    """

    query_lens: tuple[int, ...]
    prefixes: tuple[int, ...]
    q: Tensor
    cache: KVCache
    positions: Tensor
    tables: Tensor
    repeats: int
    block_length: int = 1
    gather: bool | None = False

    @property
    def contexts(self) -> list[int]:
        rows = zip(self.prefixes, self.query_lens, strict=True)
        return [p + max(n - self.repeats, min(n, 1)) for p, n in rows]

    def plan(self, config: PrefillConfig | None = TINY) -> PrefillPlan:
        return plan_prefill(
            self.query_lens,
            DEVICE,
            num_heads=self.q.shape[1],
            num_kv_heads=self.cache.key.shape[0],
            head_dim=self.q.shape[2],
            dtype=self.q.dtype,
            context_lens=self.contexts,
            config=config,
            gather=self.gather,
        )

    def run(self, config: PrefillConfig | None = TINY) -> Tensor:
        out = torch.full(self.q.shape, NAN, dtype=self.q.dtype, device=DEVICE)
        plan, scale = self.plan(config), self.q.shape[2] ** -0.5
        return paged_attention_prefill(
            self.q, self.cache, self.positions, self.tables, scale, plan, out,
            block_length=self.block_length,
        )  # fmt: skip

    def slots(self, row: int, count: int) -> Tensor:
        """The values of the row's first tokens in the cache seen as [kv_heads, slots, head_dim]."""
        at, size = torch.arange(count, device=DEVICE), self.cache.block_size
        return self.tables[row].long()[at // size] * size + at % size

    def part(self, row: int, start: int, stop: int) -> Rows:
        """New tokens start … stop of one row, as a batch of its own."""
        begin = sum(self.query_lens[:row])
        tokens = slice(begin + start, begin + stop)
        return replace(
            self,
            query_lens=(stop - start,),
            prefixes=(self.prefixes[row] + start,),
            q=self.q[tokens],
            positions=self.positions[tokens],
            tables=self.tables[row : row + 1],
        )


def make_rows(
    query_lens: Sequence[int],
    prefixes: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.int64,
    spare_columns: int = 0,
    repeats: int = 0,
    block_length: int = 1,
    seed: int = 0,
) -> Rows:
    """Rows whose blocks lie in random order; all that they do not own is NaN, keys and values.

    Table entries past a row's context name blocks that do not exist; spare_columns lie between the
    table's rows, outside of it.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    pairs = [*zip(prefixes, query_lens, strict=True)]
    contexts = [p + max(n - repeats, min(n, 1)) for p, n in pairs]
    needed = [-(-c // block_size) for c in contexts]
    order = torch.randperm(sum(needed), generator=generator) + 1
    tables = torch.full((len(needed), max(needed) + spare_columns), 2**30, dtype=table_dtype)
    shape = (kv_heads, sum(needed) + 1, block_size, head_dim)
    key, value = torch.full(shape, NAN, dtype=dtype), torch.full(shape, NAN, dtype=dtype)
    for row, blocks in enumerate(order.split(needed)):
        tables[row, : len(blocks)] = blocks
        at = torch.arange(contexts[row])
        slots = blocks[at // block_size] * block_size + at % block_size
        for cached in (key, value):
            new = torch.randn((kv_heads, len(at), head_dim), generator=generator)
            cached.view(kv_heads, -1, head_dim)[:, slots] = new.to(dtype)
    # Heads of q as a slice of a wider projection.
    q = torch.randn((sum(query_lens), num_heads + 2 * kv_heads, head_dim), generator=generator)
    positions = [
        torch.arange(p, p + n).clamp(max=c - 1) for (p, n), c in zip(pairs, contexts, strict=True)
    ]
    return Rows(
        tuple(query_lens),
        tuple(prefixes),
        q.to(DEVICE, dtype)[:, :num_heads],
        KVCache(key.to(DEVICE), value.to(DEVICE)),
        torch.cat(positions).to(DEVICE),
        tables.to(DEVICE)[:, : max(needed)],
        repeats,
        block_length,
    )


def oracle(rows: Rows) -> Tensor:
    """[T, num_heads, head_dim] float64, from whole score matrices of the rows."""
    kv_heads, _, _, dim = rows.cache.key.shape
    group = rows.q.shape[1] // kv_heads
    outs = []
    positions = rows.positions.split(rows.query_lens)
    for row, q in enumerate(rows.q.double().split(rows.query_lens)):
        slots = rows.slots(row, rows.contexts[row])
        key, value = (
            c.view(kv_heads, -1, dim)[:, slots].double().repeat_interleave(group, 0)
            for c in dequantised(rows.cache)
        )
        score = torch.einsum("thd,hcd->htc", q, key) * dim**-0.5
        # The row ends with its last query, and so do the keys here.
        ends = (positions[row] // rows.block_length + 1) * rows.block_length
        hidden = torch.arange(len(slots), device=DEVICE) >= ends.unsqueeze(1)
        score.masked_fill_(hidden, -float("inf"))
        outs.append(torch.einsum("htc,hcd->thd", score.softmax(-1), value))
    return torch.cat(outs)


def assert_right(rows: Rows, config: PrefillConfig | None = TINY) -> None:
    tolerance = TOLERANCE[rows.q.dtype]
    torch.testing.assert_close(
        rows.run(config).double(), oracle(rows), rtol=tolerance, atol=tolerance
    )


@pytest.mark.thorough
@settings(deadline=None, max_examples=settings().max_examples // 10)
@given(data=st.data())
def test_equals_float64(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 40) | st.just(1), min_size=1, max_size=4))
    count = len(lens)
    prefixes = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    kv_heads = data.draw(st.integers(1, 2))
    group = data.draw(st.integers(1, 8))
    rows = make_rows(
        lens,
        prefixes,
        heads=(kv_heads * group, kv_heads),
        head_dim=data.draw(st.sampled_from([16, 32, 80])),
        block_size=2 ** data.draw(st.integers(0, 6)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        table_dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
        spare_columns=data.draw(st.integers(0, 3)),
        repeats=data.draw(st.sampled_from([0, 0, 1, 3, 20])),
        block_length=data.draw(st.sampled_from([1, 1, 2, 3, 4, 8, 32, 64])),
        seed=data.draw(st.integers(0, 99)),
    )
    config = replace(TINY, block_n=data.draw(st.sampled_from([16, 32])))
    assert_right(rows, config)
    if rows.q.shape[2] != 80:  # the copy engine's tiles have powers of two
        gathered = replace(rows, gather=True).run(config)
        torch.testing.assert_close(gathered, rows.run(config), rtol=0, atol=0)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        pytest.param(head_dim, dtype, marks=[] if i % 2 == j and head_dim < 512 else SLOW)
        for i, head_dim in enumerate([16, 80, 96, 128, 256, 512])
        for j, dtype in enumerate([torch.float32, torch.bfloat16])
    ],
)
def test_own_config(head_dim: int, dtype: torch.dtype) -> None:
    rows = make_rows([1, 70, 40], [90, 3, 0], head_dim=head_dim, dtype=dtype)
    assert_right(rows, None)


@pytest.mark.parametrize(
    ("lens", "contexts", "head_dim", "pays"),
    [
        ([1024], [1024], 128, True),
        ([1023], [1023], 128, False),  # too little to be worth a launch
        ([1000, 24], [4000, 96], 128, True),
        ([1000, 24], [4000, 97], 128, False),  # read too few times
        ([2000], [2000], 80, False),
    ],
)
def test_contexts_are_gathered_for_many_new_tokens(
    lens: list[int], contexts: list[int], head_dim: int, pays: bool
) -> None:
    assert does_gathering_pay(lens, contexts, head_dim) == pays


def test_gathered_contexts_stand_one_behind_another() -> None:
    rows = make_rows([3, 70, 2], [70, 5, 0], dtype=torch.bfloat16)
    plan = plan_gather(rows.contexts, DEVICE)
    assert plan.row_starts.tolist() == [0, 73, 148] and plan.num_tokens == 150
    keys, values, _ = gather_context(rows.cache, rows.tables, plan, torch.bfloat16)
    slots = torch.cat([rows.slots(row, count) for row, count in enumerate(rows.contexts)])
    for found, cached in ((keys, rows.cache.key), (values, rows.cache.value)):
        assert torch.equal(found.view(2, 150, 16), cached.view(2, -1, 16)[:, slots])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contexts_in_fp8_have_the_same_bits_gathered_and_cut(
    dtype: torch.dtype, same_bits: SameBits
) -> None:
    rows = make_rows([20, 3, 25], [20, 5, 0], heads=(2, 1), dtype=dtype)
    # What no row owns is NaN in the plain cache: keys with a scale of NaN here.
    rows = replace(rows, cache=in_fp8(rows.cache))
    whole = rows.run()
    torch.testing.assert_close(whole.double(), oracle(rows), rtol=0, atol=2 * TOLERANCE[dtype])
    same_bits(replace(rows, gather=True).run(), whole)
    same_bits(torch.cat([rows.part(0, 0, 9).run(), rows.part(0, 9, 20).run()]), whole[:20])


def test_more_heads_in_a_group_than_rows_of_a_small_tile() -> None:
    rows = make_rows([5], [9], heads=(71, 1))
    assert_right(rows, None)
    with pytest.raises(ValueError, match="group"):
        rows.plan(TINY)


def test_plan_covers_each_token_once_and_begins_with_the_longest_context() -> None:
    lens, contexts = (9, 0, 1, 30), (9, 50, 100, 40)
    plan = plan_prefill(
        lens, DEVICE, num_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16,
        context_lens=contexts, config=TINY,
    )  # fmt: skip
    assert plan.tiles.dtype == torch.int32 and plan.num_tokens == 40
    begins = [0, 9, 9, 10]
    covered, lasts = [], []
    for row, first, remaining in plan.tiles.tolist():
        assert first + remaining == begins[row] + lens[row]
        size = min(remaining, 16 // 3)
        covered += [(row, token) for token in range(first, first + size)]
        lasts.append(contexts[row] - lens[row] + first + size - begins[row])
    expected = [(row, begins[row] + i) for row, n in enumerate(lens) for i in range(n)]
    assert sorted(covered) == expected
    assert lasts == sorted(lasts, reverse=True)


@pytest.mark.parametrize("width", [1, 5, 12])
def test_tiles_of_equal_rows_are_those_of_the_host(width: int) -> None:
    ours = cut_equal_tiles(3, width, 5, DEVICE)
    assert ours.dtype == torch.int32
    assert sorted(ours.tolist()) == sorted(cut_tiles([width] * 3, 5).tolist())


def test_no_rows() -> None:
    rows = make_rows([3], [0])
    empty = replace(
        rows, query_lens=(), prefixes=(), q=rows.q[:0], positions=rows.positions[:0],
        tables=rows.tables[:0],
    )  # fmt: skip
    assert empty.run().shape == (0, 4, 16)


def test_rejects_a_plan_for_other_queries() -> None:
    rows = make_rows([3], [0])
    plan = rows.part(0, 0, 2).plan()
    with pytest.raises(ValueError, match="plan"):
        paged_attention_prefill(rows.q, rows.cache, rows.positions, rows.tables, 1.0, plan)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_chunks_and_batch_mates_change_no_bit(dtype: torch.dtype, same_bits: SameBits) -> None:
    rows = make_rows([1, 75, 20], [30, 0, 17], dtype=dtype, heads=(6, 2))
    whole = rows.run()
    for row, out in enumerate(whole.split(rows.query_lens)):
        same_bits(rows.part(row, 0, len(out)).run(), out)
    prompt = whole.split(rows.query_lens)[1]
    for border in (1, 16, 33):
        chunks = [rows.part(1, 0, border).run(), rows.part(1, border, 75).run()]
        same_bits(torch.cat(chunks), prompt)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_chunks_of_whole_blocks_change_no_bit(dtype: torch.dtype, same_bits: SameBits) -> None:
    rows = make_rows([1, 75, 20], [30, 0, 17], dtype=dtype, heads=(6, 2), block_length=12)
    prompt = rows.run().split(rows.query_lens)[1]
    for border in (12, 48):
        chunks = [rows.part(1, 0, border).run(), rows.part(1, border, 75).run()]
        same_bits(torch.cat(chunks), prompt)


@pytest.mark.thorough
def test_a_nan_key_reaches_only_the_queries_that_read_it(same_bits: SameBits) -> None:
    rows = make_rows([40, 20], [10, 0])
    clean = rows.run()
    bad = 23  # position in row 0; the writer leaves a NaN key and a zero value there
    slot = rows.slots(0, 50)[bad]
    rows.cache.key.view(2, -1, 16)[1, slot] = NAN
    rows.cache.value.view(2, -1, 16)[1, slot] = 0
    hit = torch.zeros(60, 4, dtype=torch.bool, device=DEVICE)
    hit[bad - 10 : 40, 2:] = True  # heads 2 and 3 read KV head 1
    for gather in (False, True):
        out = replace(rows, gather=gather).run()
        assert out[hit].isnan().all()
        same_bits(out[~hit], clean[~hit])


@pytest.mark.thorough
def test_large_scores() -> None:
    rows = make_rows([33], [20])
    rows.cache.key.mul_(300)
    assert rows.run().isfinite().all()
    torch.testing.assert_close(rows.run().double(), oracle(rows), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (10, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_length", [1, 3, 9])
def test_real_sizes(heads: tuple[int, int], head_dim: int, block_length: int) -> None:
    shape = {"heads": heads, "head_dim": head_dim, "dtype": torch.bfloat16}
    shape["block_length"] = block_length  # a divisor of where the row is cut below
    rows = make_rows([1000, 1, 700, 1300], [0, 900, 513, 64], **shape)  # type: ignore[arg-type]
    assert_right(rows, None)
    whole = rows.run(None)
    assert torch.equal(whole, rows.run(None))
    assert torch.equal(rows.part(3, 333, 1300).run(None), whole[1701 + 333 :])
    gathered = replace(rows, gather=None)
    assert gathered.plan(None).gather is not None
    assert torch.equal(gathered.run(None), whole)


@pytest.mark.gpu
def test_captures_in_a_graph() -> None:
    rows = make_rows([200, 1], [5, 60], dtype=torch.bfloat16, head_dim=64)
    plan, expected = rows.plan(None), rows.run(None)
    out = torch.full_like(expected, NAN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention_prefill(rows.q, rows.cache, rows.positions, rows.tables, 1 / 8, plan, out)
    graph.replay()
    assert torch.equal(out, expected)
