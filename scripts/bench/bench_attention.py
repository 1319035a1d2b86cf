"""Time the attention kernels beside the bandwidth of a copy, measured in the same run.

    python scripts/bench/bench_attention.py [--section decode] [--sweep]
    python scripts/bench/bench_attention.py --section decode --width 4
    python scripts/bench/bench_attention.py --section decode --block-length 32

Needs a GPU. Every time is a median over replays of a captured CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from batchgen.kernels.attention.decode import MAX_QUERIES, DecodeConfig, paged_attention_decode
from batchgen.kernels.attention.decode_plan import (
    MAX_SPLITS,
    most_splits,
    plan_decode,
    split_length,
)
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import PrefillConfig, plan_prefill

HEADS = [(32, 8), (16, 8)]
HEAD_DIM = 128
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
_CACHE_BYTES = 512 * 2**20
"""Bytes of keys and values that are read before any of them is read again: many times the size of
a GPU's L2 cache."""
_REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of a decoding row: those of its last `width` tokens.

    Tokens in the same block of `block_length` positions see each other.
    """

    width: int = 1
    block_length: int = 1

    def __str__(self) -> str:
        blocks = f" in blocks of {self.block_length}" if self.block_length > 1 else ""
        return f"{self.width} queries a row{blocks}"


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The contexts of `batch` rows, in tokens.

    All are `context`; if `mixed`, they are spread over 100 to 2048 with the mean `context`.
    """

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
    DecodeShape(1, 2048),
    DecodeShape(1, 32768),
    DecodeShape(8, 2048),
    DecodeShape(32, 1024),
    DecodeShape(64, 2048),
    DecodeShape(128, 850, mixed=True),
    DecodeShape(256, 850, mixed=True),
    DecodeShape(256, 4096),
    DecodeShape(512, 600),
]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode step reads.

    There are several caches of the same shape, which are read in turn, since one alone may fit in
    the GPU's L2 cache. `kv_bytes` are the bytes of keys and values that one of them gives.
    """

    q: Tensor
    caches: list[KVCache]
    positions: Tensor
    tables: Tensor
    queries: Queries
    kv_bytes: int


def graph_time(launch: Callable[[], object], per_graph: int = 1) -> float:
    """Capture `launch` in a CUDA graph and return its median time over replays, in microseconds.

    `launch` does `per_graph` equal pieces of work; the time is that of one of them.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(_REPLAYS)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1000 for start, end in events]
    median: float = statistics.median(times)
    return median / per_graph


