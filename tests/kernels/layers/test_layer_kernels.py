"""RMSNorm, rotary and SiLU·mul against transformers' modules, and the kernels against them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from batchgen.kernels.layers.activation import (
    gelu_and_mul,
    mul_sigmoid_reference,
    mul_sigmoid_triton,
    silu_and_mul,
    silu_and_mul_reference,
    silu_and_mul_triton,
    soft_cap,
)
from batchgen.kernels.layers.cache_plane import write_plane_reference, write_plane_triton
from batchgen.kernels.layers.embedding import (
    embedding_reference,
    embedding_share_reference,
    embedding_share_triton,
    embedding_triton,
)
from batchgen.kernels.layers.linear import add_linear_, pack_weight
from batchgen.kernels.layers.rms_norm import (
    rms_norm,
    rms_norm_of_sum,
    rms_norm_reference,
    rms_norm_triton,
)
from batchgen.kernels.layers.rotary import apply_rotary
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.experts_triton import moe_combine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    x, weight = _random(24, 5, 64, dtype=dtype), _random(64, dtype=dtype)
    reference = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_wide_weight_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    """The product is rounded once, after the weight; checkpoints hold the weight minus 1."""
    x, weight = _random(24, 5, 64, dtype=dtype), _random(64, dtype=dtype)
    reference = Qwen3NextRMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data = weight
    expected = reference(x)
    assert torch.equal(rms_norm(x, weight.float() + 1, 1e-5), expected)
    if dtype != torch.float32:
        assert not torch.equal(rms_norm(x, weight + 1, 1e-5), expected)
    x, wide = x.to(DEVICE), (weight.float() + 1).to(DEVICE)
    _assert_near(rms_norm_triton(x, wide, 1e-5), rms_norm_reference(x, wide, 1e-5))


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 72])
def test_a_centred_norm_has_the_bits_of_transformers(dtype: torch.dtype, size: int) -> None:
    x, weight = _random(24, 5, size, dtype=dtype) + 2, _random(size, dtype=dtype)
    theirs = Cohere2LayerNorm(size, eps=1e-5).to(dtype)
    theirs.weight.data = weight
    assert torch.equal(rms_norm(x, weight.float(), 1e-5, centred=True), theirs(x))
    x, wide = x.to(DEVICE), weight.float().to(DEVICE)
    ours = rms_norm_triton(x, wide, 1e-5, centred=True)
    rtol = 4 * torch.finfo(dtype).eps  # elements near the mean cancel
    reference = rms_norm_reference(x, wide, 1e-5, centred=True)
    torch.testing.assert_close(ours, reference, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_linear_writes_the_sum_to_the_residual(
    dtype: torch.dtype, packed: bool, bias: bool
) -> None:
    x, weight, residual, shift = (
        _random(*shape, dtype=dtype).to(DEVICE) for shape in ((32, 64), (48, 64), (32, 48), (48,))
    )
    expected = residual.double() + x.double() @ weight.double().T + shift.double() * bias
    ours = add_linear_(
        residual, x, pack_weight(weight) if packed else weight, shift if bias else None
    )
    assert ours.data_ptr() == residual.data_ptr() and ours.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected, rtol=8 * eps, atol=1e3 * eps)


def test_rotary_has_the_bits_of_transformers_in_float32() -> None:
    q, k = _random(10, 4, 32), _random(10, 2, 32)
    angles = _random(10, 16) * 100
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    cos_sin = torch.cat((torch.cos(angles), torch.sin(angles)), -1)
    ours = apply_rotary(q, k, cos_sin)
    theirs = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rotary_rounds_once_in_low_precision(dtype: torch.dtype) -> None:
    q, k = _random(10, 4, 32, dtype=dtype), _random(10, 2, 32, dtype=dtype)
    angles = _random(10, 16)
    cos_sin = torch.cat((torch.cos(angles), torch.sin(angles)), -1)
    low = apply_rotary(q, k, cos_sin)
    wide = apply_rotary(q.float(), k.float(), cos_sin)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(low, wide, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = _random(16, 2 * 96, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    reference = F.silu(gate.double()) * up.double()
    tolerance = 4 * torch.finfo(dtype).eps
    ours = silu_and_mul(gate_up)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_mul(dtype: torch.dtype) -> None:
    gate_up = 3 * _random(16, 2 * 96, dtype=dtype).to(DEVICE)
    gate, up = gate_up.chunk(2, -1)
    reference = F.gelu(gate.double(), approximate="tanh") * up.double()
    tolerance = 8 * torch.finfo(dtype).eps
    for ours in (gelu_and_mul(gate_up), silu_and_mul_triton(gate_up, gelu=True)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=1e-6)
    large = torch.tensor([[-1e30, -90.0, 0.0, 90.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert gelu_and_mul(large)[0, [0, 1, 2]].abs().max() == 0 and gelu_and_mul(large)[0, 3] == 90
    assert gelu_and_mul(large).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype: torch.dtype) -> None:
    x = 40 * _random(5, 33, dtype=dtype)
    x[0, :3] = torch.tensor([1e30, -1e30, 0.0])
    expected = 30 * torch.tanh(x.double() / 30)
    ours = soft_cap(x, 30.0)
    assert ours is x and ours.dtype == dtype
    torch.testing.assert_close(ours.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_silu_of_large_values_is_finite() -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]])
    out = silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    assert torch.equal(out.abs() < 1e-30, torch.tensor([[True, True, True, True, False, False]]))
    assert out.isfinite().all()


def _view(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A view whose last axis alone is contiguous; NaN stands around it."""
    wide = torch.full((*shape[:-1], shape[-1] + 5), float("nan"), dtype=dtype, device=DEVICE)
    view = wide[..., 2:-3]
    view.copy_(_random(*shape, dtype=dtype))
    return view


