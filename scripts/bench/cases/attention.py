"""Cases of bench_kernels.py: attention over pages of keys and values."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measuring import DEVICE, DTYPE, Case, random_normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchgen.kernels.attention.decode import MAX_QUERIES, paged_attention_decode
from batchgen.kernels.attention.decode_plan import plan_decode
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import plan_prefill
from batchgen.kernels.rules import BY_BATCH, Splits

BLOCK_SIZE = 16
_CACHE_BYTES = 512 * 2**20
"""Bytes of keys and values that are read before any is read again: many times a GPU's L2 cache."""
_ROWS = (1000, 1875, 1250, 1625, 1400, 1042)


class Heads(NamedTuple):
    """The heads of attention: of queries, and of keys and values."""

    queries: int
    kv: int
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.queries}/{self.kv} heads"


HEADS, TINY_HEADS = [Heads(32, 8), Heads(16, 8)], [Heads(4, 2, 16)]


class DecodeShape(NamedTuple):
    """The contexts of `batch` rows, in tokens: `context` each, or spread over 100 to 2048 with this
    mean."""

    batch: int
    context: int
    mixed: bool = False

    def contexts(self) -> list[int]:
        if not self.mixed:
            return [self.context] * self.batch
        # 100 + 1948·u^p, whose mean is 100 + 1948 / (p + 1).
        power = (2048 - 100) / (self.context - 100) - 1
        spread = [100 + 1948 * ((i + 0.5) / self.batch) ** power for i in range(self.batch)]
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        return [int(spread[i]) for i in order]

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}{' mixed' if self.mixed else ''}"


DECODE_SHAPES = [
    *(DecodeShape(1, 2048), DecodeShape(1, 32768), DecodeShape(8, 2048), DecodeShape(32, 1024)),
    *(DecodeShape(64, 2048), DecodeShape(128, 850, True), DecodeShape(256, 850, True)),
    *(DecodeShape(256, 4096), DecodeShape(512, 600)),
]
PREFILL_SHAPES: list[tuple[str, tuple[int, ...], int]] = [
    ("8192 tokens in rows of 1000-2000", _ROWS, 0),
    ("1 row of 8k", (8192,), 0),
    ("1 row of 32k", (32768,), 0),
    ("80 rows of 100", (100,) * 80, 0),
    ("8k after 24k", (8192,), 24576),
]
"""Names, the new tokens of each row, and the tokens before them, which are in the cache."""


def _paged(heads: Heads, used: list[int], copies: int) -> tuple[Tensor, list[KVCache]]:
    """Make the block tables of rows with these numbers of blocks, in random order, and caches."""
    tables = torch.zeros(len(used), max(used), dtype=torch.int64)
    for row, blocks in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        tables[row, : len(blocks)] = blocks
    shape = (heads.kv, 1 + sum(used), BLOCK_SIZE, heads.dim)
    caches = [KVCache(random_normal(*shape), random_normal(*shape)) for _ in range(copies)]
    return tables.to(DEVICE), caches


