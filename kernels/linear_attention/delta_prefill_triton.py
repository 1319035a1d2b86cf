"""The chunked form of the gated delta rule and of Mamba2's in Triton, in two launches.
`delta_prefill` in `delta_rule.py` calls it.

The first launch computes the interactions of tokens within each chunk, for all chunks at once. The
second goes through each row's chunks in order and carries the state. With K, Q [64, dk] the raw
keys and queries of a chunk, V [64, dv] its values and S the state before it, the second computes

    U = T·(V − c ∘ K·Sᵀ)
    O = r ∘ Q·Sᵀ + P·U
    S ← d · S + (w ∘ U)ᵀ·K

where T = (I + A)⁻¹·diag(β) solves for the updates U (the UT transform), P has the products of
queries and keys with the decays between them, and c, r and w [64] contain decays and norms of keys
and queries. So the factors K, Q and V are the convolution's result without another rounding.

Mamba2's rule has U = V: its β is part of P and w, and neither T nor c is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.device import has_large_shared_memory
from batchgen.kernels.linear_attention.chunks_triton import row_of_chunk, tokens_of_chunk
from batchgen.kernels.linear_attention.delta_inputs import NORM_EPS, DeltaInputs
from batchgen.kernels.linear_attention.gates_triton import log_decay_of, strength_of, time_step_of
from batchgen.kernels.linear_attention.state_rows import CHUNK, PrefillRows


class PrefillTiles(NamedTuple):
    """Tile sizes and compiler options of the two launches."""

    block_v: int  # value channels of a program of the scan
    scan_warps: int
    scan_stages: int  # chunks that it loads ahead
    chunk_warps: int
    chunk_registers: int | None = None  # the most of a thread; None lets the compiler choose


_FEW = PrefillTiles(block_v=32, scan_warps=4, scan_stages=3, chunk_warps=4, chunk_registers=168)
_MANY = _FEW._replace(block_v=64)
"""The fastest tiles on an H200 (heads of 128 channels): `_FEW` if the programs do not fill the GPU,
`_MANY` if they do. Both give the same bits; they need 174 and 190 KB of shared memory. With one
stage and 16-bit factors Triton 3.6 generates wrong code for Hopper."""
_FLOAT32 = PrefillTiles(block_v=16, scan_warps=4, scan_stages=1, chunk_warps=8)
"""For 4-byte factors, of which fewer fit into shared memory."""
_WIDE = _FEW._replace(scan_stages=2)
"""For keys of more than 128 channels; 256 channels need 164 KB."""
_MANY_PROGRAMS = 96
"""Programs of 64 channels that keep most of a GPU's multiprocessors busy."""


def choose_tiles(
    programs: int, key_dim: int, dtype: torch.dtype, device: torch.device
) -> PrefillTiles:
    """Choose the tiles of a prefill by the number of programs of 64 value channels, the size of a
    key head, and the dtype of the products' factors."""
    if dtype == torch.float32:
        return _FLOAT32
    if device.type == "cuda" and not has_large_shared_memory(device):
        return _FEW._replace(scan_stages=2)  # 120 KB
    if key_dim > 128:
        return _WIDE
    return _MANY if programs >= _MANY_PROGRAMS else _FEW


def delta_prefill_triton(
    inputs: DeltaInputs, state: Tensor, rows: PrefillRows, tiles: PrefillTiles | None = None
) -> Tensor:
    """Compute `delta_prefill` in two launches.

    Factors of 16 bits are multiplied directly. float32 factors are split into three parts each,
    whose products have nearly the accuracy of float32.
    """
    _, value_heads, value_dim, key_dim = state.shape
    tokens, width = inputs.qkv.shape
    key_heads = (width - value_heads * value_dim) // (2 * key_dim)
    assert state[0].is_contiguous() and rows.starts.is_contiguous()
    assert all(x is None or x.stride(-1) == 1 for x in inputs)
    dtype, device, batch = inputs.qkv.dtype, state.device, len(rows.slots)
    out = rows.empty((tokens, value_heads, value_dim), dtype)
    if not batch or not tokens:
        return out
    wide, erases = dtype == torch.float32, inputs.b is not None
    if tiles is None:
        programs = batch * value_heads * triton.cdiv(value_dim, 64)
        tiles = choose_tiles(programs, key_dim, dtype, device)
    chunks, block_k = rows.most_chunks(), max(16, triton.next_power_of_2(key_dim))
    block_v = min(tiles.block_v, max(16, triton.next_power_of_2(value_dim)))
    # P, and T before it.
    size = (chunks, value_heads, 2 if erases else 1, CHUNK, CHUNK)
    matrices = torch.empty(size, dtype=dtype, device=device)
    # c, r, w, and d repeated for all tokens.
    vectors = torch.empty((chunks, value_heads, 4, CHUNK), dtype=torch.float32, device=device)
    shape = {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim, "BLOCK_K": block_k, "CHUNK": CHUNK,
        "PRECISION": "tf32x3" if wide else None, "INTERPRETED": not inputs.qkv.is_cuda,
        "MATRICES": 2 if erases else 1,
    }  # fmt: skip
    _delta_chunks[(chunks, value_heads)](
        *inputs[:-1],  # all but `skip`
        matrices, vectors, rows.positions, rows.starts, inputs.qkv.stride(0),
        inputs.a.stride(0), 0 if inputs.b is None else inputs.b.stride(0), batch, NORM_EPS,
        key_dim**-0.5, num_warps=tiles.chunk_warps, maxnreg=tiles.chunk_registers, **shape,
    )  # fmt: skip
    snapshots = rows.slots if rows.snapshots is None else rows.snapshots
    blocks = triton.cdiv(value_dim, block_v)
    _delta_scan[(batch * value_heads * blocks,)](
        inputs.qkv, inputs.skip, matrices, vectors, out, state, rows.slots, rows.positions,
        rows.starts, snapshots, inputs.qkv.stride(0), state.stride(0),
        SNAPSHOTS=0 if rows.snapshots is None else rows.snapshots.shape[1], BLOCK_V=block_v,
        BLOCKS=blocks, STAGES=tiles.scan_stages,
        num_warps=tiles.scan_warps, **shape,
    )  # fmt: skip
    return out


