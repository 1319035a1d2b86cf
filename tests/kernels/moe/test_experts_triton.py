"""The grouped products against float64, over routings, shapes and ways to cut them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe import moe_align_triton as alignment_triton
from batchgen.kernels.moe.epilogues import PLAIN, ClampedGate, Epilogues
from batchgen.kernels.moe.experts import (
    PlainExperts,
    grouped_mlp,
    grouped_mlp_reference,
    grouped_parts,
)
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton, moe_combine
from batchgen.kernels.moe.moe_tiles import MoETiles, ProductTiles
from batchgen.kernels.moe.tiled_layout import (
    are_panels,
    keeps_panels,
    matrix_sizes,
    rows_of_panels,
    to_panels,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")

# Hopper's wgmma takes over at 64 rows of the left operand, so these are all paths of the compiler.
ROWS = [
    MoETiles(16, ProductTiles(16, 16, 4, 2), ProductTiles(32, 32, 4, 2)),
    MoETiles(16, ProductTiles(64, 32, 4, 3, swap=True), ProductTiles(64, 16, 4, 2, swap=True)),
    MoETiles(32, ProductTiles(16, 32, 4, 2, halve=True), ProductTiles(16, 16, 4, 2, halve=True)),
]
PANELS = [
    MoETiles(16, ProductTiles(64, 128, 4, 3, swap=True), ProductTiles(32, 128, 4, 3)),
    MoETiles(16, ProductTiles(32, 64, 4, 2), ProductTiles(128, 64, 4, 2, swap=True)),
    MoETiles(32, ProductTiles(16, 64, 4, 2, halve=True), ProductTiles(32, 128, 4, 2, halve=True)),
    MoETiles(16, ProductTiles(128, 128, 4, 2), ProductTiles(128, 64, 4, 2, persistent=True)),
]
FLOAT32 = [ROWS[0], MoETiles(32, *(p._replace(swap=True, halve=True) for p in ROWS[0][1:]))]


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
}


@dataclass
class Case:
    """What the kernel takes, on DEVICE: weights in rows or in panels."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    epilogues: Epilogues = PLAIN

    @classmethod
    def make(
        cls, tokens: int, k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype,
        *, used: int = 10_000, gap: int = 0, seed: int = 0, in_panels: bool = False,
        parts: int = 2,
    ) -> Case:  # fmt: skip
        """Random numbers; x lies in a wider tensor with NaN in the `gap` columns before it. The
        experts of a token are different ones of the first `used`."""
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        x = torch.full((tokens, gap + hidden), NAN, device=DEVICE, dtype=dtype)[:, gap:]
        x.copy_(normal(tokens, hidden))
        scores = torch.rand(
            (tokens, min(max(used, k), experts)), generator=generator, device=DEVICE
        )
        gate_up = normal(experts, parts * inner, hidden).div_(hidden**0.5).to(dtype)
        down = normal(experts, hidden, inner).div_(inner**0.5).to(dtype)
        return cls(
            x,
            to_panels(gate_up) if in_panels else gate_up,
            to_panels(down) if in_panels else down,
            scores.topk(k).indices.int(),
            torch.rand((tokens, k), generator=generator, device=DEVICE),
        )

    def with_epilogues(self) -> Case:
        """The case with biases and a gate that cuts off many values."""
        experts, hidden, inner = matrix_sizes(self.down)
        generator = torch.Generator(DEVICE).manual_seed(experts)
        wide, narrow = (
            torch.randn((experts, size), generator=generator, device=DEVICE).to(self.x.dtype)
            for size in (2 * inner, hidden)
        )
        return replace(self, epilogues=Epilogues(wide, narrow, ClampedGate(0.75, 1.702)))

    @property
    def experts(self) -> PlainExperts:
        return PlainExperts(self.gate_up, self.down)

    def run(self, tiles: MoETiles | None, residual: Tensor | None = None) -> Tensor:
        arguments = self.x, self.experts, self.ids, self.weights, residual
        return grouped_mlp_triton(*arguments, epilogues=self.epilogues, tiles=tiles)

    def reference(self) -> tuple[Tensor, Tensor]:
        """The results [T, H] in float64, and for each token the sum of its slots' norms [T]."""
        parts = torch.zeros((*self.ids.shape, self.x.shape[1]), dtype=torch.float64, device=DEVICE)
        for expert in self.ids.unique().tolist():
            chosen = self.ids == expert
            x = self.x[chosen.nonzero()[:, 0]].double()
            gate_up, down = _matrix(self.gate_up, expert), _matrix(self.down, expert)
            wide_bias, bias, clamped, function, _ = self.epilogues
            wide = x @ gate_up.double().T + (0 if wide_bias is None else wide_bias[expert].double())
            gate, up = wide.chunk(2, -1) if function != "relu2" else (wide, wide)
            if function == "relu2":
                inner = up.relu().square()
            elif clamped is not None:
                up = up.clamp(-clamped.limit, clamped.limit) + 1
                gate = gate.clamp(max=clamped.limit)
                inner = up * gate * torch.sigmoid(gate * clamped.slope)
            else:
                inner = _FUNCTIONS[function](gate) * up
            found = inner @ down.double().T
            parts[chosen] = found if bias is None else found + bias[expert].double()
        parts *= self.weights.double().unsqueeze(-1)
        return parts.sum(1), parts.norm(dim=-1).sum(1)

    def tolerance(self) -> float:
        """How far a row may be from the reference, in units of the norms of its slots.

        Three values are rounded to the dtype, one after another: what is between the products, each
        slot's result, the sum. The interpreter rounds to bfloat16 by cutting off, an error of one
        epsilon. The float32 sums of H and I products add an error that grows with their root.
        """
        depth = self.x.shape[1] + matrix_sizes(self.down)[2]
        return 3 * torch.finfo(self.x.dtype).eps + math.sqrt(depth) * 2**-23


