"""`prepare_qkv`, the rule for cached values that are not finite, and the slot mapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention.kv_cache import (
    KVCache,
    slot_mapping_reference,
    slot_mapping_triton,
    write_kv,
)
from batchgen.kernels.attention.qkv import prepare_qkv_reference, prepare_qkv_triton
from batchgen.kernels.layers.rms_norm import rms_norm_reference
from tests.support.kernels.fp8_cache import dequantised, empty_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK_SIZE = 4


class Case(NamedTuple):
    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor
    cache: KVCache
    slots: Tensor
    num_heads: int
    num_kv_heads: int
    v_weight: Tensor | None = None


def make_case(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    norm: bool,
    cache_dtype: torch.dtype | None = None,
    gap: int = 0,
    rotary_dim: int | None = None,
    wide_norm: bool = False,
) -> Case:
    """Random tokens at random slots; `gap` columns of NaN between the rows of qkv. With `wide_norm`
    the weights of the norms are in float32."""
    generator = torch.Generator().manual_seed(tokens + 31 * heads + head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    width = (heads + 2 * kv_heads) * head_dim
    wide = torch.full((tokens, width + gap), float("nan"), dtype=dtype, device=DEVICE)
    wide[:, :width] = (random(tokens, width) * 2).to(dtype)
    angles = random(tokens, (rotary_dim or head_dim) // 2) * 50
    blocks = 2 + -(-tokens // BLOCK_SIZE)
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:tokens].to(DEVICE)
    table = torch.full((2, kv_heads, blocks, BLOCK_SIZE, head_dim), 7.0, device=DEVICE)
    key, value = table.to(cache_dtype or dtype)
    weights = random(2, head_dim).to(torch.float32 if wide_norm else dtype)
    q_weight, k_weight = weights if norm else (None, None)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    cache = KVCache(key, value)
    return Case(wide[:, :width], q_weight, k_weight, 1e-6, cos_sin, cache, slots, heads, kv_heads)


def fresh(case: Case) -> Case:
    return case._replace(cache=KVCache(case.cache.key.clone(), case.cache.value.clone()))


def assert_near(ours: Tensor, reference: Tensor, *, exact: bool) -> None:
    assert ours.dtype == reference.dtype and ours.shape == reference.shape
    # A rotated element is a difference of two, each with an error in proportion to its own size.
    atol = 0.0 if exact else 4 * torch.finfo(ours.dtype).eps * float(reference.abs().max())
    torch.testing.assert_close(ours, reference, rtol=0, atol=atol, equal_nan=True)


def check(case: Case) -> None:
    theirs = fresh(case)
    q = prepare_qkv_triton(*case)
    reference = prepare_qkv_reference(*theirs)
    assert q.is_contiguous()
    # Triton's interpreter truncates float32 to bfloat16; compiled code rounds to nearest.
    exact = DEVICE == "cuda" or torch.bfloat16 not in (q.dtype, case.cache.key.dtype)
    assert_near(q, reference, exact=exact and case.q_weight is None)
    assert_near(case.cache.key, theirs.cache.key, exact=exact and case.q_weight is None)
    same_dtype = q.dtype == case.cache.value.dtype
    exact = (exact or same_dtype) and case.v_weight is None
    assert_near(case.cache.value, theirs.cache.value, exact=exact)


@settings(deadline=None, max_examples=15)
@given(
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (6, 1), (5, 5)]),
    head_dim=st.sampled_from([16, 18, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    norm=st.booleans(),
    gap=st.sampled_from([0, 3]),
)
def test_equals_the_reference(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    norm: bool,
    gap: int,
) -> None:
    check(make_case(tokens, *heads, head_dim, dtype, norm=norm, gap=gap))


def test_more_heads_than_a_program_takes() -> None:
    check(make_case(3, 20, 10, 256, torch.float32, norm=True))


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 8), (96, 24), (256, 64)])
def test_some_pairs_are_rotated_and_norms_are_wide(
    head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    case = make_case(4, 4, 2, head_dim, dtype, norm=True, rotary_dim=rotary_dim, wide_norm=True)
    check(case)
    q = prepare_qkv_reference(*fresh(case))
    whole = F.pad(case.cos_sin.unflatten(1, (2, -1)), (0, (head_dim - rotary_dim) // 2))
    whole[:, 0, rotary_dim // 2 :] = 1
    assert torch.equal(q, prepare_qkv_reference(*fresh(case._replace(cos_sin=whole.flatten(1)))))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_pair_is_rotated(dtype: torch.dtype) -> None:
    """Queries stay as they are, for layers without rotary embedding."""
    case = make_case(4, 4, 2, 32, dtype, norm=False)
    case = case._replace(cos_sin=case.cos_sin[:, :0].contiguous())
    check(case)
    q = prepare_qkv_triton(*fresh(case))
    assert torch.equal(q.flatten(1), case.qkv[:, : 4 * 32])


def with_value_norm(case: Case, *, from_keys: bool) -> Case:
    """The case with a norm of values, which are the keys before their norm if `from_keys`."""
    head_dim = case.cache.key.shape[-1]
    weight = torch.linspace(0.5, 2, head_dim, device=DEVICE)
    width = (case.num_heads + case.num_kv_heads) * head_dim
    return case._replace(qkv=case.qkv[:, :width] if from_keys else case.qkv, v_weight=weight)


@pytest.mark.quick(2, thorough=12)
@pytest.mark.parametrize("from_keys", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 2, 32), (9, 3, 18), (16, 2, 512)])
def test_values_are_normalised(
    sizes: tuple[int, int, int], dtype: torch.dtype, from_keys: bool
) -> None:
    """Gemma 4, with its sizes: what separate launches would make of the values is stored."""
    plain = make_case(5, *sizes, dtype, norm=True, wide_norm=True, gap=3)
    case = with_value_norm(plain, from_keys=from_keys)
    check(case)
    heads, kv_heads, head_dim = sizes
    first = (heads if from_keys else heads + kv_heads) * head_dim
    values = plain.qkv[:, first : first + kv_heads * head_dim].unflatten(1, (kv_heads, -1))
    assert case.v_weight is not None
    normed = rms_norm_reference(values, case.v_weight, case.eps).flatten(1)
    apart = torch.cat((plain.qkv[:, : (heads + kv_heads) * head_dim], normed), 1)
    q = prepare_qkv_reference(*case)
    theirs = fresh(plain._replace(qkv=apart))
    assert torch.equal(q, prepare_qkv_reference(*theirs))
    assert torch.equal(case.cache.key, theirs.cache.key)
    assert torch.equal(case.cache.value, theirs.cache.value)


@pytest.mark.parametrize("from_keys", [False, True])
@pytest.mark.parametrize("run", [prepare_qkv_triton, prepare_qkv_reference])
def test_a_value_that_is_not_finite_breaks_its_pair_before_its_norm(
    run: Callable[..., Tensor], from_keys: bool
) -> None:
    case = with_value_norm(make_case(3, 4, 2, 16, torch.float32, norm=True), from_keys=from_keys)
    case.qkv[1, (4 + 1 if from_keys else 4 + 2 + 1) * 16 + 5] = float("inf")
    run(*case)
    keys, values = (table.view(2, -1, 16)[:, case.slots] for table in case.cache[:2])
    assert keys[1, 1].isnan().all() and (values[1, 1] == 0).all()
    assert int(keys.isnan().sum()) == 16 and values.isfinite().all()


@pytest.mark.parametrize("norm", [False, True])
def test_a_narrower_cache(norm: bool) -> None:
    check(make_case(5, 4, 2, 32, torch.float32, norm=norm, cache_dtype=torch.bfloat16))


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy, in the interpreter
@pytest.mark.parametrize("run", [prepare_qkv_triton, prepare_qkv_reference])
@pytest.mark.parametrize("norm", [False, True])
def test_queries_alone(run: Callable[..., Tensor], norm: bool) -> None:
    """Layers that read the keys and values of another one have no others."""
    case = make_case(5, 4, 2, 32, torch.float32, norm=norm)
    alone = case._replace(qkv=case.qkv[:, : 4 * 32], num_kv_heads=0)
    q = run(*alone)
    assert all((table == 7).all() for table in case.cache[:2])  # as it was
    assert torch.equal(q, run(*case))


@pytest.mark.quick(4, thorough=4)
@pytest.mark.parametrize("run", [prepare_qkv_triton, prepare_qkv_reference])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e6])
@pytest.mark.parametrize("part", ["key", "value"])
def test_tokens_that_are_not_finite(run: object, poison: float, part: str) -> None:
    """Token 1's second KV head breaks (1e6: in the cast); all else is stored as it was."""
    assert callable(run)
    clean = make_case(3, 4, 2, 16, torch.float32, norm=False, cache_dtype=torch.float16)
    broken = fresh(clean)._replace(qkv=clean.qkv.clone())
    head = 4 + 1 + (2 if part == "value" else 0)
    broken.qkv[1, head * 16 + 5] = poison
    q, same_q = run(*clean), run(*broken)
    assert torch.equal(q, same_q)
    slot = int(broken.slots[1])
    keys, values = (table.view(2, -1, 16) for table in broken.cache[:2])
    assert keys[1, slot].isnan().all()
    assert (values[1, slot] == 0).all()
    for table, original in zip((keys, values), clean.cache[:2], strict=True):
        table[1, slot] = original.view(2, -1, 16)[1, slot]
        assert torch.equal(table, original.view(2, -1, 16))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((4, 2, 64), torch.float32), ((5, 5, 80), torch.bfloat16), ((4, 2, 256), torch.float16)],
)
def test_a_cache_in_fp8(sizes: tuple[int, int, int], dtype: torch.dtype, norm: bool) -> None:
    """A head's bits depend on the token alone; what is not finite makes its key's scale NaN."""
    case = make_case(5, *sizes, dtype, norm=norm)
    kv_heads, head_dim = sizes[1:]
    case.qkv[1, (sizes[0] + 1) * head_dim] = float("nan")
    case.qkv[2, (sizes[0] + kv_heads) * head_dim] = float("inf")
    case.qkv[0, (sizes[0] + kv_heads) * head_dim] = 120_000
    case.qkv[3, -kv_heads * head_dim :] = 0
    ours, theirs = (case._replace(cache=empty_fp8(case.cache.key)) for _ in range(2))
    prepare_qkv_triton(*ours)
    prepare_qkv_reference(*theirs)
    scales = ours.cache.scales
    assert scales is not None and theirs.cache.scales is not None
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-3 if norm else 1e-6
    torch.testing.assert_close(scales, theirs.cache.scales, rtol=tolerance, atol=0, equal_nan=True)
    of_slots = scales.flatten(1, 2)[:, case.slots]
    assert of_slots[1, 1, 0].isnan() and of_slots[0, 2, 0].isnan() and of_slots[0, 0, 0].isnan()
    assert of_slots[..., 1].isfinite().all() and int(of_slots.isnan().sum()) == 3
    for mine, other in zip(dequantised(ours.cache), dequantised(theirs.cache), strict=True):
        step = other.abs().amax(-1, keepdim=True) / 14  # between the largest two values of FP8
        assert (((mine - other).abs() <= 1.2 * step) | other.isnan()).all()
        if dtype != torch.bfloat16:  # which the interpreter truncates
            assert ((mine - other).abs() > 0.02 * step).float().mean() < 0.05
    alone = case._replace(
        qkv=case.qkv[4:], cos_sin=case.cos_sin[4:], slots=case.slots[4:] * 0,
        cache=empty_fp8(case.cache.key),
    )  # fmt: skip
    prepare_qkv_triton(*alone)
    slot = int(case.slots[4])
    for own, beside in zip(alone.cache, ours.cache, strict=True):
        assert own is not None and beside is not None
        found, expected = own.flatten(1, 2)[:, 0], beside.flatten(1, 2)[:, slot]
        assert torch.equal(found.float(), expected.float())


