"""Captured forwards compared with eager ones.

The fixed tensors of a graph hold more than the batch. What is not of the batch must not change its
results, nor write to any block of the cache.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ImageFeatures, ImagePlanes, OutputTokens
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.execution import graph_choice
from batchgen.engine.execution.cuda_graph import ForwardGraphs
from batchgen.engine.execution.fixed_inputs import fill_rows
from batchgen.engine.execution.forward import Part
from batchgen.engine.execution.forward import _images as images_of
from batchgen.engine.execution.graph_shapes import CHUNK_ROWS, GraphShapes, launch_bound_tokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.kernels.attention.kv_cache import KVCache, slot_mapping
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.attention.prefill_plan import tile_tokens
from tests.support.cases import some_slow

VOCAB, NUM_BLOCKS, BLOCK_SIZE = 128, 400, 4
MAX_ROWS, MAX_BLOCKS, CHUNK_TOKENS, PREFILL_TOKENS = 70, 10, 48, 300
SHORT_BLOCKS = 3
SHAPES = GraphShapes(MAX_ROWS, MAX_BLOCKS, CHUNK_TOKENS, PREFILL_TOKENS, SHORT_BLOCKS)
CPU = torch.device("cpu")
AXES = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)


def test_sizes_are_ascending_and_end_with_the_largest() -> None:
    for most in range(1, 601):
        shapes = GraphShapes(most, 10, 256, 16 * most)
        for sizes in (shapes.decode_sizes, shapes.mixed_sizes, shapes.prefill_sizes):
            assert sizes[0] >= 1 and all(one < other for one, other in itertools.pairwise(sizes))
        assert shapes.decode_sizes[-1] == shapes.mixed_sizes[-1] == most
        assert shapes.prefill_sizes[-1] == 16 * most
        for width in (2, 4, 32):
            sizes = shapes.wide_sizes(width)
            assert all(one < other for one, other in itertools.pairwise([0, *sizes]))
            # A step of more tokens than the largest prefill runs without a graph.
            assert [0, *sizes][-1] == min(most, 16 * most // width)
    unread = GraphShapes(8, 10, 256, 300, widths=(1, 4), reads_prompts=False)
    assert unread.mixed_sizes == unread.prefill_sizes == [] and unread.wide_sizes(4)
    none = GraphShapes(8, 10, 0, 0)
    assert not none.short_sizes
    assert none.mixed_sizes == none.prefill_sizes == [] and len(none) == len(none.decode_sizes)


@pytest.mark.thorough
def test_sizes_fill_up_little() -> None:
    for most in range(1, 601):
        shapes = GraphShapes(most, 10, 256, 0)
        rows = np.arange(1, most + 1)
        decode, mixed = (np.array(sorted(s)) for s in (shapes.decode_sizes, shapes.mixed_sizes))
        fitting = decode[np.searchsorted(decode, rows)]
        assert (fitting - rows <= np.maximum(rows // 2, 16)).all()
        assert (mixed[np.searchsorted(mixed, rows)] - rows < 32).all()


def test_prefills_that_the_host_holds_up_are_captured() -> None:
    assert launch_bound_tokens(28, 600_000_000, 8192) == 8192
    assert 512 <= launch_bound_tokens(36, 8_000_000_000, 8192) <= 2048
    assert launch_bound_tokens(80, 400_000_000_000, 8192) == 0
    assert launch_bound_tokens(30, 135_000_000, 1000) == 1000


class Model(ABC):
    """A forward over parts, and the cache that it writes and reads."""

    device: torch.device
    features: Tensor | None = None  # of one image token; None if it reads no images

    @abstractmethod
    def forward(self, parts: Sequence[Part], outputs: OutputTokens | None = None) -> Tensor: ...

    @abstractmethod
    def cells(self) -> Tensor:
        """A copy of the cache, [slots, ...]."""


class Toy(Model):
    """One number a token in the cache; a token's hidden state is a sum over those that it sees.

    It sees them by positions, rows, tables and tiles alone, as the kernels do.
    """

    device = CPU
    features = torch.full((2, 1, 1), float("nan"), dtype=torch.float64)

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._cache = torch.rand(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.float64)
        self._cache[:BLOCK_SIZE] = 0
        self.last: tuple[Sequence[Part], OutputTokens | None, Tensor] | None = None

    def cells(self) -> Tensor:
        return self._cache.clone()

    def forward(self, parts: Sequence[Part], outputs: OutputTokens | None = None) -> Tensor:
        hidden = self.compute(parts, outputs)
        self.last = (parts, outputs, hidden)
        return hidden

    def compute(self, parts: Sequence[Part], outputs: OutputTokens | None) -> Tensor:
        for part in parts:
            inputs = part.inputs
            slots = slot_mapping(inputs.positions, part.rows, inputs.block_tables, BLOCK_SIZE)
            values = (inputs.input_ids.double() + 0.5) * (inputs.positions + 1)
            self._cache[slots] = values * 1e-3
        self._cache[:BLOCK_SIZE] = float("nan")  # written by anyone, in any order
        hidden = torch.cat([self._attend(part) for part in parts])
        if (images := images_of(parts)) is not None:
            hidden = images.add(images.put(hidden), 0)
        if outputs is None:
            return hidden
        (attention,) = outputs.attention
        seen = [
            float(position) + float(table[: int(position) // BLOCK_SIZE + 1].sum())
            for position, table in zip(attention.positions, attention.block_tables, strict=True)
        ]
        return hidden[outputs.index] + torch.tensor(seen, dtype=torch.float64).unsqueeze(1)

    def _attend(self, part: Part) -> Tensor:
        inputs = part.inputs
        hidden = torch.full((len(inputs.input_ids), 1), float("nan"), dtype=torch.float64)
        if part.tiles is None:
            ends = inputs.query_lens.cumsum()
            tiles = [
                (i, int(ends[i]) - n + start, n - start)
                for i, n in enumerate(inputs.query_lens.tolist())
                for start in range(0, n, self._tile)
            ]
        else:
            tiles = [tuple(tile) for tile in part.tiles[self._tile].tolist()]
        for row, first, count in tiles:
            for token in range(first, first + min(count, self._tile)):
                seen = torch.arange(int(inputs.positions[token]) + 1)
                blocks = inputs.block_tables[row, seen // BLOCK_SIZE]
                values = self._cache[blocks * BLOCK_SIZE + seen % BLOCK_SIZE]
                assert torch.isnan(hidden[token]), "two tiles have the token"
                hidden[token] = (values * (seen + 1.5)).sum() + inputs.input_ids[token]
                hidden[token] += (inputs.rotary_positions[token] * AXES).sum()
        return hidden


class Real(Model):
    """The tiny model; its cache starts with values as of other rows."""

    def __init__(self, model: CausalLM) -> None:
        self.device = model.device
        caches = ModelUse(model, (1,)).caches(CacheSizes(NUM_BLOCKS, BLOCK_SIZE, 0))
        generator = torch.Generator(self.device).manual_seed(3)
        self._planes: list[Tensor] = []
        for cache in caches.layers:
            assert isinstance(cache, KVCache)
            self._planes += cache[:2]
        for plane in self._planes:
            plane.normal_(generator=generator)
        self._runner = ModelRunner(model, caches)

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part], outputs: OutputTokens | None = None) -> Tensor:
        return self._runner._forward(parts, outputs)

    def cells(self) -> Tensor:
        planes = [plane.flatten(1, 2).transpose(0, 1) for plane in self._planes]
        return torch.stack(planes, 1)


def fake_cuda(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    """Graphs of the toy, on the CPU: a replay computes again, from the tensors of the capture."""

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            toy.last = None

        def capture_end(self) -> None:
            assert toy.last is not None, "nothing was captured"
            self._parts, self._outputs, self._hidden = toy.last

        def replay(self) -> None:
            self._hidden.copy_(toy.compute(self._parts, self._outputs))

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

    def prefill(self, most: int = CHUNK_TOKENS, most_rows: int = CHUNK_ROWS) -> ModelInputs:
        rows = self.rng.choice([1, 2, 5, most_rows])
        budget = self.rng.choice([most, self.rng.randint(rows, most)])
        cuts = sorted(self.rng.sample(range(1, budget), rows - 1))
        lens = np.diff([0, *cuts, budget]).tolist()
        lens = [min(n, MAX_BLOCKS * BLOCK_SIZE) for n in lens]
        return self.make(lens, 20, self.rng.choice([MAX_BLOCKS, MAX_BLOCKS + 5]))

    def images(self, prefill: ModelInputs) -> tuple[ModelInputs, ImageFeatures | None]:
        """Some of the tokens as those of images, which turn the prefill's tokens by axes; or
        none."""
        tokens = len(prefill.input_ids)
        count = self.rng.choice([0, 0, 1, self.rng.randint(1, tokens), tokens])
        if not count:
            return prefill, None
        index = torch.tensor(sorted(self.rng.sample(range(tokens), count)), device=self.device)
        values = torch.rand((2, count, 1), dtype=torch.float64, device=self.device)
        turned = torch.randint(0, 50, (tokens, 3), device=self.device)
        return replace(prefill, rope_positions=turned), ImageFeatures(index, values)


def parts_of(
    decode: ModelInputs | None = None,
    prefill: ModelInputs | None = None,
    images: ImageFeatures | None = None,
) -> list[Part]:
    parts = [] if decode is None else [Part(decode)]
    if prefill is not None:
        rows = np.repeat(np.arange(prefill.num_rows, dtype=np.int32), prefill.query_lens)
        row_of = torch.as_tensor(rows, device=prefill.positions.device)
        parts.append(Part(prefill, row_of, images=images))
    return parts


def written_slots(parts: Sequence[Part]) -> Tensor:
    return torch.cat(
        [slot_mapping(p.inputs.positions, p.rows, p.inputs.block_tables, BLOCK_SIZE) for p in parts]
    )


def poison(graphs: ForwardGraphs, batches: Batches) -> None:
    """The fixed tensors as the fullest batch, of rows that now own other blocks, leaves them."""
    batches.start()
    full = batches.make([1] * MAX_ROWS, 2, MAX_BLOCKS)
    fill_rows(graphs._decode, full, MAX_ROWS)
    fill_rows(graphs._last_rows, full, MAX_ROWS)
    graphs._last.fill_(PREFILL_TOKENS - 1)
    lens = [CHUNK_TOKENS // CHUNK_ROWS] * CHUNK_ROWS
    graphs._chunk.fill(batches.make(lens, 5, MAX_BLOCKS), CHUNK_TOKENS)
    lens = [PREFILL_TOKENS // 15] * 15
    graphs._prefill.fill(batches.make(lens, 5, MAX_BLOCKS), PREFILL_TOKENS)


def outputs_of(
    prefill: ModelInputs, rng: random.Random
) -> tuple[Tensor, ModelInputs, OutputTokens]:
    """The last tokens of some of the rows: where they stand, and as rows."""
    count = rng.choice([0, rng.randint(1, prefill.num_rows)])
    rows = np.array(sorted(rng.sample(range(prefill.num_rows), count)), np.int64)
    last = torch.as_tensor(prefill.query_lens.cumsum()[rows] - 1, device=prefill.positions.device)
    inputs = ModelInputs(
        prefill.input_ids[last],
        prefill.positions[last],
        prefill.block_tables[torch.as_tensor(rows, device=last.device)],
        np.ones_like(rows),
        prefill.context_lens[rows],
    )
    contexts = tuple(inputs.context_lens.tolist())
    attention = AttentionMetadata(inputs.positions, (1,) * count, contexts, inputs.block_tables)
    return last, inputs, OutputTokens(last, [attention])


def capture(model: Model, tile: int, shapes: GraphShapes = SHAPES) -> ForwardGraphs:
    scratch = ModelInputs.on_scratch(np.ones(1, np.int64), 1, model.device)
    if model.features is not None:
        scratch = replace(scratch, rope_positions=scratch.positions.new_zeros((1, 3)))
    with torch.inference_mode():
        graphs = ForwardGraphs(model.forward, shapes, BLOCK_SIZE, [tile], scratch, model.features)
        graphs.capture()
        return graphs


@torch.inference_mode()
def check_replays(
    eager: Model, captured: Model, graphs: ForwardGraphs, seed: int, atol: float
) -> None:
    """Some batches one after another: the same results and cache as eager forwards, and nothing
    changes outside the slots of their tokens.
    """
    rng = random.Random(seed)
    batches = Batches(rng, eager.device)
    for rows in [MAX_ROWS, 1, 33, 32, 7, 64, 65, 2, rng.randint(1, MAX_ROWS)]:
        if rng.random() < 0.7:
            poison(graphs, batches)
        batches.start()
        kind = rng.choice(["decode", "mixed", "prefill"])
        outputs = None
        if kind == "prefill":
            prefill, images = batches.prefill(PREFILL_TOKENS, 12), None
            if eager.features is not None:
                prefill, images = batches.images(prefill)
            assert graphs.takes_prefill(prefill)
            parts = parts_of(prefill=prefill, images=images)
            before = captured.cells()
            last, inputs, outputs = outputs_of(prefill, rng)
            hidden = graphs.prefill(prefill, last, inputs, images).clone()
        elif kind == "decode":
            decode = batches.decode(rows)
            parts = parts_of(decode)
            before = captured.cells()
            hidden = graphs.decode(decode).clone()
        else:
            decode, prefill, images = batches.decode(rows), batches.prefill(), None
            if eager.features is not None:
                prefill, images = batches.images(prefill)
            assert graphs.takes_chunk(prefill)
            parts = parts_of(decode, prefill, images)
            before = captured.cells()
            decoded, chunk = graphs.mixed(decode, prefill, images)
            assert len(decoded) == rows and len(chunk) == CHUNK_TOKENS
            hidden = torch.cat((decoded, chunk[: len(prefill.input_ids)]))
        expected = eager.forward(parts, outputs)
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=atol)
        after, wanted, slots = captured.cells(), eager.cells(), written_slots(parts)
        assert len(slots) == len(set(slots.tolist())) and int(slots.min()) >= BLOCK_SIZE
        torch.testing.assert_close(after[slots], wanted[slots], rtol=1e-5, atol=atol)
        others = torch.ones(len(after), dtype=torch.bool, device=after.device)
        others[slots] = False
        others[:BLOCK_SIZE] = False  # the scratch block
        assert torch.equal(after[others], before[others]), "a slot of no token of the batch"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tile", "worth"),
    some_slow(
        itertools.product([1, 5, 16, 64], [0.0, 5.0, math.inf]),
        quick=[(1, 0.0), (5, 5.0), (16, math.inf), (64, 5.0)],
    ),
)
def test_replays_of_a_toy_equal_its_eager_forwards(
    monkeypatch: pytest.MonkeyPatch, tile: int, worth: float
) -> None:
    """Whether all sizes are captured, or some, or the largest alone."""
    monkeypatch.setattr(graph_choice, "WORTH_A_CAPTURE", worth)
    torch.manual_seed(0)
    eager, captured = Toy(tile), Toy(tile)
    captured._cache.copy_(eager._cache)
    fake_cuda(monkeypatch, captured)
    before = captured.cells()
    graphs = capture(captured, tile)
    assert torch.equal(captured.cells()[BLOCK_SIZE:], before[BLOCK_SIZE:])
    for seed in range(3):
        check_replays(eager, captured, graphs, seed, 1e-12)


@torch.inference_mode()
def test_what_is_captured_at_the_start_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(16)
    fake_cuda(monkeypatch, toy)
    graphs, batches = capture(toy, 16), Batches(random.Random(0), CPU)
    largest = {("prefill", PREFILL_TOKENS), *((k, MAX_ROWS) for k in ("mixed", "decode", "short"))}

    def captured() -> set[tuple[str, int]]:
        return {(key.kind, key.size) for key in graphs._graphs}

    def decode(steps: int) -> None:
        for _ in range(steps):
            batches.start()
            graphs.decode(batches.make([1] * 8, 2, MAX_BLOCKS))

    assert captured() == largest
    steps = int(graph_choice.WORTH_A_CAPTURE / math.log2(MAX_ROWS / 8))
    decode(steps)
    assert captured() == largest
    decode(1)
    assert captured() == {*largest, ("decode", 8)}
    graphs.capture_all()
    every = captured()
    assert len(every) == len(SHAPES) and {("short", 16), ("prefill", 256), ("mixed", 32)} <= every
    before = dict(graphs._graphs)
    graphs.capture_all()
    decode(5)
    assert graphs._graphs == before


@torch.inference_mode()
def test_steps_of_several_tokens_a_row_are_captured_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy(16)
    fake_cuda(monkeypatch, toy)
    shapes = replace(SHAPES, widths=(1, 5))
    graphs, batches = capture(toy, 16, shapes), Batches(random.Random(0), CPU)
    assert graphs.takes_decode(60, 5) and not graphs.takes_decode(61, 5)
    assert not any(key.width == 5 for key in graphs._graphs)
    batches.start()
    graphs.decode(batches.make([5] * 3, 2, MAX_BLOCKS))
    # 60 rows have the tokens of the largest prefill.
    assert [key.size for key in graphs._graphs if key.width == 5] == [60]
    # A fourth row costs nothing. That both are padded to 60 says nothing about later steps.
    assert graphs.decode_rows(3, 5) == 4
    graphs.capture_all()
    assert len(graphs._graphs) == len(shapes)


def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be the graphs of an engine that was dropped, which no capture survives."""
    toy = Toy(16)
    fake_cuda(monkeypatch, toy)
    enabled: list[bool] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def record(self: torch.cuda.CUDAGraph, pool: object, capture_error_mode: str) -> None:
        enabled.append(gc.isenabled())
        begin(self, pool, capture_error_mode)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", record)
    capture(toy, 16)
    assert enabled and not any(enabled) and gc.isenabled()