def _matrix(weights: Tensor, expert: int) -> Tensor:
    """The matrix [N, K] of an expert."""
    if are_panels(weights):
        return rows_of_panels(weights)[expert].flatten(1)
    return weights[expert]


def _assert_near(found: Tensor, case: Case) -> None:
    expected, scale = case.reference()
    assert found.shape == expected.shape and found.dtype == case.x.dtype
    errors = (found.double() - expected).norm(dim=-1)
    assert (errors <= case.tolerance() * scale).all(), (errors / scale).max()


@settings(deadline=None, max_examples=12)
@given(
    tokens=st.integers(1, 12),
    most=st.integers(1, 3),
    experts=st.sampled_from([1, 3, 7]),
    sizes=st.sampled_from([(16, 16), (48, 40), (40, 24), (72, 96)]),
    dtype=st.sampled_from(DTYPES),
    which=st.integers(0, 2),
    gap=st.sampled_from([0, 8]),
    used=st.sampled_from([1, 100]),
)
def test_experts_equal_the_reference(
    tokens: int, most: int, experts: int, sizes: tuple[int, int], dtype: torch.dtype, which: int,
    gap: int, used: int,
) -> None:  # fmt: skip
    k = min(most, experts)
    case = Case.make(tokens, k, experts, *sizes, dtype, used=used, gap=gap)
    tiles = FLOAT32[which % 2] if dtype == torch.float32 else ROWS[which]
    _assert_near(case.run(tiles), case)