def _assert_near(ours: torch.Tensor, reference: torch.Tensor, ulps: int = 4) -> None:
    """Within the rounding of a few steps; no element is left unwritten."""
    assert ours.dtype == reference.dtype and ours.is_contiguous()
    rtol = ulps * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, reference, rtol=rtol, atol=1e-3 * rtol)


def _check_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = _view(*shape, dtype=dtype), _random(shape[-1], dtype=dtype).to(DEVICE)
    _assert_near(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def _check_norm_of_sum(
    rows: int, k: int, size: int, gated: bool | None, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """The bits of a sum over slots and a norm behind it; near the reference; NaN keeps its row."""
    x, slots = _random(rows, size, dtype=dtype), _random(rows * k, size, dtype=dtype)
    values, gate = _random(rows, 1, size, dtype=dtype)[:, 0], _random(rows, 1, dtype=dtype)
    weight = _random(size, dtype=weight_dtype)
    x, slots, values, gate, weight = (v.to(DEVICE) for v in (x, slots, values, gate, weight))
    shared = None if gated is None else SharedPart(values, gate if gated else None)
    parts = slots.view(rows, k, size).transpose(0, 1)

    total = x.clone()
    moe_combine(slots, total, None, shared, add=True)
    expected = rms_norm_triton(total, weight, 1e-5)
    stream = x.clone()
    found = rms_norm_triton(stream, weight, 1e-5, parts, shared)
    assert torch.equal(stream, total) and torch.equal(found, expected)

    # The interpreter rounds to less precise dtypes by cutting off.
    eps = torch.finfo(dtype).eps
    reference, on_cpu = x.cpu().clone(), None
    if gated is not None:
        on_cpu = SharedPart(values.cpu(), gate.cpu() if gated else None)
    normed = rms_norm_of_sum(reference, parts.cpu(), on_cpu, weight.cpu(), 1e-5)
    torch.testing.assert_close(stream.cpu(), reference, rtol=2 * eps, atol=32 * 2**-20)
    torch.testing.assert_close(found.cpu(), normed, rtol=8 * eps, atol=1e-5)

    broken = rows // 2
    slots[broken * k] = float("nan")
    stream = x.clone()
    found = rms_norm_triton(stream, weight, 1e-5, parts, shared)
    others = [row for row in range(rows) if row != broken]
    assert torch.equal(found[others], expected[others]) and found[broken].isnan().all()
    assert torch.equal(stream[others], total[others]) and stream[broken].isnan().all()


@pytest.mark.quick(2, thorough=8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [None, False, True])
@pytest.mark.parametrize(("rows", "k", "size"), [(1, 8, 2048), (7, 3, 200), (5, 1, 1500)])
def test_a_norm_adds_the_bits_of_a_sum_of_slots(
    rows: int, k: int, size: int, gated: bool | None, dtype: torch.dtype
) -> None:
    _check_norm_of_sum(rows, k, size, gated, dtype, dtype)


def test_a_norm_with_a_wide_weight_adds_parts() -> None:
    _check_norm_of_sum(3, 4, 200, True, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("run", [rms_norm_of_sum, rms_norm_triton])
def test_a_norm_adds_parts_that_are_wider_than_the_rows(run: Callable[..., torch.Tensor]) -> None:
    x, parts = _view(7, 200, dtype=torch.bfloat16), _random(2, 7, 200).to(DEVICE)
    weight = _random(200, dtype=torch.bfloat16).to(DEVICE)
    total = (parts.sum(0) + x.float()).to(torch.bfloat16)
    arguments = (
        (x, weight, 1e-5, parts) if run is rms_norm_triton else (x, parts, None, weight, 1e-5)
    )
    found = run(*arguments)
    torch.testing.assert_close(x, total, rtol=2**-7, atol=0)
    _assert_near(found, rms_norm_reference(x, weight, 1e-5))


def test_a_norm_adds_parts_to_no_rows() -> None:
    x, parts = torch.empty((0, 64), device=DEVICE), torch.empty((3, 0, 64), device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    assert rms_norm_of_sum(x, parts, None, weight, 1e-5).shape == (0, 64)


def _check_silu(gate_up: torch.Tensor) -> None:
    # The GPU's exp is that of 2 after a product, which rounds the exponent: float32 shows it.
    ulps = 32 if gate_up.dtype == torch.float32 else 4
    _assert_near(silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up), ulps)


@settings(deadline=None, max_examples=20)
@given(
    leading=st.lists(st.integers(1, 7), max_size=2),
    size=st.sampled_from([1, 16, 80, 128, 576, 1000, 2048]),
    dtype=st.sampled_from(DTYPES),
)
def test_norm_kernels_equal_the_reference(
    leading: list[int], size: int, dtype: torch.dtype
) -> None:
    _check_norms((*leading, size), dtype)


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 96, 1024, 1500]),
    dtype=st.sampled_from(DTYPES),
)
def test_silu_kernel_equals_the_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = _view(rows, 2 * size, dtype=dtype)
    _check_silu(gate_up)


