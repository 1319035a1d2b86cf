"""Captured forwards against eager ones: what stands in the fixed tensors and is not of the batch
must neither show in its results nor touch a block of the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.cuda_graph import (
    CHUNK_ROWS,
    ForwardGraphs,
    Part,
    mixed_row_buckets,
    row_buckets,
)
from batchgen.engine.loader import load_model
from batchgen.engine.memory import allocate_kv
from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.kernels.attention_prefill import tile_tokens
from batchgen.kernels.kv_cache import slot_mapping

VOCAB, NUM_BLOCKS, BLOCK_SIZE = 128, 400, 4
MAX_ROWS, MAX_BLOCKS, CHUNK_TOKENS = 70, 10, 48
CPU = torch.device("cpu")


@pytest.mark.parametrize("buckets", [row_buckets, mixed_row_buckets])
def test_buckets_are_ascending_and_end_with_the_most_rows(
    buckets: Callable[[int], list[int]],
) -> None:
    for max_rows in range(1, 601):
        sizes = buckets(max_rows)
        assert sizes[0] >= 1 and sizes[-1] == max_rows
        assert all(one < other for one, other in itertools.pairwise(sizes))


def test_buckets_fill_up_few_rows() -> None:
    for max_rows in range(1, 601):
        sizes, mixed = row_buckets(max_rows), mixed_row_buckets(max_rows)
        for rows in range(1, max_rows + 1):
            fitting = next(size for size in sizes if size >= rows)
            assert fitting - rows <= max(rows // 2, 16)
            assert next(size for size in mixed if size >= rows) - rows < 32


class Model(ABC):
    """A forward over parts, and the cache that it writes and reads."""

    device: torch.device

    @abstractmethod
    def forward(self, parts: Sequence[Part]) -> Tensor: ...

    @abstractmethod
    def cells(self) -> Tensor:
        """A copy of the cache, [slots, ...]."""


class Toy(Model):
    """One number a token in the cache; a token's hidden state is a sum over those that it sees.

    It sees them by positions, rows, tables and tiles alone, as the kernels do.
    """

    device = CPU

    def __init__(self) -> None:
        self._cache = torch.rand(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.float64)
        self._cache[:BLOCK_SIZE] = 0
        self.last: tuple[Sequence[Part], Tensor] | None = None

    def cells(self) -> Tensor:
        return self._cache.clone()

    def forward(self, parts: Sequence[Part]) -> Tensor:
        hidden = self.compute(parts)
        self.last = (parts, hidden)
        return hidden

    def compute(self, parts: Sequence[Part]) -> Tensor:
        for part in parts:
            inputs = part.inputs
            slots = slot_mapping(inputs.positions, part.rows, inputs.block_tables, BLOCK_SIZE)
            values = (inputs.input_ids.double() + 0.5) * (inputs.positions + 1)
            self._cache[slots] = values * 1e-3
        self._cache[:BLOCK_SIZE] = float("nan")  # written by anyone, in any order
        return torch.cat([self._attend(part) for part in parts])

    def _attend(self, part: Part) -> Tensor:
        inputs = part.inputs
        hidden = torch.full((len(inputs.input_ids), 1), float("nan"), dtype=torch.float64)
        if part.tiles is None:
            ends = inputs.query_lens.cumsum()
            tiles = [(i, ends[i] - n, n) for i, n in enumerate(inputs.query_lens.tolist())]
        else:
            tiles = [tuple(tile) for tile in part.tiles.tolist()]
        for row, first, count in tiles:
            for token in range(first, first + count):
                seen = torch.arange(int(inputs.positions[token]) + 1)
                blocks = inputs.block_tables[row, seen // BLOCK_SIZE]
                values = self._cache[blocks * BLOCK_SIZE + seen % BLOCK_SIZE]
                assert torch.isnan(hidden[token]), "two tiles have the token"
                hidden[token] = (values * (seen + 1.5)).sum() + inputs.input_ids[token]
        return hidden


class Real(Model):
    """The tiny model; its cache starts with values as of other rows."""

    def __init__(self, model: DenseForCausalLM) -> None:
        self.device = model.device
        config = model.config
        self._kv = allocate_kv(
            config, NUM_BLOCKS, BLOCK_SIZE, dtype=model.dtype, device=self.device
        )
        generator = torch.Generator(self.device).manual_seed(3)
        for cache in self._kv:
            for plane in cache:
                plane.normal_(generator=generator)
        self._runner = ModelRunner(model, self._kv)

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part]) -> Tensor:
        return self._runner._forward(parts)

    def cells(self) -> Tensor:
        planes = [plane.flatten(1, 2).transpose(0, 1) for cache in self._kv for plane in cache]
        return torch.stack(planes, 1)


def fake_cuda(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    """Graphs of the toy, on the CPU: a replay computes again, from the tensors of the capture."""

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            toy.last = None

        def capture_end(self) -> None:
            assert toy.last is not None, "nothing was captured"
            self._parts, self._hidden = toy.last

        def replay(self) -> None:
            self._hidden.copy_(toy.compute(self._parts))

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None: ...

        def wait_stream(self, other: Stream) -> None: ...

    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "synchronize", lambda device: None)


@dataclass
class Batches:
    """Random batches whose rows own their blocks alone."""

    rng: random.Random
    device: torch.device

    def __post_init__(self) -> None:
        self._blocks: list[int] = []

    def start(self) -> None:
        """What comes next shares no block with each other."""
        self._blocks = self.rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)

    def make(self, query_lens: list[int], blocks_most: int, width: int) -> ModelInputs:
        """Rows of some context, in tables `width` blocks wide; `blocks_most` bounds a row's."""
        room = min(blocks_most, width, MAX_BLOCKS) * BLOCK_SIZE
        ends = [self.rng.randint(n, max(n, room)) for n in query_lens]
        tables = np.zeros((len(ends), width), np.int64)
        for table, end in zip(tables, ends, strict=True):
            count = -(-end // BLOCK_SIZE)
            table[:count] = [self._blocks.pop() for _ in range(count)]
        positions = [np.arange(e - n, e) for n, e in zip(query_lens, ends, strict=True)]
        ids = [self.rng.randrange(VOCAB) for _ in range(sum(query_lens))]
        return ModelInputs(
            torch.tensor(ids, device=self.device),
            torch.as_tensor(np.concatenate(positions), device=self.device),
            torch.as_tensor(tables, device=self.device),
            np.array(query_lens),
            np.array(ends),
        )

    def decode(self, rows: int) -> ModelInputs:
        width = self.rng.choice([2, 3, MAX_BLOCKS, MAX_BLOCKS + 7])
        return self.make([1] * rows, 200 // rows, width)

    def prefill(self) -> ModelInputs:
        rows = self.rng.choice([1, 2, 5, CHUNK_ROWS])
        budget = self.rng.choice([CHUNK_TOKENS, self.rng.randint(rows, CHUNK_TOKENS)])
        cuts = sorted(self.rng.sample(range(1, budget), rows - 1))
        lens = np.diff([0, *cuts, budget]).tolist()
        lens = [min(n, MAX_BLOCKS * BLOCK_SIZE) for n in lens]
        return self.make(lens, 20, self.rng.choice([MAX_BLOCKS, MAX_BLOCKS + 5]))


def parts_of(decode: ModelInputs, prefill: ModelInputs | None = None) -> list[Part]:
    if prefill is None:
        return [Part(decode)]
    rows = np.repeat(np.arange(prefill.num_rows, dtype=np.int32), prefill.query_lens)
    return [Part(decode), Part(prefill, torch.as_tensor(rows, device=prefill.positions.device))]


def written_slots(parts: Sequence[Part]) -> Tensor:
    return torch.cat(
        [slot_mapping(p.inputs.positions, p.rows, p.inputs.block_tables, BLOCK_SIZE) for p in parts]
    )


def poison(graphs: ForwardGraphs, batches: Batches) -> None:
    """The fixed tensors as the fullest batch, of rows that now own other blocks, leaves them."""
    batches.start()
    graphs._fill_decode(batches.make([1] * MAX_ROWS, 3, MAX_BLOCKS), MAX_ROWS)
    lens = [CHUNK_TOKENS // CHUNK_ROWS] * CHUNK_ROWS
    graphs._fill_chunk(batches.make(lens, 5, MAX_BLOCKS))


def capture(model: Model, tile: int) -> ForwardGraphs:
    with torch.inference_mode():
        return ForwardGraphs(model.forward, MAX_ROWS, MAX_BLOCKS, CHUNK_TOKENS, tile, model.device)


@torch.inference_mode()
def check_replays(
    eager: Model, captured: Model, graphs: ForwardGraphs, seed: int, atol: float
) -> None:
    """Some batches one after another: the same results and cache as eager forwards, and nothing
    changes outside the slots of their tokens.
    """
    rng = random.Random(seed)
    batches = Batches(rng, eager.device)
    for rows in [MAX_ROWS, 1, 33, 32, 7, 64, 65, rng.randint(1, MAX_ROWS)]:
        if rng.random() < 0.7:
            poison(graphs, batches)
        batches.start()
        decode, prefill = batches.decode(rows), batches.prefill()
        if rng.random() < 0.3:
            parts = parts_of(decode)
            before = captured.cells()
            hidden = graphs.decode(decode).clone()
        else:
            assert graphs.takes(prefill)
            parts = parts_of(decode, prefill)
            before = captured.cells()
            decoded, chunk = graphs.mixed(decode, prefill)
            assert len(decoded) == rows and len(chunk) == CHUNK_TOKENS
            hidden = torch.cat((decoded, chunk[: len(prefill.input_ids)]))
        expected = eager.forward(parts)
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=atol)
        after, wanted, slots = captured.cells(), eager.cells(), written_slots(parts)
        assert len(slots) == len(set(slots.tolist())) and int(slots.min()) >= BLOCK_SIZE
        torch.testing.assert_close(after[slots], wanted[slots], rtol=1e-5, atol=atol)
        others = torch.ones(len(after), dtype=torch.bool, device=after.device)
        others[slots] = False
        others[:BLOCK_SIZE] = False  # the scratch block
        assert torch.equal(after[others], before[others]), "a slot of no token of the batch"


@pytest.mark.parametrize("tile", [1, 5, 16, 64])
def test_replays_of_a_toy_equal_its_eager_forwards(
    monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    torch.manual_seed(0)
    eager, captured = Toy(), Toy()
    captured._cache.copy_(eager._cache)
    fake_cuda(monkeypatch, captured)
    before = captured.cells()
    graphs = capture(captured, tile)
    assert torch.equal(captured.cells()[BLOCK_SIZE:], before[BLOCK_SIZE:])
    for seed in range(3):
        check_replays(eager, captured, graphs, seed, 1e-12)


def test_what_a_mixed_graph_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    fake_cuda(monkeypatch, toy)
    graphs, batches = capture(toy, 16), Batches(random.Random(0), CPU)
    batches.start()
    for lens, fits in [
        ([24, 24], True),
        ([25, 24], False),
        ([1] * CHUNK_ROWS, True),
        ([1] * (CHUNK_ROWS + 1), False),
        ([6] * CHUNK_ROWS, True),
    ]:
        assert graphs.takes(batches.make(lens, 7, MAX_BLOCKS)) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_replays_equal_eager_forwards(tiny_model: Callable[..., Path], kind: str) -> None:
    model = load_model(tiny_model(kind), device=torch.device("cuda"), dtype=torch.float32)
    model.pack()
    config = model.config
    eager, captured = Real(model), Real(model)
    before = captured.cells()
    tile = tile_tokens(config.num_heads, config.num_kv_heads, config.head_dim, model.dtype)
    graphs = capture(captured, tile)
    assert torch.equal(captured.cells()[BLOCK_SIZE:], before[BLOCK_SIZE:])
    for seed in range(6):
        check_replays(eager, captured, graphs, seed, 1e-5)