@pytest.mark.thorough
@settings(deadline=None, max_examples=12)
@given(
    tokens=st.integers(1, 12),
    most=st.integers(1, 3),
    experts=st.sampled_from([1, 3]),
    sizes=st.sampled_from([(64, 64), (128, 64), (64, 192), (192, 128)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    tiles=st.sampled_from(PANELS),
    used=st.sampled_from([1, 100]),
)
def test_weights_in_panels_give_the_same(
    tokens: int, most: int, experts: int, sizes: tuple[int, int], dtype: torch.dtype,
    tiles: MoETiles, used: int,
) -> None:  # fmt: skip
    """Steps of the sum and tiles of columns may end past the last panel and the last row."""
    k = min(most, experts)
    case = Case.make(tokens, k, experts, *sizes, dtype, used=used, in_panels=True)
    _assert_near(case.run(tiles), case)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tiles", PANELS)
def test_panels_of_other_experts_do_not_matter(tiles: MoETiles) -> None:
    """Past the last panel of an expert, which half of a step may be, those of the next one lie."""
    case = Case.make(5, 1, 3, 192, 192, torch.bfloat16, used=1, in_panels=True)
    clean = case.run(tiles)
    _assert_near(clean, case)
    case.gate_up[1:], case.down[1:] = NAN, NAN
    assert torch.equal(case.run(tiles), clean)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tiles", ROWS + PANELS)
def test_all_tokens_to_one_expert_fill_several_tiles(tiles: MoETiles) -> None:
    sizes, tokens = (64, 64, torch.bfloat16), 2 * tiles.block_m + 3
    case = Case.make(tokens, 1, 4, *sizes, used=1, in_panels=tiles in PANELS)
    assert (case.ids == 0).all()
    _assert_near(case.run(tiles), case)


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize(
    ("tiles", "gate"),
    [*zip([*ROWS, *PANELS, *FLOAT32], itertools.cycle(["clamped", "gelu", "relu2"]), strict=False)],
)
def test_biases_and_another_gate(tiles: MoETiles, gate: str) -> None:
    """In columns and rows that tiles do not fill; the CPU's product and the reference agree."""
    in_panels, dtype = tiles in PANELS, torch.float32 if tiles in FLOAT32 else torch.bfloat16
    sizes = (192, 64) if in_panels else (72, 40)
    parts = 1 if gate == "relu2" else 2
    case = Case.make(tiles.block_m + 3, 2, 3, *sizes, dtype, in_panels=in_panels, parts=parts)
    case = case.with_epilogues()
    if gate == "gelu":
        case = replace(case, epilogues=case.epilogues._replace(clamped=None, function="gelu"))
    if gate == "relu2":
        assert case.epilogues.gate_up_bias is not None
        bias = case.epilogues.gate_up_bias[:, : sizes[1]].contiguous()
        case = replace(case, epilogues=Epilogues(bias, case.epilogues.down_bias, function="relu2"))
    _assert_near(case.run(tiles), case)
    if not in_panels:
        routed = case.ids, case.weights
        found = grouped_mlp(case.x, case.experts, *routed, epilogues=case.epilogues)
        _assert_near(found, case)
        _assert_near(grouped_mlp_reference(case.x, *case.experts, *routed, case.epilogues), case)


@pytest.mark.quick(1)
@pytest.mark.parametrize("sizes", [(33, 20), (20, 33)])
def test_sizes_that_no_vector_divides(sizes: tuple[int, int]) -> None:
    case = Case.make(5, 2, 3, *sizes, torch.bfloat16)
    _assert_near(case.run(ROWS[0]), case)


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize(
    ("tiles", "plain"),
    [
        pytest.param(tiles, plain, marks=[pytest.mark.slow] * (not plain and i > 0))
        for group in (ROWS, PANELS)
        for i, tiles in enumerate(group)
        for plain in (True, False)
    ],
)
def test_nan_stays_in_its_token(tiles: MoETiles, plain: bool) -> None:
    # Tokens of one expert share tiles, in which 7 of them leave rows that are not computed for any.
    case = Case.make(7, 2, 2, 64, 64, torch.bfloat16, used=2, in_panels=tiles in PANELS)
    case = case if plain else case.with_epilogues()
    clean = case.run(tiles)
    case.x[2, 5] = NAN
    case.x[3, 0] = float("inf")
    case.weights[6, 1] = NAN
    spoiled = case.run(tiles)
    kept = [0, 1, 4, 5]
    assert torch.equal(spoiled[kept], clean[kept])
    assert not spoiled[[2, 3, 6]].isfinite().any()


def test_the_result_is_added_to_the_residual_in_place() -> None:
    case = Case.make(5, 2, 3, 40, 24, torch.float32)
    residual = torch.randn_like(case.x)
    expected = residual + case.run(FLOAT32[0])
    out = case.run(FLOAT32[0], residual)
    assert out is residual
    torch.testing.assert_close(out, expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("dtype", "on_residual", "gated"),
    [
        pytest.param(dtype, on_residual, gated, marks=[pytest.mark.slow] * (gated != on_residual))
        for dtype, on_residual, gated in itertools.product(DTYPES, [False, True], [False, True])
    ],
)
def test_what_a_shared_expert_made_is_added(
    dtype: torch.dtype, on_residual: bool, gated: bool
) -> None:
    """By the kernel, which rounds once, and by the public function, one after another on a CPU."""
    case = Case.make(5, 2, 3, 40, 24, dtype)
    generator = torch.Generator(DEVICE).manual_seed(1)
    normal = functools.partial(torch.randn, generator=generator, device=DEVICE)
    values, residual = normal((2, 5, 40)).to(dtype)
    gate = normal((5, 1)).to(dtype) if gated else None
    expected, scale = case.reference()
    added = values.double() * (1 if gate is None else torch.sigmoid(gate.double()))
    expected = expected + added + (residual.double() if on_residual else 0)
    scale = scale + added.norm(dim=-1) + residual.double().norm(dim=-1) * on_residual
    arguments = case.x, case.experts, case.ids, case.weights
    asked: list[int] = []

    def shared() -> SharedPart:
        asked.append(1)
        return SharedPart(values, gate)

    for run in (functools.partial(grouped_mlp_triton, tiles=FLOAT32[0]), grouped_mlp):
        out = residual.clone() if on_residual else None
        found = run(*arguments, out, shared=shared)
        assert not on_residual or found is out
        errors = (found.double() - expected).norm(dim=-1)
        assert (errors <= 2 * case.tolerance() * scale).all(), (errors / scale).max()
    assert len(asked) == 2


@pytest.mark.parametrize("gated", [False, True])
def test_a_sum_with_a_shared_part_is_rounded_once(gated: bool) -> None:
    # In bfloat16 2⁻⁸ is lost beside 1, however that is rounded, and 2⁻⁷ is not.
    parts = torch.full((2, 16), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    out = torch.ones((1, 16), dtype=torch.bfloat16, device=DEVICE)
    values = torch.full_like(out, 2.0**-7 if gated else 2.0**-8)
    gate = torch.zeros((1, 1), dtype=torch.bfloat16, device=DEVICE) if gated else None
    moe_combine(parts, out, None, SharedPart(values, gate), add=True)
    assert (out == 1 + 2.0**-7).all()


def test_slots_are_added_in_their_order() -> None:
    # 1 is lost beside 2²⁵ unless the two that are large cancel first.
    case = Case.make(1, 3, 3, 16, 16, torch.float32)
    case.gate_up[:] = case.gate_up[0].clone()
    case.down[:] = case.down[0].clone()
    case.ids[:] = torch.tensor([[2, 0, 1]])
    case.weights[:] = 1
    one = case.run(FLOAT32[0]) / 3
    for order in itertools.permutations((2.0**25, -(2.0**25), 1.0)):
        case.weights[:] = torch.tensor([order])
        out = case.run(FLOAT32[0])
        if order[2] == 1:
            torch.testing.assert_close(out, one)
        else:
            assert not torch.allclose(out, one)


def test_no_tokens() -> None:
    assert Case.make(0, 2, 3, 16, 16, torch.float32).run(None).shape == (0, 16)


# --- real sizes, compiled -------------------------------------------------------------------------

REAL = [(128, 8, 2048, 768), (256, 8, 2048, 512), (64, 6, 2048, 1408)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 256, 600, 1024, 2048, 4096])
@pytest.mark.parametrize("used", [1, 10_000])
def test_every_line_of_the_table(shape: tuple[int, int, int, int], tokens: int, used: int) -> None:
    sizes = *shape[2:], torch.bfloat16
    case = Case.make(tokens, shape[1], shape[0], *sizes, used=used, in_panels=True)
    _assert_near(case.run(None), case)


@pytest.mark.gpu
def test_parts_lie_by_choice_of_the_token() -> None:
    case = Case.make(9, 3, 4, 144, 128, torch.float32)
    arguments = case.x, case.experts, case.ids, case.weights
    parts = grouped_parts(*arguments)
    assert parts is not None and parts.shape == (3, 9, 144)
    torch.testing.assert_close(parts.sum(0), grouped_mlp(*arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", ROWS + PANELS)
def test_compiled_tiles(tiles: MoETiles) -> None:
    sizes, in_panels = (256, 192, torch.bfloat16), tiles in PANELS
    for tokens in (1, 100, 1000):
        case = Case.make(tokens, 4, 60, *sizes, gap=8, in_panels=in_panels)
        _assert_near(case.run(tiles), case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "inner"), [(torch.float32, 192), (torch.float16, 200), (torch.float16, 192)]
)
def test_other_dtypes_and_sizes(dtype: torch.dtype, inner: int) -> None:
    in_panels = keeps_panels(torch.device(DEVICE), dtype, inner)
    for tokens in (1, 300, 3000):
        case = Case.make(tokens, 4, 60, 256, inner, dtype, in_panels=in_panels)
        _assert_near(case.run(None), case)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 256, 4096])
def test_the_same_bits_from_run_to_run(tokens: int) -> None:
    case = Case.make(tokens, 8, 128, 2048, 768, torch.bfloat16, in_panels=True)
    first = case.run(None)
    for _ in range(20):
        assert torch.equal(case.run(None), first)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 256, 2048])
