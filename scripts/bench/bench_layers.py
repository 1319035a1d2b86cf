"""Time the kernels between the matrix products, beside a copy on the same GPU.

    python scripts/bench/bench_layers.py

Needs a GPU. Each kernel is captured in a CUDA graph many times, on different buffers in turn, so
that neither the launches nor, for many tokens, the L2 cache distort its time. The shapes are those
of Qwen3-8B.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache, slot_mapping
from batchgen.kernels.attention.qkv import prepare_qkv
from batchgen.kernels.layers.activation import silu_and_mul
from batchgen.kernels.layers.embedding import embedding
from batchgen.kernels.layers.rms_norm import rms_norm

TOKENS = (1, 64, 256, 2048, 8192)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB = 4096, 32, 8, 128, 12288, 151_936
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
_BUFFER_BYTES = 256 * 2**20
"""Bytes that are read before a buffer is read again, which is more than an L2 cache holds. For few
tokens, whose buffers are small, it is less."""
_MOST_BUFFERS = 64
_LAUNCHES = 64
_REPLAYS = 5


class Bench(NamedTuple):
    """One kernel at one number of tokens.

    Attributes:
        name: as it is printed.
        run: launches the kernel once.
        num_bytes: the bytes that one launch must read and write.
    """

    name: str
    run: Callable[[], object]
    num_bytes: int


def microseconds(runs: list[Callable[[], object]], least_launches: int = _LAUNCHES) -> float:
    """Return the microseconds of one launch, in the fastest replay of a graph of all `runs`.

    The graph launches them in turn, `least_launches` times at least.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launches = -(-least_launches // len(runs)) * len(runs)
    with torch.cuda.graph(graph):
        for i in range(launches):
            runs[i % len(runs)]()
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / launches


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def benches(tokens: int, table: Tensor) -> Iterator[Bench]:
    """Yield every kernel for this number of tokens, with buffers of its own.

    Only the table of the embedding, `table` [VOCAB, HIDDEN], is shared.
    """
    row = tokens * HIDDEN * DTYPE.itemsize
    weight, head_weight = _random(HIDDEN), _random(HEAD_DIM)
    x = _random(tokens, HIDDEN)
    yield Bench("rms_norm", lambda: rms_norm(x, weight, 1e-6), 2 * row)
    gate_up = _random(tokens, 2 * INTER)
    yield Bench("silu_and_mul", lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2)
    ids = torch.randint(VOCAB, (tokens,), device="cuda")
    yield Bench("embedding", lambda: embedding(ids, table), 2 * row)
    qkv = _random(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos_sin = torch.randn((tokens, HEAD_DIM), device="cuda")
    blocks = 1 + -(-tokens // BLOCK_SIZE)
    tables = 1 + torch.randperm(blocks - 1, device="cuda")[None]
    cache = KVCache(*_random(2, KV_HEADS, blocks, BLOCK_SIZE, HEAD_DIM))
    positions = torch.arange(tokens, device="cuda")
    slots = slot_mapping(positions, None, tables, BLOCK_SIZE)
    for name, head in (("prepare_qkv", None), ("prepare_qkv, norm", head_weight)):
        yield Bench(
            name,
            lambda head=head: prepare_qkv(  # type: ignore[misc]
                qkv, head, head, 1e-6, cos_sin, cache, slots, HEADS, KV_HEADS
            ),
            2 * qkv.nbytes + cos_sin.nbytes,
        )
    yield Bench(
        "slot_mapping", lambda: slot_mapping(positions, None, tables, BLOCK_SIZE), 16 * tokens
    )
    copy = torch.empty_like(gate_up)
    yield Bench("copy [T, 2·inter]", lambda: copy.copy_(gate_up), 2 * gate_up.nbytes)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU: the kernels run on nothing else")
    table = _random(VOCAB, HIDDEN)
    print(torch.cuda.get_device_name())
    print(f"{'kernel':20}{'tokens':>8}{'µs':>10}{'GB/s':>8}")
    for tokens in TOKENS:
        smallest = tokens * HIDDEN * DTYPE.itemsize
        count = min(_MOST_BUFFERS, -(-_BUFFER_BYTES // smallest))
        for rounds in zip(*(benches(tokens, table) for _ in range(count)), strict=True):
            time = microseconds([bench.run for bench in rounds])
            name, num_bytes = rounds[0].name, rounds[0].num_bytes
            print(f"{name:20}{tokens:8}{time:10.2f}{num_bytes / time / 1e3:8.0f}", flush=True)


if __name__ == "__main__":
    main()
