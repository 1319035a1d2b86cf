"""The products of latent attention with the map from latents to keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchgen.engine.layers.cpu_products import CPUProducts
from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.parallel.placement import Placement

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, LATENT, KEY, VALUE = 4, 64, 24, 32


def expansion(device: torch.device, dtype: torch.dtype) -> KVExpansion:
    made = KVExpansion(HEADS, LATENT, KEY, VALUE, where=Placement(device, dtype))
    weight = torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(0))
    made.weight.copy_(weight * LATENT**-0.5)
    return made


def products(made: KVExpansion, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """For both products what is found, and in float64 what is expected."""
    keys, values = made.weight.double().split([KEY, VALUE], 1)
    # Queries come as a part of wider ones.
    q = torch.randn((tokens, HEADS, KEY + 8)).to(made.weight)[:, :, :KEY]
    mixed = torch.randn((tokens, HEADS, LATENT)).to(made.weight)
    return [
        (made.absorb(q), torch.einsum("thn,hnl->thl", q.double(), keys)),
        (made.values(mixed), torch.einsum("thl,hvl->thv", mixed.double(), values)),
    ]


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_is_multiplied_by_its_own_weight(tokens: int, dtype: torch.dtype) -> None:
    for found, expected in products(expansion(DEVICE, dtype), tokens):
        assert found.dtype == dtype and found.shape == expected.shape
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=100 * 2**-23)


@pytest.mark.parametrize("packed", [False, True])
def test_values_come_into_a_part_of_a_larger_result(packed: bool) -> None:
    made = expansion(torch.device("cpu") if packed else DEVICE, torch.float32)
    mixed = torch.randn((5, HEADS, LATENT)).to(made.weight)
    expected = made.values(mixed)
    if packed:
        made.pack(CPUProducts())
    whole = torch.full((9, HEADS, VALUE), -1.0, device=mixed.device)
    found = made.values(mixed, whole[2:7])
    assert found.data_ptr() == whole[2].data_ptr()
    torch.testing.assert_close(whole[2:7], expected, rtol=1e-5, atol=1e-5)
    assert (whole[:2] == -1).all() and (whole[7:] == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 512])
def test_products_write_where_the_next_ones_read(tokens: int) -> None:
    """Nothing copies what they wrote: no other memory is taken than that of the result."""
    device = torch.device("cuda")
    made = expansion(device, torch.bfloat16)
    products(made, tokens)  # cuBLAS takes its own memory now
    mixed = torch.randn((tokens, HEADS, LATENT), device=device, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = made.values(mixed)
    assert found.is_contiguous()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() > before