def test_a_graph_follows_the_ids_it_finds(tokens: int) -> None:
    """The number of tiles changes between replays, from one expert for all to a few for each."""
    shape = (tokens, 8, 128, 512, 256, torch.bfloat16)
    cases = [Case.make(*shape, used=used, seed=used, in_panels=True) for used in (8, 20, 10_000)]
    held = cases[0]
    expected = []
    for case in cases:
        case.gate_up, case.down = held.gate_up, held.down
        expected.append(case.run(None))
    held = Case(held.x.clone(), held.gate_up, held.down, held.ids.clone(), held.weights.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = held.run(None)
    for case, result in [*zip(cases, expected, strict=True), (cases[0], expected[0])]:
        held.x.copy_(case.x)
        held.ids.copy_(case.ids)
        held.weights.copy_(case.weights)
        graph.replay()
        assert torch.equal(out, result)


@pytest.mark.parametrize("add", [False, True])
def test_only_slots_whose_expert_is_here_are_added(add: bool) -> None:
    parts = torch.randn((5 * 3, 40), device=DEVICE)
    ids = torch.arange(15, device=DEVICE, dtype=torch.int32).view(5, 3) % 4
    before = torch.randn((5, 40), device=DEVICE)
    of_all, of_some = before.clone(), before.clone()
    moe_combine(parts, of_all, add=add)
    torch.testing.assert_close(of_all, parts.view(5, 3, 40).sum(1) + before * add)
    is_here = ids.flatten() < 2
    # Nothing is written for the others, so anything may stand there.
    spoiled = parts.where(is_here.unsqueeze(1), NAN)
    moe_combine(spoiled, of_some, (ids, 2), add=add)
    kept = parts.where(is_here.unsqueeze(1), 0.0)
    torch.testing.assert_close(of_some, kept.view(5, 3, 40).sum(1) + before * add)


@pytest.mark.quick(1)
@pytest.mark.parametrize("few_slots", [alignment_triton.FEW_SLOTS, 32])
def test_experts_of_other_ranks_are_left_out(
    monkeypatch: pytest.MonkeyPatch, few_slots: int
) -> None:
    """What ranks with half of the experts each compute adds up to what all of them compute."""
    monkeypatch.setattr(alignment_triton, "FEW_SLOTS", few_slots)
    tokens = 20
    experts, k = 6, 3
    case = Case.make(tokens, k, experts, 16, 16, torch.float32)
    whole = grouped_mlp_reference(case.x, case.gate_up, case.down, case.ids, case.weights)
    residual = torch.zeros_like(whole)
    for first in (0, 3):
        places = case.ids - first
        places = places.masked_fill((places < 0) | (places >= 3), 3)
        gate_up, down = (w[first : first + 3].contiguous() for w in (case.gate_up, case.down))
        weights, own = (places, case.weights), PlainExperts(gate_up, down)
        run = functools.partial(grouped_mlp, case.x, own, *weights, num_routed=experts)
        alone = grouped_mlp_reference(case.x, gate_up, down, *weights)
        torch.testing.assert_close(run(), alone, rtol=1e-4, atol=1e-4)
        triton = grouped_mlp_triton(case.x, own, *weights, residual.clone(), num_routed=experts)
        torch.testing.assert_close(triton, residual + alone, rtol=1e-4, atol=1e-4)
        residual = triton
    torch.testing.assert_close(residual, whole, rtol=1e-4, atol=1e-4)
