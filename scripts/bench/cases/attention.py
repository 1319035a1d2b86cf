"""Cases of bench_kernels.py: attention over pages, of keys and values and of latents."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import DEVICE, DTYPE, Case, Choice, Group, queued, random_normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchgen.kernels.attention.decode import MAX_QUERIES, DecodeConfig, paged_attention_decode
from batchgen.kernels.attention.decode_plan import most_splits, plan_decode, split_length
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import (
    PrefillConfig,
    plan_prefill,
)

BLOCK_SIZE = 16
_SPLITS = (512, 2048)
"""Tokens of a split that are tried."""
_CACHE_BYTES = 512 * 2**20
"""Bytes of keys and values that are read before any of them is read again: many times the size of
a GPU's L2 cache."""
_ROWS = (1000, 1875, 1250, 1625, 1400, 1042)


class Heads(NamedTuple):
    """The heads of attention: of queries, and of keys and values."""

    queries: int
    kv: int
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.queries}/{self.kv} heads"


HEADS = [Heads(32, 8), Heads(16, 8)]
TINY_HEADS = [Heads(4, 2, 16)]


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
PREFILL_SWEEP = [
    PrefillConfig(*sizes)
    for sizes in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
        (128, 32, 8, 3), (128, 32, 8, 4), (128, 32, 4, 4), (128, 64, 4, 2), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4),
    )
]  # fmt: skip


def _paged(heads: Heads, used: list[int], copies: int) -> tuple[Tensor, list[KVCache]]:
    """Make the block tables of rows with these numbers of blocks, in random order, and caches."""
    tables = torch.zeros(len(used), max(used), dtype=torch.int64)
    for row, blocks in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        tables[row, : len(blocks)] = blocks
    shape = (heads.kv, 1 + sum(used), BLOCK_SIZE, heads.dim)
    caches = [KVCache(random_normal(*shape), random_normal(*shape)) for _ in range(copies)]
    return tables.to(DEVICE), caches


