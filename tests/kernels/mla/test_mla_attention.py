"""Triton's forms of latent attention against the reference, and that against plain mathematics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention.decode_plan import plan_decode
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.attention.prefill_plan import cut_equal_tiles, cut_tiles
from batchgen.kernels.mla import expanded_triton
from batchgen.kernels.mla.absorbed_sizes import decode_span
from batchgen.kernels.mla.absorbed_triton import latent_decode, latent_prefill
from batchgen.kernels.mla.expanded_triton import (
    does_expansion_pay,
    expanded_attention,
    plan_expanded,
    rows_at_once,
)
from batchgen.kernels.mla.mla_attention import attend_part, latent_attention_reference
from batchgen.kernels.rules import BY_ROW, Splits
from tests.support.kernels.latent_cases import DEVICE, Case, Sizes, make_case

SCALE = 0.3
SIZES = [Sizes(), Sizes(1, 16, 16, 16, 16), Sizes(6, 40, 24, 4, 32), Sizes(20, 32, 8, 8, 8)]
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def absorbed(case: Case, mixed: Tensor) -> Tensor:
    return case.expansion.values(mixed)


def decode(case: Case, split_tokens: int = 512, max_splits: int = 32) -> Tensor:
    width = case.meta.query_lens[0]
    fixed, turned = case.q.split([case.expansion.key_size, case.rotated], 2)
    plan = plan_decode(
        case.meta.positions,
        case.meta.block_tables,
        width,
        case.plane.shape[1],
        Splits(split_tokens, max_splits),
    )
    queries = case.expansion.absorb(fixed)
    tables = case.meta.block_tables
    mixed = latent_decode(
        queries, turned, case.plane, case.meta.positions, tables, SCALE, plan, scales=case.scales
    )
    return absorbed(case, mixed)


def prefill(case: Case, tile: int) -> Tensor:
    fixed, turned = case.q.split([case.expansion.key_size, case.rotated], 2)
    tiles = cut_tiles(case.meta.query_lens, tile, case.meta.context_lens).to(DEVICE)
    empty = torch.zeros((2, 3), dtype=torch.int32, device=DEVICE)  # as captured graphs have them
    mixed = latent_prefill(
        case.expansion.absorb(fixed), turned, case.plane, case.meta.positions,
        case.meta.block_tables, SCALE, torch.cat((tiles, empty)), tile, case.scales,
    )  # fmt: skip
    return absorbed(case, mixed)


def expanded(case: Case) -> Tensor:
    plan = plan_expanded(
        case.meta.query_lens,
        case.meta.context_lens,
        case.meta.block_tables,
        case.plane.shape[1],
        case.expansion.key_size,
        case.expansion.value_size,
        case.q.itemsize,
    )
    latents = case.plane.flatten(0, 1)[plan.slots]
    size = case.plane.shape[2] - case.rotated
    key_values = case.expansion.expand(latents[:, :size])
    return expanded_attention(
        case.q, key_values, latents[:, size:], case.meta.positions, SCALE, plan
    )


def check(found: Tensor, case: Case) -> None:
    expected = case.reference(SCALE)
    assert found.dtype == case.q.dtype and found.shape == expected.shape
    error = (found.float().cpu() - expected).abs().max() / expected.abs().max()
    assert float(error) < BOUNDS[case.q.dtype]


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_latents_in_fp8(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step, an absorbed prefill and an expanded one; a token that is not finite."""
    monkeypatch.setattr(expanded_triton, "_LEAST_TOKENS", 20)
    for rows, width in (([(2, 66), (2, 5)], 2), ([(5, 9), (2, 40)], None), ([(30, 30)], None)):
        plain = make_case(rows, width=width, dtype=dtype)
        last = plain.meta.block_tables[0, (rows[0][1] - 1) // 4], (rows[0][1] - 1) % 4
        case = plain.in_fp8()
        check(attended(case), case)
        expected, unrounded = case.reference(SCALE), plain.reference(SCALE)
        assert 0 < (expected - unrounded).norm() < 0.06 * unrounded.norm()
        assert case.scales is not None
        case.scales[last] = float("nan")
        case.plane.view(torch.uint8)[last] = 0
        harmed = attended(case).isnan().flatten(1).all(1).tolist()
        assert harmed == [i == rows[0][0] - 1 for i in range(len(case.q))]


def attended(case: Case) -> Tensor:
    part = (case.q, case.plane, case.expansion, case.rotated, case.meta, SCALE)
    return attend_part(*part, scales=case.scales)


def test_the_reference_is_attention_over_expanded_keys_and_values() -> None:
    case = make_case([(5, 70), (1, 9)], device="cpu")
    found = case.reference(SCALE)
    start = 0
    for row, (new, context) in enumerate([(5, 70), (1, 9)]):
        latents = case.plane[case.meta.block_tables[row]].flatten(0, 1)[:context]
        keys = case.expansion.expand(latents[:, :24])
        key, value = keys.split([12, 10], 2)
        key = torch.cat((key, latents[:, None, 24:].expand(-1, 4, -1)), 2)
        score = torch.einsum("qhd,shd->hqs", case.q[start : start + new], key) * SCALE
        seen = torch.arange(context) <= torch.arange(context - new, context)[:, None]
        weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
        expected = torch.einsum("hqs,shv->qhv", weight, value)
        torch.testing.assert_close(found[start : start + new], expected, atol=1e-5, rtol=1e-4)
        start += new


@settings(max_examples=settings().max_examples // 10)
@given(
    contexts=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    width=st.integers(1, 4),
    sizes=st.sampled_from(SIZES),
    split=st.sampled_from([16, 512]),
    dtype=st.sampled_from(list(BOUNDS)),
)
def test_decode(
    contexts: list[int], width: int, sizes: Sizes, split: int, dtype: torch.dtype
) -> None:
    rows = [(width, context + width) for context in contexts]
    case = make_case(rows, sizes=sizes, dtype=dtype, width=width)
    check(decode(case, split, 3), case)


@settings(max_examples=settings().max_examples // 15)
@given(
    rows=st.lists(st.tuples(st.integers(1, 18), st.integers(0, 30)), min_size=1, max_size=2),
    sizes=st.sampled_from(SIZES),
    tile=st.sampled_from([3, 8]),
    dtype=st.sampled_from(list(BOUNDS)),
)
def test_prefill(rows: list[tuple[int, int]], sizes: Sizes, tile: int, dtype: torch.dtype) -> None:
    case = make_case([(new, new + before) for new, before in rows], sizes=sizes, dtype=dtype)
    check(prefill(case, tile), case)
    check(expanded(case), case)


def test_a_row_in_a_batch_has_the_bits_that_it_has_alone() -> None:
    rows = [(1, 70), (1, 3), (1, 41)]
    case = make_case(rows)
    together = decode(case, 16, 3)
    for row in range(3):
        tables = case.meta.block_tables[row : row + 1]
        positions = case.meta.positions[row : row + 1]
        meta = AttentionMetadata(positions, (1,), (rows[row][1],), tables)
        alone = decode(case._replace(q=case.q[row : row + 1], meta=meta), 16, 3)
        if DEVICE == "cuda":  # in the interpreter the products are numpy's
            assert torch.equal(alone[0], together[row])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_a_token_that_is_not_finite_harms_those_that_see_it() -> None:
    case = make_case([(6, 30), (6, 30)], block_size=4)
    block = case.meta.block_tables[0, 27 // 4]
    case.plane[block, 27 % 4, :24] = 0
    case.plane[block, 27 % 4, 24:] = float("nan")
    seen = torch.zeros(12, dtype=torch.bool)
    seen[3:6] = True
    clean = make_case([(6, 30), (6, 30)], block_size=4)
    for compute in (decode, lambda c: prefill(c, 8), expanded, lambda c: c.reference(SCALE)):
        found, expected = compute(case).cpu(), compute(clean).cpu()
        assert found[seen].isnan().all()
        assert torch.equal(found[~seen], expected[~seen])


@pytest.mark.parametrize(
    ("rows", "width"), [([(1, 5), (1, 66)], None), ([(3, 9)] * 2, 3), ([(5, 9), (2, 40)], None)]
)
def test_every_kind_of_part_finds_its_form(rows: list[tuple[int, int]], width: int | None) -> None:
    case = make_case(rows, width=width)
    found = attend_part(case.q, case.plane, case.expansion, case.rotated, case.meta, SCALE)
    check(found, case)


@pytest.mark.thorough
def test_parts_write_their_own_tokens_of_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step, an absorbed prefill and an expanded one."""
    monkeypatch.setattr(expanded_triton, "_LEAST_TOKENS", 20)
    kinds = set()
    for rows, width in (([(1, 5), (1, 66)], 1), ([(5, 9), (2, 40)], None), ([(30, 30)], None)):
        case = make_case(rows, width=width)
        whole = case.q.new_full((len(case.q) + 3, case.q.shape[1], case.expansion.value_size), -1)
        part = (case.q, case.plane, case.expansion, case.rotated, case.meta, SCALE)
        found = attend_part(*part, whole[2:-1])
        assert torch.equal(found, attend_part(*part)) and torch.equal(found, whole[2:-1])
        assert (whole[:2] == -1).all() and (whole[-1] == -1).all()
        kinds |= {type(plan) for plan, _ in case.meta.plans.values()}
    assert len(kinds) == 3


def test_a_step_with_more_queries_than_a_program_takes_runs_in_tiles() -> None:
    assert decode_span(4, 20, 4) == 0 and decode_span(20, 1, 4) == 10 and decode_span(7, 3, 4) == 1
    case = make_case([(20, 50), (20, 20)], width=20)
    found = attend_part(case.q, case.plane, case.expansion, case.rotated, case.meta, SCALE)
    check(found, case)
    assert len(cut_equal_tiles(2, 20, 8, "cpu")) == 6


@pytest.mark.parametrize("room", [2**29, 22_000])
def test_a_rule_expands_prompts_of_any_length(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one batch, in as many runs as there is room for, and each by itself."""
    monkeypatch.setattr(expanded_triton, "_MOST_BYTES", room)
    rows = [(1, 5), (3, 66), (20, 20), (2, 40)]
    case = make_case(rows)
    meta = replace(case.meta, rules=BY_ROW)
    part = case.plane, case.expansion, case.rotated
    together = attend_part(case.q, *part, meta, SCALE)
    check(together, case)
    ((plans, _),) = meta.plans.values()
    assert [tokens.stop for tokens, _ in plans] == ([26] if room > 22_000 else [1, 4, 26])
    start = 0
    for row, (new, context) in enumerate(rows):
        tokens = slice(start, start := start + new)
        tables = meta.block_tables[row : row + 1]
        one = AttentionMetadata(meta.positions[tokens], (new,), (context,), tables, rules=BY_ROW)
        alone = attend_part(case.q[tokens], *part, one, SCALE)
        if DEVICE == "cuda":
            assert torch.equal(alone, together[tokens])
        else:  # the interpreter's products are numpy's
            torch.testing.assert_close(alone, together[tokens], atol=1e-5, rtol=1e-5)


def test_rows_are_expanded_as_there_is_room() -> None:
    assert rows_at_once([10, 20, 30], 1) == [slice(0, 3)]
    most = expanded_triton._MOST_BYTES
    assert rows_at_once([5, 2, 2, 9], most // 4) == [slice(0, 1), slice(1, 3), slice(3, 4)]


def test_when_expansion_pays() -> None:
    assert does_expansion_pay([1024], [1024], 8192)
    assert not does_expansion_pay([64], [64], 8192)
    assert not does_expansion_pay([1024], [8192], 8192)
    assert not does_expansion_pay([30000], [100000], 8192)


def test_a_token_has_the_same_bits_in_any_chunk() -> None:
    whole = make_case([(40, 70)], device="cpu")
    meta = whole.meta
    pieces = []
    for start, stop in ((0, 1), (1, 18), (18, 40)):
        part = AttentionMetadata(
            meta.positions[start:stop], (stop - start,), (30 + stop,), meta.block_tables
        )
        pieces.append(
            latent_attention_reference(
                whole.q[start:stop], whole.plane, Loop(whole), whole.rotated, [part], SCALE
            )
        )
    expected = latent_attention_reference(
        whole.q, whole.plane, Loop(whole), whole.rotated, [meta], SCALE
    )
    assert torch.equal(torch.cat(pieces), expected)


class Loop:
    """The case's expansion, token by token."""

    def __init__(self, case: Case) -> None:
        self._whole, self.value_size = case.expansion, case.expansion.value_size

    def absorb(self, q: Tensor) -> Tensor:
        return torch.cat([self._whole.absorb(token) for token in q.split(1)])

    def values(self, mixed: Tensor, out: Tensor | None = None) -> Tensor:
        assert out is None
        return torch.cat([self._whole.values(token) for token in mixed.split(1)])

    def expand(self, latents: Tensor) -> Tensor:
        return self._whole.expand(latents)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("sizes", [Sizes(16, 512, 128, 64, 128), Sizes(20, 512, 192, 64, 256)])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 32768), (1, 20000), (1, 1)],
        [(1, 1 + 9 * row) for row in range(150)],
        [(4, 32768), (4, 777)],
        [(64, 32768), (5, 32000)],
        [(2048, 2048), (300, 1000)],
        [(8192, 32768)],
    ],
)
def test_published_shapes_and_long_rows(
    rows: list[tuple[int, int]], sizes: Sizes, dtype: torch.dtype
) -> None:
    width = rows[0][0] if rows[0][0] < 8 else None
    case = make_case(rows, sizes=sizes, block_size=16, dtype=dtype, width=width)
    found = attend_part(case.q, case.plane, case.expansion, case.rotated, case.meta, SCALE / 10)
    some = torch.randint(len(case.q), (16,), generator=torch.Generator().manual_seed(0))
    expected = plain(case, some, SCALE / 10)
    error = (found[some].float().cpu() - expected).abs().max() / expected.abs().max()
    assert float(error) < BOUNDS[dtype]


def plain(case: Case, tokens: Tensor, scale: float) -> Tensor:
    """The result of these tokens, each computed by itself in float32."""
    ends = torch.tensor(case.meta.query_lens).cumsum(0)
    results = []
    for token in tokens.tolist():
        row = int((ends <= token).sum())
        position = int(case.meta.positions[token])
        meta = AttentionMetadata(
            torch.tensor([position]), (1,), (position + 1,), case.meta.block_tables[row : row + 1]
        )
        alone = case._replace(q=case.q[token : token + 1], meta=meta)
        results.append(alone.reference(scale))
    return torch.cat(results)