@triton.jit
def _product(a, b, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """a·b in float32."""
    if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_chunks(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, matrices_ptr, vectors_ptr, positions_ptr,
    starts_ptr, qkv_stride, a_stride, b_stride, num_rows, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """Each program computes T, P and the vectors c, r, w of one chunk and value head."""
    index, head = tl.program_id(0), tl.program_id(1)
    row, chunk = row_of_chunk(starts_ptr, index, num_rows, CHUNK)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first, count = tokens_of_chunk(positions_ptr, start, end, chunk, CHUNK)
    if count <= 0:
        return
    token_index, channel = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :]
    inside = token_index < count
    token = first.to(tl.int64) + token_index
    tile = token[:, None] * qkv_stride + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel
    in_tile = inside[:, None] & (channel < KEY_DIM)
    query = tl.load(qkv_ptr + tile, mask=in_tile, other=0.0)
    key = tl.load(qkv_ptr + KEY_HEADS * KEY_DIM + tile, mask=in_tile, other=0.0)
    if b_ptr is not None:
        wide_query, wide_key = query.to(tl.float32), key.to(tl.float32)
        query_norm = tl.rsqrt(tl.sum(wide_query * wide_query, axis=1) + eps) * scale
        key_norm = tl.rsqrt(tl.sum(wide_key * wide_key, axis=1) + eps)

    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0)
    if b_ptr is not None:
        b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0)
    # Tokens past the last one change nothing.
    log_decay = tl.where(inside, log_decay_of(a, a_log, dt_bias), 0.0)
    if b_ptr is not None:
        strength = tl.where(inside, strength_of(b), 0.0)
    else:
        query_norm = tl.full([CHUNK], 1.0, tl.float32)
        key_norm = tl.where(inside, time_step_of(a, dt_bias), 0.0)
    # Differences of sums in float32 would lose the small decays that follow a large one.
    total = tl.cumsum(log_decay.to(tl.float64), axis=0)
    whole = tl.sum(tl.where(token_index == CHUNK - 1, total, 0.0))

    i, j = token_index[:, None], token_index[None, :]
    since = tl.where(i >= j, (total[:, None] - total[None, :]).to(tl.float32), float("-inf"))
    decays = tl.exp(since) * key_norm[None, :]
    keys_across = tl.trans(key)
    scores = _product(query, keys_across, PRECISION, INTERPRETED) * query_norm[:, None] * decays
    # The layout of `matrices` and `vectors`: T (if there is one), P; c, r, w, d.
    item = index.to(tl.int64) * VALUE_HEADS + head
    matrix = matrices_ptr + item * (MATRICES * CHUNK * CHUNK) + i * CHUNK + j
    dtype = matrices_ptr.dtype.element_ty
    tl.store(matrix + (MATRICES - 1) * (CHUNK * CHUNK), scores.to(dtype))
    vector = vectors_ptr + item * (4 * CHUNK) + token_index
    since_start = tl.exp(total.to(tl.float32))
    tl.store(vector, since_start * key_norm)
    tl.store(vector + CHUNK, since_start * query_norm)
    tl.store(vector + 2 * CHUNK, tl.exp((whole - total).to(tl.float32)) * key_norm)
    tl.store(vector + 3 * CHUNK, tl.exp((whole + total * 0.0).to(tl.float32)))
    if b_ptr is not None:
        system = _product(key, keys_across, PRECISION, INTERPRETED)
        system = tl.where(i > j, system * (strength * key_norm)[:, None] * decays, 0.0)
        inverse = _inverse_of_one_plus(system, i, j, PRECISION, INTERPRETED)
        tl.store(matrix, (inverse * strength[None, :]).to(dtype))