class Decode:
    """A decode step's attention: queries of a row's last tokens, and caches that are read in turn.

    Tokens in the same block of `block_length` positions see each other. The time is that of one
    layer with the combination of splits, without the plan, which is made once per forward.
    """

    def __init__(self, heads: Heads, shape: DecodeShape, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.length = options.block_length
        self.width = options.width[0] if options.width else self.length
        most = MAX_QUERIES // (heads.queries // heads.kv)
        if not 1 <= self.width <= most:
            raise SystemExit(f"the decode kernel takes 1 to {most} queries of a row")
        contexts = [-(-context // self.length) * self.length for context in shape.contexts()]
        self.kv_bytes = 2 * sum(contexts) * heads.kv * heads.dim * DTYPE.itemsize
        copies = 1 if options.tiny else -(-_CACHE_BYTES // self.kv_bytes)
        used = [-(-context // BLOCK_SIZE) for context in contexts]
        self.tables, self.caches = _paged(heads, used, copies)
        self.q = random_normal(shape.batch * self.width, heads.queries, heads.dim)
        positions = torch.tensor(contexts).unsqueeze(1) - self.width + torch.arange(self.width)
        self.positions = positions.flatten().to(DEVICE)
        self.most_splits = most_splits(shape.batch, heads.kv, self.width)
        self.split = split_length(shape.batch, heads.kv)
        self.scale = heads.dim**-0.5
        self._plans = {split: self._plan(split) for split in {self.split, *_SPLITS}}
        blocks = f" in blocks of {self.length}" if self.length > 1 else ""
        self.name = f"decode {heads}, {self.width} queries a row{blocks}, {shape}"

    def _plan(self, split: int) -> Any:
        return plan_decode(
            self.positions, self.tables, self.width, BLOCK_SIZE,
            split_tokens=split, max_splits=self.most_splits,
        )  # fmt: skip

    def launch(self, cache: KVCache, config: DecodeConfig | None, split: int) -> Tensor:
        return paged_attention_decode(
            self.q, cache, self.positions, self.tables, self.scale, self._plans[split], config,
            block_length=self.length,
        )  # fmt: skip


def _decodes(options: argparse.Namespace) -> Iterator[Decode]:
    shapes = [DecodeShape(2, 40)] if options.tiny else DECODE_SHAPES
    for heads, shape in itertools.product(TINY_HEADS if options.tiny else HEADS, shapes):
        yield Decode(heads, shape, options)


def decode_cases(options: argparse.Namespace) -> Iterator[Case]:
    for own in _decodes(options):
        runs = [partial(own.launch, cache, None, own.split) for cache in own.caches]
        yield Case(own.name, runs, own.kv_bytes, time=queued)
    for batch in (2,) if options.tiny else (1, 256, 512):
        positions = torch.full((batch * own.width,), 850, device=DEVICE)
        tables = torch.zeros(batch, 2048, dtype=torch.int64, device=DEVICE)
        plan = partial(plan_decode, positions, tables, own.width, BLOCK_SIZE)
        yield Case(f"decode plan of {batch} rows", [plan], time=queued)


def tune_decode(options: argparse.Namespace) -> Iterator[Group]:
    """Try configurations whose programs' pipelines fit into 227 KiB of shared memory."""
    for own in _decodes(options):
        dim = own.q.shape[-1]
        candidates = [
            (DecodeConfig(block_n, warps, stages, programs), split)
            for block_n, warps, stages, programs, split in itertools.product(
                (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4), _SPLITS
            )
            if programs * ((stages - 1) * 2 * block_n * dim * DTYPE.itemsize + 8192) <= 227 * 1024
        ]

        def launch(config: Any, i: int, own: Decode = own) -> Tensor:
            return own.launch(own.caches[i], *config)

        choice = Choice("attention", candidates, launch, len(own.caches), queued)
        yield Group(own.name, {"": [choice]})


class Prefill:
    """A prefill's attention; operations above the diagonal do not count."""

    def __init__(self, heads: Heads, name: str, lens: tuple[int, ...], prefix: int) -> None:
        torch.manual_seed(0)
        self.heads, self.lens, self.prefix = heads, lens, prefix
        self.name = f"prefill {heads}, {name}"
        self.ends = [prefix + n for n in lens]
        self.tables, (self.cache,) = _paged(heads, [-(-n // BLOCK_SIZE) for n in self.ends], 1)
        self.q = random_normal(sum(lens), heads.queries, heads.dim)
        self.positions = torch.cat([torch.arange(prefix, end) for end in self.ends]).to(DEVICE)
        seen = sum(n * prefix + n * (n + 1) // 2 for n in lens)
        self.flops = 4 * heads.queries * heads.dim * seen

    def run(self, config: PrefillConfig | None) -> Callable[[], Tensor]:
        plan = plan_prefill(
            self.lens, DEVICE.type, num_heads=self.heads.queries, num_kv_heads=self.heads.kv,
            head_dim=self.heads.dim, dtype=DTYPE, context_lens=self.ends, config=config,
        )  # fmt: skip
        scale = self.heads.dim**-0.5
        return partial(
            paged_attention_prefill, self.q, self.cache, self.positions, self.tables, scale, plan
        )

    def flash(self) -> Case:
        """Torch's flash attention without a cache, on rows of the mean length."""
        rows, heads = len(self.lens), self.heads
        length = sum(self.lens) // rows
        q, k, v = (
            random_normal(rows, count, length, heads.dim)
            for count in (heads.queries, heads.kv, heads.kv)
        )

        def run() -> None:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH][DEVICE.type == "cpu" :]):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        flops = 2 * rows * heads.queries * heads.dim * length * (length + 1)
        return Case(f"  flash of torch, {rows} rows of {length}", [run], flops=flops, time=queued)


def _prefills(options: argparse.Namespace) -> Iterator[Prefill]:
    for number, heads in enumerate(TINY_HEADS if options.tiny else HEADS):
        shapes = [("2 rows", (20, 9), 0)] if options.tiny else PREFILL_SHAPES
        for shape in shapes if not number else shapes[:1]:
            yield Prefill(heads, *shape)


def prefill_cases(options: argparse.Namespace) -> Iterator[Case]:
    for own in _prefills(options):
        yield Case(own.name, [own.run(None)], flops=own.flops, time=queued)
        if not own.prefix:
            yield own.flash()


def tune_prefill(options: argparse.Namespace) -> Iterator[Group]:
    for own in _prefills(options):
        runs = {config: own.run(config) for config in PREFILL_SWEEP}

        def launch(config: Any, _: int, runs: Any = runs) -> Tensor:
            result: Tensor = runs[config]()
            return result

        yield Group(own.name, {"": [Choice("attention", PREFILL_SWEEP, launch, 1, queued)]})