def test_write_kv_leaves_no_value_that_is_not_finite() -> None:
    key, value = torch.randn(2, 6, 2, 8)
    key[0, 0, 3], value[2, 1, 0], value[5] = float("nan"), float("inf"), float("-inf")
    cache = KVCache(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8))
    write_kv(key, value, cache, torch.arange(4, 10))
    assert cache.value.isfinite().all()
    broken = cache.key.view(2, 12, 8).isnan()
    expected = torch.zeros(2, 12, 1, dtype=torch.bool)
    expected[0, 4] = expected[1, 6] = expected[:, 9] = True
    assert torch.equal(broken, expected.expand_as(broken))


@settings(deadline=None, max_examples=15)
@given(
    lens=st.lists(st.integers(0, 300), min_size=1, max_size=4).filter(any),
    block_size=st.sampled_from([1, 16, 48]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)
def test_slots_of_rows_of_any_length(
    lens: list[int], block_size: int, index: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(1, 2**25, (len(lens), 20), generator=generator).to(DEVICE)
    tables = wide[:, :7].to(index) if seed % 2 else wide[:, :7]
    rows = torch.repeat_interleave(torch.tensor(lens)).to(DEVICE, index)
    positions = torch.randint(7 * block_size, (len(rows),), generator=generator).to(DEVICE)
    slots = slot_mapping_triton(positions, rows, tables, block_size)
    expected = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
    ]
    assert slots.dtype == torch.int64 and slots.tolist() == expected
    assert torch.equal(slot_mapping_reference(positions, rows, tables, block_size), slots)


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (5, 1), (3, 200), (1, 700)])
def test_slots_of_rows_of_equal_length(batch: int, width: int) -> None:
    tables = torch.randint(1, 2**30, (batch, 50), device=DEVICE)
    positions = torch.arange(width, device=DEVICE).repeat(batch)
    rows = torch.repeat_interleave(torch.arange(batch, device=DEVICE), width)
    expected = slot_mapping_reference(positions, rows, tables, 16)
    assert torch.equal(slot_mapping_triton(positions, None, tables, 16), expected)
    assert torch.equal(slot_mapping_reference(positions, None, tables, 16), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(8192, 32, 8, 128), (1, 32, 8, 128), (512, 64, 8, 128), (300, 71, 1, 64), (300, 32, 32, 80),
     (300, 8, 4, 256)],
)  # fmt: skip
def test_real_sizes(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, norm: bool
) -> None:
    check(make_case(tokens, heads, kv_heads, head_dim, dtype, norm=norm))


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("from_keys", [False, True])
@pytest.mark.parametrize("sizes", [(16, 8, 256), (16, 2, 512), (32, 4, 512)])
def test_a_token_keeps_its_normalised_values_in_any_batch(
    sizes: tuple[int, int, int], from_keys: bool, in_fp8: bool
) -> None:
    case = make_case(300, *sizes, torch.bfloat16, norm=True, wide_norm=True)
    case = with_value_norm(case, from_keys=from_keys)
    if in_fp8:
        case = case._replace(cache=empty_fp8(case.cache.key))
    else:
        check(case)
    prepare_qkv_triton(*case)
    tables = [table for table in case.cache if table is not None]
    expected = [table.flatten(1, 2)[:, case.slots].float() for table in tables]
    for table in tables:
        table.zero_()
    for first, end in ((0, 1), (1, 18), (18, 300)):
        part = case._replace(
            qkv=case.qkv[first:end], cos_sin=case.cos_sin[first:end], slots=case.slots[first:end]
        )
        prepare_qkv_triton(*part)
    for table, whole in zip(tables, expected, strict=True):
        assert torch.equal(table.flatten(1, 2)[:, case.slots].float(), whole)


@pytest.mark.gpu
def test_a_cache_of_more_than_2_31_elements() -> None:
    case = make_case(4, 2, 2, 128, torch.bfloat16, norm=False)
    shape = (2, 600_000, 16, 128)
    table = torch.empty((2, *shape), dtype=torch.bfloat16, device=DEVICE)
    case = case._replace(cache=KVCache(*table), slots=torch.arange(4, device=DEVICE) + 9_599_000)
    small = KVCache(*torch.empty((2, 2, 1, 16, 128), dtype=torch.bfloat16, device=DEVICE))
    theirs = case._replace(cache=small, slots=torch.arange(4, device=DEVICE))
    prepare_qkv_triton(*case)
    prepare_qkv_reference(*theirs)
    for ours, reference in zip(case.cache[:2], small[:2], strict=True):
        written = ours.view(2, -1, 128)[:, 9_599_000:9_599_004]
        assert torch.equal(written, reference.view(2, -1, 128)[:, :4])
