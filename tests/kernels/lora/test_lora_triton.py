"""The kernels of adapters against the reference, under the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.lora.lora import (
    LoRAPart,
    StackedFactors,
    add_lora_reference_,
    output_blocks,
)
from batchgen.kernels.lora.lora_tokens import sorted_tokens
from batchgen.kernels.lora.lora_triton import add_lora_triton_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def factors(
    parts: list[int], depth: int, rank: int, adapters: int, dtype: torch.dtype
) -> StackedFactors:
    starts = [sum(parts[:i]) for i in range(len(parts))]
    of_parts = [LoRAPart(start, size) for start, size in zip(starts, parts, strict=True)]
    down = torch.randn(adapters, len(parts) * rank, depth) * depth**-0.5
    up = torch.randn(adapters, sum(parts), rank)
    return StackedFactors(
        down.to(dtype).to(DEVICE),
        up.to(dtype).to(DEVICE),
        *output_blocks(of_parts, rank, DEVICE),
    )


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("parts", "depth", "rank", "adapters", "tokens"),
    [
        ([200], 160, 16, 3, 21),
        ([96, 40, 40], 300, 16, 2, 40),
        ([64], 1100, 128, 5, 9),
        ([32, 32], 64, 32, 1, 1),
        ([37, 20], 64, 16, 2, 20),  # bounds of blocks at no multiple of 8
    ],
)
def test_the_kernels_equal_the_reference(
    parts: list[int], depth: int, rank: int, adapters: int, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    stacked = factors(parts, depth, rank, adapters, dtype)
    x = torch.randn(tokens, depth + 8).to(dtype).to(DEVICE)[:, :depth]  # rows of a wider tensor
    out = torch.randn(tokens, sum(parts)).to(dtype).to(DEVICE)
    slots = torch.randint(0, adapters + 1, (tokens,), device=DEVICE)
    slots[0] = adapters
    expected = add_lora_reference_(out.clone(), x, slots, stacked)
    found = add_lora_triton_(out.clone(), x, sorted_tokens(slots, adapters), *stacked)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(found.float(), expected.float(), atol=0.15, rtol=2e-2)
    assert torch.equal(found[slots == 0], out[slots == 0])


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    stacked = factors([64, 32], 256, 16, 3, torch.float32)
    x, out = torch.randn(30, 256, device=DEVICE), torch.zeros(30, 96, device=DEVICE)
    if DEVICE.type == "cpu":  # the bits of numpy's products depend on a row's place on some CPUs
        x = x.round()
        stacked = stacked._replace(down=(8 * stacked.down).round(), up=stacked.up.round())
    slots = torch.randint(0, 4, (30,), device=DEVICE)
    whole = add_lora_triton_(out.clone(), x, sorted_tokens(slots, 3), *stacked)
    for i in range(0, 30, 7):
        one = slice(i, i + 1)
        alone = add_lora_triton_(out[one].clone(), x[one], sorted_tokens(slots[one], 3), *stacked)
        assert torch.equal(alone, whole[one])


@pytest.mark.thorough
@pytest.mark.parametrize(("many", "whole"), [(1000, 50), (50, 1000), (50, 50)])
def test_many_tokens_have_the_bits_of_few(
    many: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There one program adds up all parts of a sum, or tiles are larger. Each part is exact, in the
    interpreter's products too, so only the order of the parts decides how their sum is rounded."""
    torch.manual_seed(0)
    depth, count, share = 1100, 70, 256
    down, up, blocks, multiple = factors([40, 24], depth, 16, 2, torch.float32)
    down = torch.randint(-3, 4, down.shape, device=DEVICE).float()
    up.zero_()[:, :, 5] = 1
    scales = torch.tensor([1.0, 2.0**-9, 2.0**-20, 2.0**-3, 2.0**-14], device=DEVICE)
    x = torch.randint(-9, 10, (count, depth), device=DEVICE).float()
    x *= scales.repeat_interleave(share)[:depth]
    slots = torch.randint(0, 3, (count,), device=DEVICE)

    def added(own: slice) -> torch.Tensor:
        out, aligned = torch.zeros(len(x[own]), 64, device=DEVICE), sorted_tokens(slots[own], 2)
        return add_lora_triton_(out, x[own], aligned, down, up, blocks, multiple)

    few = [added(slice(0, 30)), added(slice(30, count))]
    monkeypatch.setattr("batchgen.kernels.lora.lora_tokens._MANY_TOKENS", many)
    monkeypatch.setattr("batchgen.kernels.lora.lora_triton._ONE_PROGRAM", whole)
    found = added(slice(None))
    assert found.any() and torch.equal(found, torch.cat(few))