def _decode(heads: Heads, shape: DecodeShape, options: argparse.Namespace) -> Case:
    """A decode step of one layer with the combination of splits, without the plan.

    Queries are a row's last tokens; tokens in the same block of `block_length` positions see each
    other. The plan is made once per forward.
    """
    torch.manual_seed(0)
    length = options.block_length
    width = options.width[0] if options.width else length
    most = MAX_QUERIES // (heads.queries // heads.kv)
    if not 1 <= width <= most:
        raise SystemExit(f"the decode kernel takes 1 to {most} queries of a row")
    contexts = [-(-context // length) * length for context in shape.contexts()]
    kv_bytes = 2 * sum(contexts) * heads.kv * heads.dim * DTYPE.itemsize
    copies = 1 if options.tiny else -(-_CACHE_BYTES // kv_bytes)
    tables, caches = _paged(heads, [-(-context // BLOCK_SIZE) for context in contexts], copies)
    q = random_normal(shape.batch * width, heads.queries, heads.dim)
    ends = torch.tensor(contexts).unsqueeze(1)
    positions = (ends - width + torch.arange(width)).flatten().to(DEVICE)
    cut = BY_BATCH.splits(shape.batch, heads.kv, width)
    plan = plan_decode(positions, tables, width, BLOCK_SIZE, cut)

    def launch(_: None, i: int) -> Tensor:
        return paged_attention_decode(
            q, caches[i], positions, tables, heads.dim**-0.5, plan, block_length=length
        )

    blocks = f" in blocks of {length}" if length > 1 else ""
    name = f"decode {heads}, {width} queries a row{blocks}, {shape}"
    return Case(name, launch, copies, kv_bytes)


def decode_cases(options: argparse.Namespace) -> Iterator[Case]:
    shapes = [DecodeShape(2, 40)] if options.tiny else DECODE_SHAPES
    for heads, shape in itertools.product(TINY_HEADS if options.tiny else HEADS, shapes):
        yield _decode(heads, shape, options)
    width = options.width[0] if options.width else options.block_length
    for batch in (2,) if options.tiny else (1, 256, 512):
        positions = torch.full((batch * width,), 850, device=DEVICE)
        tables = torch.zeros(batch, 2048, dtype=torch.int64, device=DEVICE)

        cut = BY_BATCH.splits(batch, 8, width)

        def plan(
            _: None,
            i: int,
            positions: Tensor = positions,
            tables: Tensor = tables,
            cut: Splits = cut,
        ) -> object:
            return plan_decode(positions, tables, width, BLOCK_SIZE, cut)

        yield Case(f"decode plan of {batch} rows", plan)


def _prefill(heads: Heads, name: str, lens: tuple[int, ...], prefix: int) -> Iterator[Case]:
    """A prefill's attention, of which operations above the diagonal do not count, and torch's flash
    attention without a cache on rows of the mean length."""
    torch.manual_seed(0)
    ends, rows = [prefix + n for n in lens], len(lens)
    tables, (kv,) = _paged(heads, [-(-n // BLOCK_SIZE) for n in ends], 1)
    q = random_normal(sum(lens), heads.queries, heads.dim)
    positions = torch.cat([torch.arange(prefix, end) for end in ends]).to(DEVICE)
    per_pair = 4 * heads.queries * heads.dim

    plan = plan_prefill(
        lens, DEVICE.type, num_heads=heads.queries, num_kv_heads=heads.kv,
        head_dim=heads.dim, dtype=DTYPE, context_lens=ends,
    )  # fmt: skip

    def launch(_: None, i: int) -> Tensor:
        return paged_attention_prefill(q, kv, positions, tables, heads.dim**-0.5, plan)

    flops = per_pair * sum(n * prefix + n * (n + 1) // 2 for n in lens)
    yield Case(f"prefill {heads}, {name}", launch, flops=flops)
    if prefix:
        return
    length = sum(lens) // rows
    queries = random_normal(rows, heads.queries, length, heads.dim)
    keys, values = random_normal(2, rows, heads.kv, length, heads.dim)
    kinds = [SDPBackend.MATH] if DEVICE.type == "cpu" else [SDPBackend.FLASH_ATTENTION]

    def flash(_: None, i: int) -> Tensor:
        with sdpa_kernel(kinds):
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )

    flops = per_pair * rows * length * (length + 1) // 2
    yield Case(f"  flash of torch, {rows} rows of {length}", flash, flops=flops)


def prefill_cases(options: argparse.Namespace) -> Iterator[Case]:
    for number, heads in enumerate(TINY_HEADS if options.tiny else HEADS):
        shapes = [("2 rows", (20, 9), 0)] if options.tiny else PREFILL_SHAPES
        for shape in shapes if not number else shapes[:1]:
            yield from _prefill(heads, *shape)
