"""`add_post_norm`: normed results of a layer's part are added to the residual stream, and norms of
the stream are computed in the same launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from batchgen.kernels.layers.post_norm import (
    Term,
    add_post_norm,
    post_norm_reference,
    post_norm_triton,
)
from batchgen.kernels.layers.rms_norm import rms_norm, rms_norm_of_sum, rms_norm_reference
from batchgen.kernels.layers.shared_part import SharedPart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


class Case(NamedTuple):
    residual: Tensor
    terms: Sequence[Term]
    eps: float
    weight: Tensor | None
    scalar: Tensor | None
    readers: Sequence[Tensor]

    def rows(self, chosen: slice) -> Case:
        """A copy of the case for these rows alone."""
        terms = [
            Term(
                None if term.x is None else term.x[chosen].clone(),
                term.weight,
                None if term.parts is None else term.parts[:, chosen],
                None if term.shared is None else _rows_of(term.shared, chosen),
            )
            for term in self.terms
        ]
        return self._replace(residual=self.residual[chosen].clone(), terms=terms)


def _rows_of(shared: SharedPart, chosen: slice) -> SharedPart:
    gate = None if shared.gate is None else shared.gate[chosen].clone()
    return SharedPart(shared.values[chosen].clone(), gate)


FORMS: dict[str, tuple[Sequence[str], bool, bool, int]] = {
    "after attention, before experts": (["plain"], False, False, 3),
    "after an MLP": (["plain"], False, True, 1),
    "after an MLP and experts": (["plain", "parts"], True, True, 1),
    "after several ranks": (["sum", "sum"], True, True, 1),
    "after products that are cut": (["wide parts", "shared"], True, False, 2),
    "a residual with parts": (["both"], False, False, 0),
}
"""What the terms are, whether their sum is normed and multiplied, and how many norms follow."""


def make_case(form: str, tokens: int, size: int, dtype: torch.dtype) -> Case:
    kinds, normed, scaled, readers = FORMS[form]
    generator = torch.Generator().manual_seed(tokens + size)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * 2).to(DEVICE, dtype)

    def weight() -> Tensor:
        return random(size, dtype=torch.float32).abs() + 0.25

    def term(kind: str) -> Term:
        # The rows of x are apart, and the parts of a token are next to one another.
        x = random(tokens, size + 8)[:, :size]
        parts = random(tokens, 3, size).transpose(0, 1)
        if kind == "plain":
            return Term(x, weight())
        if kind == "sum":
            return Term(x, None)
        if kind == "parts":
            return Term(None, weight(), parts)
        if kind == "wide parts":
            return Term(None, weight(), random(2, tokens, size, dtype=torch.float32))
        if kind == "shared":
            return Term(None, weight(), parts, SharedPart(random(tokens, size), random(tokens, 1)))
        return Term(x, weight(), parts)

    return Case(
        random(tokens, size),
        [term(kind) for kind in kinds],
        EPS,
        weight() if normed else None,
        random(1) if scaled else None,
        [weight() for _ in range(readers)],
    )


def check(case: Case, *, ulps: int) -> None:
    theirs = case.rows(slice(None))
    stream, normed = post_norm_triton(*case)
    expected, norms = post_norm_reference(*theirs)
    assert stream is case.residual and len(normed) == len(case.readers)
    for ours, reference in zip([stream, *normed], [expected, *norms], strict=True):
        assert ours.dtype == reference.dtype and ours.is_contiguous()
        bound = ulps * torch.finfo(ours.dtype).eps * float(reference.abs().max())
        torch.testing.assert_close(ours, reference, rtol=0, atol=bound)


@pytest.mark.quick(6, thorough=12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 2816), (7, 200), (3, 1500)])
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_equals_the_reference(
    form: str, tokens: int, size: int, dtype: torch.dtype
) -> None:
    check(make_case(form, tokens, size, dtype), ulps=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_is_rounded_where_separate_operations_round(dtype: torch.dtype) -> None:
    case = make_case("after an MLP and experts", 7, 200, dtype)
    (mlp, experts), same = case.terms, case.residual.clone()
    assert mlp.x is not None and mlp.weight is not None and case.weight is not None
    assert experts.parts is not None and experts.weight is not None and case.scalar is not None
    zeros = torch.zeros_like(same)
    both = rms_norm(mlp.x, mlp.weight, EPS)
    both = both + rms_norm_of_sum(zeros, experts.parts, None, experts.weight, EPS)
    expected = (same + rms_norm(both, case.weight, EPS)) * case.scalar
    stream, (normed,) = add_post_norm(*case)
    if DEVICE == "cpu" or dtype != torch.float32:  # which compiled kernels may round once less
        assert torch.equal(stream, expected)
    torch.testing.assert_close(normed, rms_norm_reference(stream, case.readers[0], EPS))


@pytest.mark.parametrize("run", [add_post_norm, post_norm_triton])
def test_a_row_that_is_not_finite_stays_alone(
    run: Callable[..., tuple[Tensor, list[Tensor]]],
) -> None:
    case = make_case("after an MLP and experts", 7, 200, torch.float32)
    expected, (normed,) = run(*case.rows(slice(None)))
    parts = case.terms[1].parts
    assert parts is not None
    parts[1, 3, 5] = float("nan")
    stream, (found,) = run(*case)
    others = [0, 1, 2, 4, 5, 6]
    assert stream[3].isnan().all() and found[3].isnan().all()
    assert torch.equal(stream[others], expected[others])
    assert torch.equal(found[others], normed[others])


@pytest.mark.parametrize("run", [add_post_norm, post_norm_triton])
def test_no_rows(run: Callable[..., tuple[Tensor, list[Tensor]]]) -> None:
    stream, normed = run(*make_case("after an MLP and experts", 0, 64, torch.float32))
    assert stream.shape == normed[0].shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2816, 5376, 1152, 576])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch(form: str, size: int) -> None:
    """And the norms of the stream have those of a launch of their own."""
    case = make_case(form, 300, size, torch.bfloat16)
    apart = [case.rows(chosen) for chosen in (slice(0, 1), slice(1, 18), slice(18, 300))]
    check(case.rows(slice(None)), ulps=4)
    stream, normed = add_post_norm(*case)
    results = [add_post_norm(*part) for part in apart]
    assert torch.equal(stream, torch.cat([part for part, _ in results]))
    for i, (norm, reader) in enumerate(zip(normed, case.readers, strict=True)):
        assert torch.equal(norm, torch.cat([norms[i] for _, norms in results]))
        assert torch.equal(norm, rms_norm(stream, reader, EPS))
