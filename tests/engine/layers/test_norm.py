"""The norm of a residual stream to which parts of a sum are still to be added."""

from __future__ import annotations

import weakref

import pytest
import torch

from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.norm import RMSNorm, norms_of_stream
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import PendingNorm, PendingParts, summed
from batchgen.kernels.fp8.quantise import FP8Rows, RoundedRows
from batchgen.kernels.layers.shared_part import SharedPart


def _norm(generator: torch.Generator) -> RMSNorm:
    norm = RMSNorm(144, 1e-6, where=Placement(torch.device("cpu"), torch.float32))
    norm.weight.copy_(torch.rand(144, generator=generator))
    return norm


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("gated", [None, False, True])
@pytest.mark.parametrize(("quantised", "keep"), [(False, False), (True, False), (True, True)])
def test_parts_are_added_before_the_norm(
    quantised: bool, keep: bool, gated: bool | None, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    residual, values = torch.randn((2, tokens, 144), generator=generator)
    parts = torch.randn((3, tokens, 144), generator=generator)
    gate = torch.randn((tokens, 1), generator=generator) if gated else None
    shared = None if gated is None else SharedPart(values, gate)
    norm = _norm(generator)
    if quantised:
        norm.quantise_result(FP8Format(), keep=keep)
    added = 0 if shared is None else values * (1 if gate is None else torch.sigmoid(gate))
    expected, total = norm.of_stream(residual + parts.sum(0) + added)
    found, stream = norm.of_stream(PendingParts(residual, parts, shared))
    assert stream is residual
    torch.testing.assert_close(stream, total)
    if keep:
        assert isinstance(found, RoundedRows) and isinstance(expected, RoundedRows)
        torch.testing.assert_close(found.plain, expected.plain)
        found, expected = found.in_fp8, expected.in_fp8
    if quantised:
        assert isinstance(found, FP8Rows) and isinstance(expected, FP8Rows)
        found, expected = found.dequantise(), expected.dequantise()
    # A value may be rounded to the other neighbour.
    torch.testing.assert_close(found, expected, rtol=2**-3 if quantised else 1e-6, atol=1e-3)


def test_parts_are_held_until_they_are_added_and_no_longer() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn((3, 5, 144), generator=generator)
    held, stream = weakref.ref(parts), PendingParts(torch.zeros(5, 144), parts)
    del parts
    assert held() is not None
    norm = _norm(generator)
    norm.of_stream(stream)
    assert held() is None
    with pytest.raises(AssertionError, match="added already"):
        norm.of_stream(stream)


def test_several_norms_of_a_stream_to_which_a_norm_is_added() -> None:
    """One of them in FP8, and one with another epsilon, which have launches of their own."""
    generator = torch.Generator().manual_seed(0)
    residual, result = torch.randn((2, 5, 144), generator=generator)
    parts, scalar = torch.randn((3, 5, 144), generator=generator), torch.tensor([0.5])
    after, *readers = (_norm(generator) for _ in range(5))
    readers[1].quantise_result(FP8Format(), keep=True)
    readers[2].eps = 0.5
    total = result + parts.sum(0)
    expected = (residual + after(total)) * 0.5
    stream = after.add_to(residual, PendingParts(result, parts), scalar)
    found, whole = norms_of_stream(readers, stream)
    assert whole is residual
    torch.testing.assert_close(whole, expected)
    assert isinstance(found[1], RoundedRows)
    found[1] = found[1].plain
    for norm, normed in zip(readers, found, strict=True):
        norm.quantise_result(None)
        torch.testing.assert_close(normed, norm(whole))


def test_a_norm_of_two_terms_is_added_and_releases_them() -> None:
    generator = torch.Generator().manual_seed(0)
    residual, one, other = torch.randn((3, 5, 144), generator=generator)
    first, second, after = (_norm(generator) for _ in range(3))
    expected = residual + after(first(one) + second(other))
    parts = other.unsqueeze(0)
    held = weakref.ref(parts)
    terms = first.term(one), second.term(PendingParts(torch.float32, parts))
    del parts
    stream = after.add_to(residual, PendingNorm(None, terms, 1e-6))
    del terms
    assert held() is not None
    torch.testing.assert_close(summed(stream), expected)
    assert held() is None
    with pytest.raises(AssertionError, match="added already"):
        summed(stream)
