"""Attention in which the tokens of an image see each other, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchgen.kernels.attention.attention import attend_part_triton, paged_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import AttentionMetadata, SoftmaxOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, HEADS, KV_HEADS, DIM = 16, 4, 2, 16
RUNS = [[(3, 40), (40, 41), (60, 75)], [], [(0, 70)]]
"""Where images begin and end in the rows: some longer than a tile of keys and than a window."""
LENGTHS = (80, 33, 70)


def last_seen(row: int) -> Tensor:
    seen = torch.arange(LENGTHS[row])
    for start, end in RUNS[row]:
        seen[start:end] = end - 1
    return seen


def batch(starts: tuple[int, ...] = (0, 0, 0)) -> tuple[Tensor, KVCache, AttentionMetadata]:
    """The rows from these tokens on; what is before them is cached."""
    generator = torch.Generator().manual_seed(3)
    tables = (torch.randperm(15, generator=generator) + 1).view(3, 5)
    pages = torch.randn((2, KV_HEADS, 16, SIZE, DIM), generator=generator)
    q = torch.randn((sum(LENGTHS), HEADS, DIM), generator=generator)
    parts = zip(q.split(LENGTHS), starts, strict=True)
    kept = torch.cat([part[start:] for part, start in parts])
    rows = list(zip(range(3), starts, LENGTHS, strict=True))
    meta = AttentionMetadata(
        torch.cat([torch.arange(start, end) for _, start, end in rows]).to(DEVICE),
        tuple(end - start for _, start, end in rows),
        LENGTHS,
        tables.to(DEVICE),
        last_seen=torch.cat([last_seen(row)[start:] for row, start, _ in rows]).to(DEVICE),
    )
    return kept.to(DEVICE), KVCache(*pages.to(DEVICE)), meta


def expected(window: int | None) -> Tensor:
    """By a mask [T, T] for each row, in float64."""
    q, cache, meta = batch()
    rows = []
    for row, queries in enumerate(q.split(LENGTHS)):
        keys, values = (
            each[:, meta.block_tables[row]].flatten(1, 2)[:, : len(queries)].double()
            for each in (cache.key, cache.value)
        )
        at = torch.arange(len(queries), device=DEVICE)
        mask = at[None, :] <= last_seen(row).to(DEVICE)[:, None]
        if window is not None:
            mask &= at[None, :] > at[:, None] - window
        grouped = queries.double().unflatten(1, (KV_HEADS, -1)).permute(1, 2, 0, 3)
        score = grouped @ keys.unsqueeze(1).transpose(2, 3) / DIM**0.5
        weights = score.masked_fill(~mask, -torch.inf).softmax(-1)
        rows.append((weights @ values.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(rows)


def run(form: str, window: int | None, starts: tuple[int, ...] = (0, 0, 0)) -> Tensor:
    q, cache, meta = batch(starts)
    if form == "reference":
        return paged_attention(q, cache, [meta], DIM**-0.5, window=window, looks_ahead=True)
    out = torch.empty_like(q)
    attend_part_triton(q, cache, meta, SoftmaxOptions(DIM**-0.5, window), out)
    return out


FORMS = ["triton", "reference"] if DEVICE == "cpu" else ["triton"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 9, 50])
def test_tokens_of_an_image_see_each_other(
    form: str, window: int | None, same_bits: Callable[[Tensor, Tensor], None]
) -> None:
    found = run(form, window)
    torch.testing.assert_close(found.double(), expected(window), atol=2e-6, rtol=1e-5)
    # Cut between images, and inside one of which the first part is cached.
    starts = (40, 32, 16)
    cut = [part[start:] for part, start in zip(found.split(LENGTHS), starts, strict=True)]
    same_bits(run(form, window, starts), torch.cat(cut))


@pytest.mark.parametrize("window", [None, 9])
def test_layers_that_do_not_look_ahead_are_causal(window: int | None) -> None:
    q, cache, meta = batch()
    found = paged_attention(q, cache, [meta], DIM**-0.5, window=window)
    causal = replace(meta, last_seen=None)
    assert torch.equal(found, paged_attention(q, cache, [causal], DIM**-0.5, window=window))