@settings(deadline=None, max_examples=15)
@given(
    tokens=st.integers(1, 9),
    size=st.sampled_from([1, 96, 1024, 1500]),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_embedding_kernel_has_the_bits_of_the_table(
    tokens: int, size: int, dtype: torch.dtype, index: torch.dtype
) -> None:
    weight = _view(11, size, dtype=dtype)
    ids = (torch.arange(tokens) * 7 % 11).to(DEVICE, index)
    assert torch.equal(embedding_triton(ids, weight), embedding_reference(ids, weight))


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("find", [embedding_share_reference, embedding_share_triton])
def test_shares_of_a_table_add_up_to_it(
    find: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], dtype: torch.dtype
) -> None:
    weight = _view(12, 1500, dtype=dtype)
    ids = torch.tensor([0, 11, 4, 3, 8, 7, 4]).to(DEVICE)
    found = [find(ids, weight[first : first + 4], first) for first in (0, 4, 8)]
    for index, first in enumerate((0, 4, 8)):
        own = (ids >= first) & (ids < first + 4)
        assert torch.equal(found[index][own], weight[ids[own]])
        assert not found[index][~own].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(8192, 4096), (1, 4096), (513, 5120), (33, 16384), (65, 11008), (4096, 32, 128)]
)
def test_norm_kernels_at_real_sizes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_norms(shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [None, False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("rows", "k", "size"),
    [(1, 8, 2048), (64, 8, 2048), (513, 6, 2048), (65, 9, 5120), (4096, 4, 512)],
)
def test_a_norm_of_a_sum_at_real_sizes(
    rows: int, k: int, size: int, wide: bool, gated: bool | None, dtype: torch.dtype
) -> None:
    _check_norm_of_sum(rows, k, size, gated, dtype, torch.float32 if wide else dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(8192, 12288), (1, 12288), (70_000, 2050), (9, 14336)])
def test_silu_kernel_at_real_sizes(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = _random(rows, 2 * size, dtype=dtype).to(DEVICE)
    _check_silu(gate_up)


@pytest.mark.gpu
def test_embedding_of_a_table_of_more_than_2_31_elements() -> None:
    weight = torch.empty(600_000, 4096, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.randint(590_000, 600_000, (3000,), device=DEVICE)
    weight[590_000:].normal_()
    assert torch.equal(embedding_triton(ids, weight), weight[ids])


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 1500), (3, 2048)])
def test_a_gate_multiplies_values(rows: int, size: int, dtype: torch.dtype) -> None:
    values = _random(rows, size, dtype=dtype).to(DEVICE)
    gate = _view(rows, size, dtype=dtype)
    expected = values.double() * torch.sigmoid(gate.double())
    reference = mul_sigmoid_reference(values, gate)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(reference.double(), expected, rtol=2 * eps, atol=eps)
    _assert_near(mul_sigmoid_triton(values, gate), reference, 32 if dtype == torch.float32 else 4)


@pytest.mark.quick(6, thorough=6)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("tail", [(8,), (3, 2)])
def test_a_plane_holds_the_values_at_the_slots(
    dtype: torch.dtype, tokens: int, tail: tuple[int, ...]
) -> None:
    """In one of three layers, whose values are not neighbours; the others stay as they are."""
    generator = torch.Generator().manual_seed(0)
    most = 255 if dtype == torch.uint8 else 60000
    values = torch.randint(most + 1, (tokens, *tail), generator=generator, dtype=torch.int32)
    slots = torch.randperm(400, generator=generator)[:tokens]
    plane = torch.full((400, 3, *tail), 77).to(dtype)
    for write in (write_plane_reference, write_plane_triton):
        ours = plane.clone().to(DEVICE)
        write(ours[:, 1], slots.to(DEVICE), values.to(DEVICE))
        found = ours.cpu().int()
        assert torch.equal(found[slots, 1], values)
        untouched = torch.ones(found.shape[:2], dtype=torch.bool)
        untouched[slots, 1] = False
        assert (found[untouched] == 77).all()
