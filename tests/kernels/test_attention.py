"""Parts of a batch: what runs on a GPU against the reference, through the same entry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from batchgen.kernels import attention
from batchgen.kernels.attention import AttentionMetadata, paged_attention
from batchgen.kernels.attention_prefill import cut_tiles, tile_tokens
from batchgen.kernels.kv_cache import KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 2, 3, 16, 4
CONTEXTS = (1, 9, 30)  # of rows of one query
CHUNKS = ((0, 13), (6, 7), (21, 1))  # of rows that are prefilled: computed before, new


def make_part(first_block: int, rows: Sequence[tuple[int, int]]) -> tuple[AttentionMetadata, int]:
    """Rows of (tokens computed before, new tokens), and the block after their last."""
    width = max(-(-sum(row) // BLOCK_SIZE) for row in rows)
    tables = torch.zeros(len(rows), width, dtype=torch.int64)
    for table, (before, new) in zip(tables, rows, strict=True):
        used = -(-(before + new) // BLOCK_SIZE)
        table[:used] = torch.arange(first_block, first_block + used).flip(0)
        first_block += used
    positions = torch.cat([torch.arange(before, before + new) for before, new in rows])
    part = AttentionMetadata(
        positions.to(DEVICE),
        tuple(new for _, new in rows),
        tuple(before + new for before, new in rows),
        tables.to(DEVICE),
    )
    return part, first_block


def static_tiles(part: AttentionMetadata) -> Tensor:
    """As a captured graph has them: more than there are, the rest of no tokens."""
    size = tile_tokens(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, torch.float32)
    cut = cut_tiles(part.query_lens, size, part.context_lens)
    return torch.cat((cut, torch.zeros(3, 3, dtype=torch.int32))).to(DEVICE)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kinds", ["decode", "prefill", "both"])
def test_the_kernels_attend_as_the_reference_does(
    kinds: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, block = make_part(1, [(context - 1, 1) for context in CONTEXTS])
    prefill, num_blocks = make_part(block, CHUNKS)
    if captured:
        prefill = AttentionMetadata(
            prefill.positions,
            prefill.query_lens,
            prefill.context_lens,
            prefill.block_tables,
            static_tiles(prefill),
        )
    parts = {"decode": [decode], "prefill": [prefill], "both": [decode, prefill]}[kinds]
    generator = torch.Generator().manual_seed(0)
    shape = (KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_DIM)
    cache = KVCache(*(torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2)))
    tokens = sum(len(part.positions) for part in parts)
    q = torch.randn(tokens, KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(DEVICE)

    expected = paged_attention(q.cpu(), *_on_cpu(cache, parts), HEAD_DIM**-0.5)
    launched = []
    for name in ("paged_attention_decode", "paged_attention_prefill"):
        kernel = getattr(attention, name)

        def record(
            *args: object, kernel: object = kernel, name: str = name, **kw: object
        ) -> object:
            launched.append(name)
            return kernel(*args, **kw)  # type: ignore[operator]

        monkeypatch.setattr(attention, name, record)
    monkeypatch.setattr(attention, "_attend_part_reference", attention._attend_part_triton)
    ours = paged_attention(q, cache, parts, HEAD_DIM**-0.5)
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5, atol=1e-5)
    wanted = {"decode": ["decode"], "prefill": ["prefill"], "both": ["decode", "prefill"]}
    assert launched == [f"paged_attention_{kind}" for kind in wanted[kinds]]


def _on_cpu(
    cache: KVCache, parts: Sequence[AttentionMetadata]
) -> tuple[KVCache, list[AttentionMetadata]]:
    moved = [
        AttentionMetadata(p.positions.cpu(), p.query_lens, p.context_lens, p.block_tables.cpu())
        for p in parts
    ]
    return KVCache(cache.key.cpu(), cache.value.cpu()), moved