def test_what_a_mixed_graph_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(16)
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
        assert graphs.takes_chunk(batches.make(lens, 7, MAX_BLOCKS)) == fits


def test_graphs_read_no_images_that_see_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(16)
    fake_cuda(monkeypatch, toy)
    graphs, batches = capture(toy, 16), Batches(random.Random(0), CPU)
    batches.start()
    prefill = batches.make([24], 7, MAX_BLOCKS)
    assert graphs.takes_chunk(prefill) and graphs.takes_prefill(prefill)
    prefill = replace(prefill, last_seen=prefill.positions)
    assert not graphs.takes_chunk(prefill) and not graphs.takes_prefill(prefill)


def test_planes_have_the_bits_of_features() -> None:
    """Also where a token that is no image token has a zero's sign, and beside what is left of an
    earlier batch."""
    draws = torch.Generator().manual_seed(0)
    index = torch.tensor([0, 3, 4, 8])
    values = torch.randn((3, 4, 64), generator=draws).bfloat16()
    features = ImageFeatures(index, values)
    plane = torch.full((3, 9, 64), float("nan"), dtype=torch.bfloat16)
    planes = ImagePlanes(torch.ones((9, 1), dtype=torch.bool), plane)
    stream = torch.randn((14, 64), generator=draws).bfloat16()
    stream[6, :9] = torch.tensor([-0.0], dtype=torch.bfloat16)
    ids = torch.arange(14)
    planes.fill(None)
    for result in (planes.put(stream.clone()), planes.add(stream.clone(), 0)):
        assert torch.equal(result.view(torch.int16), stream.view(torch.int16))
    assert torch.equal(planes.hide(ids, 7), ids)
    planes.fill(features)
    for one, other in [(features.behind(5), planes.behind(5)), (features, planes)]:
        assert one.num_layers == other.num_layers == 2
        for expected, result in [
            (one.put(stream.clone()), other.put(stream.clone())),
            *((one.add(stream.clone(), k), other.add(stream.clone(), k)) for k in range(2)),
        ]:
            assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(one.hide(ids, 7), other.hide(ids, 7))
    part = planes.first(4)
    expected = ImageFeatures(index[:2], values[:, :2]).add(stream.clone(), 1)
    assert torch.equal(part.add(stream.clone(), 1), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("worth", [0.0, 5.0, math.inf])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_replays_equal_eager_forwards(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], kind: str, worth: float
) -> None:
    monkeypatch.setattr(graph_choice, "WORTH_A_CAPTURE", worth)
    model = load_model(tiny_model(kind), device=torch.device("cuda"), dtype=torch.float32)
    model.pack()
    eager, captured = Real(model), Real(model)
    before = captured.cells()
    (shape,) = model.attention_shapes
    tile = tile_tokens(shape.num_heads, shape.num_kv_heads, shape.head_dim, model.dtype)
    graphs = capture(captured, tile)
    assert torch.equal(captured.cells()[BLOCK_SIZE:], before[BLOCK_SIZE:])
    for seed in range(6):
        check_replays(eager, captured, graphs, seed, 1e-5)
