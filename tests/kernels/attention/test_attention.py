"""`paged_attention` on batches of several parts, compared with a plain computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention import attention, attention_reference
from batchgen.kernels.attention.attention import paged_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import AttentionMetadata, SoftmaxOptions, in_forms
from batchgen.kernels.attention.prefill_plan import cut_tiles, tile_tokens
from batchgen.kernels.attention.windows import ChunkWindow
from batchgen.kernels.rules import BY_ROW
from tests.support.kernels.fp8_cache import dequantised, in_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 2, 3, 16, 4
SCALE = HEAD_DIM**-0.5
DECODE = [(0, 1), (8, 1), (29, 1)]  # rows: tokens computed before, new ones
VERIFY = [(0, 4), (8, 4), (60, 4)]
BLOCKS = [(0, 64), (64, 64)]
CHUNKS = [(0, 13), (6, 7), (21, 1)]
EQUAL_CHUNKS = [(0, 4), (21, 4)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SameBits = Callable[[Tensor, Tensor], None]
Run = Callable[..., None]


class Batch(NamedTuple):
    q: Tensor
    cache: KVCache
    parts: list[AttentionMetadata]
    window: int | None = None
    sinks: Tensor | None = None
    cap: float | None = None


def make_batch(
    *parts: AttentionMetadata,
    group: int = GROUP,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    seed: int = 0,
    window: int | None = None,
    has_sinks: bool = False,
    cap: float | None = None,
) -> Batch:
    """Keys that no row of `parts` has written are NaN. With a window, block tables of layers that
    have none are of no use, and those of blocks before the window name any block."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 1 + max(int(part.block_tables.max()) for part in parts)
    shape = (KV_HEADS, num_blocks, block_size, HEAD_DIM)
    key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    unwritten = torch.ones(num_blocks * block_size, dtype=torch.bool)
    for part in parts:
        rows = zip(
            part.block_tables.cpu(), part.positions.cpu().split(part.query_lens), strict=True
        )
        for table, positions in rows:
            seen = torch.arange(int(positions[-1]) + 1)
            unwritten[table[seen // block_size] * block_size + seen % block_size] = False
    key[:, unwritten.view(num_blocks, block_size)] = float("nan")
    tokens = sum(len(part.positions) for part in parts)
    q = torch.randn(tokens, KV_HEADS * group, HEAD_DIM, generator=generator).to(dtype)
    moved = [
        replace(p, positions=p.positions.to(device), block_tables=p.block_tables.to(device))
        for p in parts
    ]
    if window is not None:
        moved = [stale(part, window, block_size, num_blocks, generator) for part in moved]
    sinks = torch.randn(KV_HEADS * group, generator=generator).to(device) if has_sinks else None
    cache = KVCache(key.to(device), value.to(device))
    return Batch(q.to(device), cache, moved, window, sinks, cap)


def stale(
    part: AttentionMetadata, window: int, size: int, num_blocks: int, generator: torch.Generator
) -> AttentionMetadata:
    """The part with window tables whose blocks before the window are any."""
    tables = part.block_tables.clone()
    for table, positions in zip(tables, part.positions.split(part.query_lens), strict=True):
        passed = max(int(positions[0]) - (window - 1), 0) // size
        table[:passed] = torch.randint(0, num_blocks, (passed,), generator=generator)
    nowhere = torch.full_like(tables, 2**40)
    return replace(part, block_tables=nowhere, window_tables=tables)


def make_part(
    rows: Sequence[tuple[int, int]],
    *,
    first_block: int = 1,
    block_size: int = BLOCK_SIZE,
    repeats: int = 0,
    decode_width: int | None = None,
    block_length: int = 1,
) -> AttentionMetadata:
    """Rows of (tokens computed before, new tokens), the last `repeats` of which stand where the one
    before them does: their context is shorter then than `context_lens` says."""
    width = max(-(-sum(row) // block_size) for row in rows)
    tables = torch.zeros(len(rows), width, dtype=torch.int64)
    for table, (before, new) in zip(tables, rows, strict=True):
        used = -(-(before + new) // block_size)
        table[:used] = torch.arange(first_block, first_block + used).flip(0)
        first_block += used
    positions = [
        torch.arange(before, before + new).clamp(max=max(before + new - 1 - repeats, before))
        for before, new in rows
    ]
    return AttentionMetadata(
        torch.cat(positions),
        tuple(new for _, new in rows),
        tuple(before + new for before, new in rows),
        tables,
        decode_width=decode_width,
        block_length=block_length,
    )


def after(part: AttentionMetadata) -> int:
    return int(part.block_tables.max()) + 1


def static_tiles(part: AttentionMetadata) -> dict[int, Tensor]:
    """As a captured graph has them: more than there are, the rest of no tokens."""
    size = tile_tokens(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, torch.float32)
    cut = cut_tiles(part.query_lens, size, part.context_lens)
    return {size: torch.cat((cut, torch.zeros(3, 3, dtype=torch.int32))).to(DEVICE)}


def attend(run: Run, batch: Batch) -> Tensor:
    """As `paged_attention`, into memory full of garbage."""
    out = torch.full_like(batch.q, float("nan"))
    start = 0
    for part in batch.parts:
        tokens = slice(start, start := start + len(part.positions))
        options = SoftmaxOptions(SCALE, batch.window, batch.sinks, batch.cap)
        run(batch.q[tokens], batch.cache, part, options, out[tokens])
    return out


def triton(batch: Batch) -> Tensor:
    return attend(attention.attend_part_triton, batch)


def reference(batch: Batch) -> Tensor:
    return attend(attention_reference.attend_part_reference, batch)


def oracle(batch: Batch) -> Tensor:
    """Query by query in float64."""
    out, token = torch.empty(batch.q.shape, dtype=torch.float64), 0
    queries, key, value = (x.double().cpu() for x in (batch.q, *dequantised(batch.cache)))
    for part in batch.parts:
        rows = zip(
            part.tables(batch.window).cpu(),
            part.positions.cpu().split(part.query_lens),
            strict=True,
        )
        for table, positions in rows:
            for position in positions.tolist():
                block_end = (position // part.block_length + 1) * part.block_length
                end = min(block_end, int(positions[-1]) + 1)
                seen = slice(_first_seen(position, batch.window), end)
                keys, values = (x[:, table].flatten(1, 2)[:, seen] for x in (key, value))
                score = queries[token].unflatten(0, (KV_HEADS, -1)) @ keys.mT * SCALE
                if batch.cap is not None:
                    score = batch.cap * torch.tanh(score / batch.cap)
                if batch.sinks is not None:  # a last token without a value
                    sinks = batch.sinks.double().cpu().view(KV_HEADS, -1, 1)
                    score = torch.cat((score, sinks), -1)
                    values = torch.nn.functional.pad(values, (0, 0, 0, 1))
                out[token] = (score.softmax(-1) @ values).flatten(0, 1)
                token += 1
    return out


def _first_seen(position: int, window: int | None) -> int:
    if isinstance(window, ChunkWindow):
        return position - position % window
    return max(position + 1 - (window or position + 1), 0)


def _windows(longest: int) -> st.SearchStrategy[int]:
    lengths = st.integers(1, longest)
    return lengths | lengths.map(ChunkWindow)


def assert_right(ours: Tensor, batch: Batch) -> None:
    assert ours.dtype == batch.q.dtype
    tolerance = TOLERANCE[ours.dtype]
    expected = oracle(batch)
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=tolerance, atol=tolerance)


WIDE = make_part(BLOCKS, decode_width=64, block_length=32)  # more queries than a decode tile has
STEP = make_part(DECODE, decode_width=1)
PARTS = {
    "decode": ([STEP], ["decode"]),
    "prefill": ([make_part(CHUNKS)], ["prefill"]),
    "both": ([STEP, make_part(CHUNKS, first_block=40)], ["decode", "prefill"]),
    "verify": ([make_part(VERIFY, decode_width=4)], ["decode"]),
    "blocks": ([make_part(VERIFY, decode_width=4, block_length=4)], ["decode"]),
    "equal chunks": ([make_part(EQUAL_CHUNKS)], ["prefill"]),
    "wide": ([WIDE, make_part(VERIFY, first_block=60, decode_width=4)], ["prefill", "decode"]),
    "last tokens": ([make_part(DECODE, block_length=8)], ["prefill"]),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", PARTS)
def test_the_kernels_attend_as_the_reference_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, wanted = PARTS[kind]
    batch = make_batch(*parts)
    launched = []
    for name in ("decode", "prefill"):
        kernel = getattr(attention, f"paged_attention_{name}")

        def record(
            *args: object, kernel: object = kernel, name: str = name, **kw: object
        ) -> object:
            launched.append(name)
            return kernel(*args, **kw)  # type: ignore[operator]

        monkeypatch.setattr(attention, f"paged_attention_{name}", record)
    assert_right(triton(batch), batch)
    assert launched == wanted
    assert_right(reference(make_batch(*parts, device="cpu")), batch)


@pytest.mark.quick(4, thorough=7)
@pytest.mark.parametrize(
    "window", [None, ChunkWindow(5), 1, 5, 16, 300, *map(ChunkWindow, (1, 16, 300))]
)
@pytest.mark.parametrize("kind", ["decode", "verify", "both"])
def test_windows_sinks_and_caps(kind: str, window: int | None) -> None:
    """Blocks before the window may belong to anybody."""
    parts, _ = PARTS[kind]
    cap = {1: None, 5: 0.5, 16: 1e-6}.get(window or 0, 3.0)
    batch = make_batch(*parts, window=window, has_sinks=True, cap=cap)
    assert_right(triton(batch), batch)
    batch = make_batch(*parts, window=window, has_sinks=True, cap=cap, device="cpu")
    assert_right(reference(batch), batch)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "window", "dtype"),
    [
        ("both", None, torch.float32),
        ("both", None, torch.bfloat16),
        ("verify", None, torch.float16),
        ("blocks", None, torch.bfloat16),
        ("wide", None, torch.float32),
        ("both", 5, torch.bfloat16),
        ("both", ChunkWindow(16), torch.float32),
    ],
)
def test_keys_and_values_in_fp8(kind: str, window: int | None, dtype: torch.dtype) -> None:
    parts, _ = PARTS[kind]
    options: dict[str, Any] = {"window": window, "has_sinks": True, "cap": 3.0} if window else {}
    batch = make_batch(*parts, dtype=dtype, **options)
    # As small and as large as the heads of values get: their scales differ by far.
    batch.cache.value.mul_(torch.tensor([1e-2, 30.0], device=DEVICE).view(-1, 1, 1, 1))
    rounded = batch._replace(cache=in_fp8(batch.cache))
    expected = oracle(rounded)
    ours = triton(rounded).double().cpu()
    for head in (slice(0, GROUP), slice(GROUP, None)):
        bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        bound *= float(expected[:, head].abs().max())
        torch.testing.assert_close(ours[:, head], expected[:, head], rtol=0, atol=bound)
    plain = oracle(batch)
    assert 0 < (plain - expected).norm() < 0.04 * plain.norm()
    if DEVICE == "cpu":
        found = reference(rounded).double()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("window", [100, 600, 2000, *map(ChunkWindow, (128, 600))])
def test_splits_of_a_window(window: int) -> None:
    """A window of several splits, and sinks where they are combined."""
    part = make_part([(1500, 2), (90, 2), (700, 2)], block_size=16, decode_width=2)
    batch = make_batch(part, block_size=16, window=window, has_sinks=True)
    assert_right(triton(batch), batch)


@pytest.mark.parametrize("block_length", [1, 8])
def test_tiles_of_a_captured_graph(block_length: int) -> None:
    part = make_part(CHUNKS, block_length=block_length)
    batch = make_batch(replace(part, tiles=static_tiles(part)))
    assert_right(triton(batch), batch)


@pytest.mark.thorough
def test_context_lens_of_a_capture_do_not_matter(same_bits: SameBits) -> None:
    for part in (WIDE, make_part(VERIFY, decode_width=4, block_length=4)):
        captured = replace(part, context_lens=(1,) * len(part.query_lens))
        same_bits(triton(make_batch(captured)), triton(make_batch(part)))


def test_a_decode_width_is_that_of_all_rows() -> None:
    batch = make_batch(make_part([(0, 4), (0, 3)], decode_width=4))
    with pytest.raises(AssertionError):
        triton(batch)


@pytest.mark.quick(2, thorough=5)
@pytest.mark.parametrize("again", [(1, 0, 2), (18, 9, 2), (3, 2, 2), (0, 2, 0)])
@pytest.mark.parametrize("block_length", [1, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_tokens_replayed_take_the_form_of_a_decode_step(
    again: tuple[int, ...], block_length: int, window: int | None, same_bits: SameBits
) -> None:
    if block_length > 1 and window:
        return  # attention in blocks has no window
    again = tuple(n * block_length for n in again)
    rows = [(0, 38), (8, 20), (30, 4)]
    part = make_part(rows, block_length=block_length)
    part = replace(part, replayed=again, rules=BY_ROW)
    batch = make_batch(part, window=window)
    found = triton(batch)
    assert_right(found, batch)
    first = 0
    for row, ((before, new), count) in enumerate(zip(rows, again, strict=True)):
        for start in range(new - count, new, block_length):
            tokens = slice(first + start, first + start + block_length)
            step = AttentionMetadata(
                batch.parts[0].positions[tokens],
                (block_length,),
                (before + start + block_length,),
                batch.parts[0].tables(window)[row : row + 1],
                decode_width=block_length,
                block_length=block_length,
                rules=BY_ROW,
            )
            alone = triton(batch._replace(q=batch.q[tokens], parts=[step]))
            same_bits(found[tokens], alone)
        first += new


def test_runs_of_replayed_tokens_are_few_parts() -> None:
    """A prompt, runs of 8, and what is left of them; without room for splits in one part each."""
    part = make_part([(0, 3 + 8 * 300), (0, 70)], block_size=32)
    rows = replace(part, replayed=(8 * 300, 21), rules=BY_ROW)

    def widths(block_size: int) -> list[tuple[int | None, int]]:
        forms = [form for _, form in in_forms(replace(rows), block_size)]
        return [(form.decode_width, len(form.query_lens)) for form in forms]

    assert widths(16) == [(None, 2), (8, 256), (8, 46), (1, 5)]  # as if half as long
    assert widths(32) == [(None, 2), *[(8, 32)] * 9, (8, 14), (1, 5)]


@st.composite
def batches(draw: st.DrawFn, device: str) -> Batch:
    """Decoding rows and rows of prefill, of one block length."""
    block_size = draw(st.sampled_from([4, 16, 32, 64]))
    block_length = draw(st.sampled_from([1, 1, 2, 4, 8, 32, 64]))
    width = draw(st.integers(1, 8)) if block_length == 1 else block_length
    starts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=3))
    if block_length > 1:
        starts = [start // block_length * block_length for start in starts]
    lens = draw(st.lists(st.integers(1, 70), min_size=len(starts), max_size=len(starts)))
    repeats = draw(st.sampled_from([0, 0, 1, 3]))
    decode = make_part(
        [(start, width) for start in starts], block_size=block_size, repeats=repeats,
        decode_width=width, block_length=block_length,
    )  # fmt: skip
    prefill = make_part(
        [*zip(starts[::-1], lens, strict=True)], first_block=after(decode), block_size=block_size,
        block_length=block_length,
    )  # fmt: skip
    return make_batch(
        decode,
        prefill,
        group=draw(st.sampled_from([1, 2, 4, 8])),
        block_size=block_size,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        device=device,
        seed=draw(st.integers(0, 99)),
        window=draw(st.none() | _windows(130)) if block_length == 1 else None,
        has_sinks=draw(st.booleans()),
        cap=draw(st.sampled_from([None, None, 0.5, 50.0])),
    )


@settings(deadline=None, max_examples=max(1, settings().max_examples // 20))
@given(batch=batches(DEVICE))
def test_kernels_equal_float64(batch: Batch) -> None:
    assert_right(triton(batch), batch)


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(batch=batches("cpu"))
def test_reference_equals_float64(batch: Batch) -> None:
    assert_right(reference(batch), batch)


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(
    block_length=st.sampled_from([1, 1, 2, 4, 8, 32]),
    length=st.integers(1, 90),
    window=st.none() | _windows(100),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_a_query_has_the_same_bits_however_its_row_is_cut(
    block_length: int,
    length: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    """On CPUs: as a prefill, and in pieces of whole blocks beside other rows."""
    if attention_reference.cpu_row_multiple(KV_HEADS, HEAD_DIM, dtype) is None:
        pytest.skip("this CPU's products do not keep a row's bits, which the job's summary says")
    block_length = 1 if window else block_length
    whole = make_part([(0, length)], block_length=block_length)
    mate = make_part([(0, 70)], first_block=after(whole), block_length=block_length)
    batch = make_batch(whole, mate, group=group, dtype=dtype, device="cpu")
    expected = paged_attention(*batch[:3], SCALE, window=window)[:length]
    start = 0
    while start < length:
        blocks = data.draw(st.integers(1, max(8 // block_length, 1)))
        width = min((start // block_length + blocks) * block_length, length) - start
        table = batch.parts[0].block_tables
        mates = data.draw(st.integers(0, 2))  # rows of as many queries, before and after
        step = AttentionMetadata(
            torch.arange(start, start + width).repeat(mates + 1),
            (width,) * (mates + 1),
            (start + width,) * (mates + 1),
            table.repeat(mates + 1, 1),
            decode_width=width,
            block_length=block_length,
        )
        q = batch.q[start : start + width].repeat(mates + 1, 1, 1)
        out = paged_attention(q, batch.cache, [step], SCALE, window=window)
        out = out.unflatten(0, (mates + 1, width))
        assert all(torch.equal(row, expected[start : start + width]) for row in out)
        start += width


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "block_length"), [(1, 1), (4, 1), (4, 4), (32, 32), (64, 64)])
def test_a_decode_step_in_a_graph_equals_eager_as_it_grows(width: int, block_length: int) -> None:
    """The widest goes to the prefill kernel."""
    kind = {"decode_width": width, "block_length": block_length}
    ends = [(448, width), (64, width), (1984, width)]
    long = make_part(ends, block_size=16, **kind)
    batch = make_batch(long, block_size=16, dtype=torch.bfloat16)
    positions = torch.arange(width, device=DEVICE).repeat(len(ends))
    captured = replace(batch.parts[0], positions=positions, context_lens=(width,) * len(ends))

    def forward(part: AttentionMetadata) -> Tensor:
        return paged_attention(batch.q, batch.cache, [replace(part)], SCALE)

    forward(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(captured)
    for before in (torch.tensor([64, 0, 640]), torch.tensor([448, 64, 1984])):
        grown = before.to(DEVICE).repeat_interleave(width) + torch.arange(
            width, device=DEVICE
        ).repeat(3)
        positions.copy_(grown)
        graph.replay()
        assert torch.equal(out, forward(captured))
        assert_right(out, batch._replace(parts=[replace(captured, positions=grown)]))