@triton.jit
def _inverse_of_one_plus(system, i, j, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return (I + A)⁻¹ for a matrix A [64, 64] that is zero on and above its diagonal.

    Diagonal blocks of 2, 4, … rows are inverted in turn: [[L, 0], [E, M]]⁻¹ is [[L⁻¹, 0],
    [−M⁻¹·E·L⁻¹, M⁻¹]]. No element exceeds 1, since each is a product of normalised keys from which
    other keys were removed. So float16, as precise as tf32, is enough for factors unless the model
    is in float32.
    """
    factor: tl.constexpr = tl.float16 if PRECISION is None else tl.float32
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, system, 0.0)
    for step in tl.static_range(1, 6):
        corner = (i >> (step + 1) == j >> (step + 1)) & (i >> step != j >> step)
        edge, around = tl.where(corner, system, 0.0).to(factor), inverse.to(factor)
        below = _product(edge, around, PRECISION, INTERPRETED)
        inverse -= _product(around, below.to(factor), PRECISION, INTERPRETED)
    return inverse


@triton.jit
def _delta_scan(
    qkv_ptr, skip_ptr, matrices_ptr, vectors_ptr, out_ptr, state_ptr, slots_ptr, positions_ptr,
    starts_ptr, snapshots_ptr, qkv_stride, state_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SNAPSHOTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, MATRICES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V value channels of one head through the chunks of one row."""
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    row = tl.program_id(0) // (BLOCKS * VALUE_HEADS)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if start >= end:
        return
    index, channel = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = channel < KEY_DIM, value < VALUE_DIM
    dtype = qkv_ptr.dtype.element_ty
    query_column = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel
    key_column = KEY_HEADS * KEY_DIM + query_column
    value_column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value

    # The state is transposed: [BLOCK_K, BLOCK_V].
    position, slot = tl.load(positions_ptr + start).to(tl.int32), tl.load(slots_ptr + row)
    tile = head * (VALUE_DIM * KEY_DIM) + value[None, :] * KEY_DIM + channel[:, None]
    in_tile = is_key[:, None] & is_value[None, :]
    target = state_ptr + slot * state_stride + tile
    kept = channel < tl.where(position == 0, 0, KEY_DIM)
    state = tl.load(target, mask=kept[:, None] & is_value[None, :], other=0.0)

    missing = position % CHUNK
    item = (start // CHUNK + 2 * row).to(tl.int64) * VALUE_HEADS + head
    chunks = (missing + end - start + CHUNK - 1) // CHUNK
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        first = tl.maximum(start + chunk * CHUNK - missing, start)
        last = tl.minimum(start + (chunk + 1) * CHUNK - missing, end)
        inside = index < last - first
        token = first.to(tl.int64) + index
        source = qkv_ptr + token[:, None] * qkv_stride
        in_keys = inside[:, None] & is_key[None, :]
        in_values = inside[:, None] & is_value[None, :]
        query = tl.load(source + query_column[None, :], mask=in_keys, other=0.0)
        key = tl.load(source + key_column[None, :], mask=in_keys, other=0.0)
        v = tl.load(source + value_column[None, :], mask=in_values, other=0.0)
        matrix = matrices_ptr + (item + chunk * VALUE_HEADS) * (MATRICES * CHUNK * CHUNK)
        matrix += index[:, None] * CHUNK + index[None, :]
        if MATRICES == 2:
            solve = tl.load(matrix)
        scores = tl.load(matrix + (MATRICES - 1) * (CHUNK * CHUNK))
        vector = vectors_ptr + (item + chunk * VALUE_HEADS) * (4 * CHUNK)
        if MATRICES == 2:
            from_state = tl.load(vector + index)
        to_query = tl.load(vector + CHUNK + index)
        to_state, decay = tl.load(vector + 2 * CHUNK + index), tl.load(vector + 3 * CHUNK)

        factor, update = state.to(dtype), v.to(tl.float32)
        if MATRICES == 2:
            known = _product(key, factor, PRECISION, INTERPRETED) * from_state[:, None]
            update = _product(solve, (update - known).to(dtype), PRECISION, INTERPRETED)
        out = _product(query, factor, PRECISION, INTERPRETED) * to_query[:, None]
        out += _product(scores, update.to(dtype), PRECISION, INTERPRETED)
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head) * v.to(tl.float32)
        written = out_ptr + token[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM
        tl.store(written + value[None, :], out.to(dtype), mask=in_values)
        change = (update * to_state[:, None]).to(dtype)
        state = state * decay + _product(tl.trans(key), change, PRECISION, INTERPRETED)
        for n in tl.static_range(SNAPSHOTS):
            entry = snapshots_ptr + (row * SNAPSHOTS + n) * 2
            if tl.load(entry) == last - start:
                copy = state_ptr + tl.load(entry + 1) * state_stride + tile
                tl.store(copy, state, mask=in_tile)
    tl.store(target, state, mask=in_tile)