def copy_bandwidth() -> float:
    """Return the GB/s that a copy of 2 GiB reads and writes together."""
    source = torch.zeros(2 * 2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_time(lambda: target.copy_(source)) / 1e3


def decode_inputs(
    shape: DecodeShape, num_heads: int, kv_heads: int, queries: Queries
) -> DecodeInputs:
    width, length = queries.width, queries.block_length
    contexts = [-(-context // length) * length for context in shape.contexts()]
    used = [-(-context // BLOCK_SIZE) for context in contexts]
    num_blocks = 1 + sum(used)
    kv_bytes = 2 * sum(contexts) * kv_heads * HEAD_DIM * DTYPE.itemsize
    order = torch.randperm(num_blocks - 1) + 1
    tables = torch.zeros(shape.batch, max(used), dtype=torch.int64)
    for row, blocks in enumerate(order.split(used)):
        tables[row, : len(blocks)] = blocks
    cache_shape = (kv_heads, num_blocks, BLOCK_SIZE, HEAD_DIM)
    caches = [
        KVCache(*(torch.randn(cache_shape, dtype=DTYPE, device="cuda") for _ in range(2)))
        for _ in range(-(-_CACHE_BYTES // kv_bytes))
    ]
    q = torch.randn(shape.batch * width, num_heads, HEAD_DIM, dtype=DTYPE, device="cuda")
    positions = torch.tensor(contexts).unsqueeze(1) - width + torch.arange(width)
    return DecodeInputs(q, caches, positions.flatten().cuda(), tables.cuda(), queries, kv_bytes)


def decode_time(
    inputs: DecodeInputs, config: DecodeConfig | None = None, split_tokens: int | None = None
) -> float:
    """Return the microseconds of one layer's attention.

    They include the combination of splits, and not the plan, which is made once per forward.
    """
    tables, positions, queries = inputs.tables, inputs.positions, inputs.queries
    rows, kv_heads = len(tables), len(inputs.caches[0].key)
    plan = plan_decode(
        positions, tables, queries.width, BLOCK_SIZE,
        split_tokens=split_tokens or split_length(rows, kv_heads),
        max_splits=most_splits(rows, kv_heads, queries.width),
    )  # fmt: skip
    scale, length = HEAD_DIM**-0.5, queries.block_length

    def layers() -> None:
        for cache in inputs.caches:
            paged_attention_decode(
                inputs.q, cache, positions, tables, scale, plan, config, block_length=length
            )

    return graph_time(layers, len(inputs.caches))


def bench_decode(copy: float, sweep: bool, queries: Queries) -> None:
    """Print the time, the GB/s of keys and values and their share of a copy's, for every shape."""
    for (num_heads, kv_heads), shape in itertools.product(HEADS, DECODE_SHAPES):
        torch.manual_seed(0)
        inputs = decode_inputs(shape, num_heads, kv_heads, queries)
        name = f"decode {num_heads}/{kv_heads} heads, {queries}, {shape}"
        if sweep:
            for time, config, split in sorted(sweep_times(inputs))[:8]:
                _report(f"{name}: {config}, split {split}", inputs.kv_bytes, time, copy)
        _report(name, inputs.kv_bytes, decode_time(inputs), copy)
    for batch in (1, 256, 512):
        positions = torch.full((batch * queries.width,), 850, device="cuda")
        tables = torch.zeros(batch, 2048, dtype=torch.int64, device="cuda")
        plan = functools.partial(plan_decode, positions, tables, queries.width, BLOCK_SIZE)
        time = graph_time(plan)
        print(f"decode plan of {batch} rows, at most {MAX_SPLITS} splits: {time:.1f} us")


def sweep_times(inputs: DecodeInputs) -> Iterator[tuple[float, str, int]]:
    """Yield (microseconds, configuration, tokens of a split) of the configurations to be tried.

    Those that do not fit in shared memory, of which more queries leave less, are left out.
    """
    for config, split in decode_sweep():
        try:
            yield decode_time(inputs, config, split), str(config), split
        except OutOfResources:
            continue


def decode_sweep() -> Iterator[tuple[DecodeConfig, int]]:
    """Yield the configurations whose programs' pipelines fit into 227 KiB of shared memory."""
    for block_n, warps, stages, programs, split in itertools.product(
        (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4), (512, 2048)
    ):
        tile = 2 * block_n * HEAD_DIM * DTYPE.itemsize
        if programs * ((stages - 1) * tile + 8 * 1024) <= 227 * 1024:
            yield DecodeConfig(block_n, warps, stages, programs), split


def _report(name: str, size: int, time: float, copy: float) -> None:
    rate = size / time / 1e3
    print(f"{name}: {time:.1f} us, {rate:.0f} GB/s, {rate / copy:.1%} of a copy", flush=True)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """A prefill: the new tokens of each row, behind `prefix` tokens that are in the cache."""

    name: str
    query_lens: tuple[int, ...]
    num_heads: int = 32
    kv_heads: int = 8
    prefix: int = 0

    @property
    def flops(self) -> int:
        """Operations of the products with keys and values, for the tokens that each query sees."""
        seen = sum(n * self.prefix + n * (n + 1) // 2 for n in self.query_lens)
        return 4 * self.num_heads * HEAD_DIM * seen


_ROWS = (1000, 1875, 1250, 1625, 1400, 1042)
PREFILL_SHAPES = [
    PrefillShape("8192 tokens in rows of 1000-2000", _ROWS),
    PrefillShape("8192 tokens in rows of 1000-2000", _ROWS, num_heads=16),
    PrefillShape("1 row of 8k", (8192,)),
    PrefillShape("1 row of 32k", (32768,)),
    PrefillShape("80 rows of 100", (100,) * 80),
    PrefillShape("8k after 24k", (8192,), prefix=24576),
]
PREFILL_SWEEP = [
    PrefillConfig(*sizes)
    for sizes in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
        (128, 32, 8, 3), (128, 32, 8, 4), (128, 32, 4, 4), (128, 64, 4, 2), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4),
    )
]  # fmt: skip


def prefill_rates(
    shape: PrefillShape, configs: list[PrefillConfig | None]
) -> Iterator[tuple[float, PrefillConfig]]:
    """Yield the TFLOP/s of each configuration that fits in shared memory.

    The configuration None is the one that the kernel chooses by itself.
    """
    used = [-(-(shape.prefix + n) // BLOCK_SIZE) for n in shape.query_lens]
    tables = torch.zeros(len(used), max(used), dtype=torch.int64)
    for row, blocks in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        tables[row, : len(blocks)] = blocks
    tables = tables.cuda()
    cache_shape = (shape.kv_heads, sum(used) + 1, BLOCK_SIZE, HEAD_DIM)
    cache = KVCache(*(torch.randn(cache_shape, dtype=DTYPE, device="cuda") for _ in range(2)))
    q_shape = (sum(shape.query_lens), shape.num_heads, HEAD_DIM)
    q = torch.randn(q_shape, dtype=DTYPE, device="cuda")
    ends = [shape.prefix + n for n in shape.query_lens]
    positions = torch.cat([torch.arange(shape.prefix, end) for end in ends]).cuda()
    for config in configs:
        plan = plan_prefill(
            shape.query_lens, "cuda", num_heads=shape.num_heads, num_kv_heads=shape.kv_heads,
            head_dim=HEAD_DIM, dtype=DTYPE, context_lens=ends, config=config,
        )  # fmt: skip
        launch = functools.partial(
            paged_attention_prefill, q, cache, positions, tables, HEAD_DIM**-0.5, plan
        )
        try:
            yield shape.flops / graph_time(launch) / 1e6, plan.config
        except OutOfResources:
            continue


def flash_rate(shape: PrefillShape) -> float:
    """Return the TFLOP/s of torch's flash attention, without a KV cache.

    All rows have the mean length of those of the shape.
    """
    rows = len(shape.query_lens)
    length = sum(shape.query_lens) // rows
    q, k, v = (
        torch.randn(rows, heads, length, HEAD_DIM, dtype=DTYPE, device="cuda")
        for heads in (shape.num_heads, shape.kv_heads, shape.kv_heads)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        time = graph_time(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
    return 2 * rows * shape.num_heads * HEAD_DIM * length * (length + 1) / time / 1e6


def bench_prefill(sweep: bool) -> None:
    """Print the TFLOP/s of every shape. Operations above the diagonal do not count."""
    for shape in PREFILL_SHAPES:
        torch.manual_seed(0)
        name = f"prefill {shape.num_heads}/{shape.kv_heads} heads, {shape.name}"
        if sweep:
            rates = sorted(prefill_rates(shape, [*PREFILL_SWEEP]), key=lambda r: -r[0])
            for rate, config in rates[:8]:
                print(f"{name}: {config}, {rate:.0f} TFLOP/s", flush=True)
        [(rate, _)] = prefill_rates(shape, [None])
        flash = "" if shape.prefix else f", flash of torch {flash_rate(shape):.0f}"
        print(f"{name}: {rate:.0f} TFLOP/s{flash}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", choices=["decode", "prefill", "all"], default="all")
    parser.add_argument("--sweep", action="store_true", help="try many configurations")
    parser.add_argument("--block-length", type=int, default=1, help="positions that see each other")
    parser.add_argument("--width", type=int, help="queries of a decoding row; default: one block")
    args = parser.parse_args()
    queries = Queries(args.width or args.block_length, args.block_length)
    most = MAX_QUERIES // max(heads // kv_heads for heads, kv_heads in HEADS)
    if not 1 <= queries.width <= most:
        parser.error(f"the decode kernel takes 1 to {most} queries of a row")
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {copy:.0f} GB/s")
    if args.section in ("decode", "all"):
        bench_decode(copy, args.sweep, queries)
    if args.section in ("prefill", "all"):
        bench_prefill(args.sweep)


if __name__ == "__main__":
    main()
