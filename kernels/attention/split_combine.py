"""Combines the results of splits in decode attention, in Triton.

A long context is cut into *splits*, which programs compute in parallel (`decode.py`). For each
query, a split yields a partial result and the logarithm of the sum of its softmax weights.
`combine_splits` then averages a query's partial results, weighted by these sums. The module also
has small Triton functions that several attention kernels share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.decode_plan import DecodePlan
from batchgen.kernels.rules import MOST_SPLITS

WEIGHT_FACTOR = tl.constexpr(256.0)
"""A factor for the softmax weights of FP8 values. Weights are multiplied by the values' scales,
which are about 1/448, so without the factor they could be too small for float16. Sums are divided
by it again."""
_COMBINE_ELEMENTS = 4096
"""Elements of partial results that the kernel loads at a time."""


def partial_results(
    plan: DecodePlan, groups: int, queries: int, size: int
) -> tuple[Tensor, Tensor]:
    """Allocate the partial results of splits [P, queries, size] and the base-2 logarithms of their
    sums of weights [P, queries], float32. P is the number of splits times groups, or 0 if no row
    can have several splits.

    A row's heads are divided into `groups` groups. One program computes a split for one group: for
    `queries` pairs of a query and a head, whose results have `size` elements.
    """
    count = len(plan.units) * groups if plan.max_splits > 1 else 0
    device = plan.units.device
    partial = torch.empty((count, queries, size), dtype=torch.float32, device=device)
    return partial, torch.empty((count, queries), dtype=torch.float32, device=device)


def combine_splits(
    partial: Tensor,
    log_sums: Tensor,
    plan: DecodePlan,
    out: Tensor,
    groups: int,
    sinks: Tensor | None = None,
) -> None:
    """Combine the splits of rows that have several, and write the results to `out` [B · W,
    num_heads, size]. Rows with one split are not changed, because the decode kernel wrote them.

    `partial` and `log_sums` are from `partial_results`, filled by the decode kernel. `groups` is
    the number of groups of consecutive heads, and `sinks` are those of `SoftmaxOptions`.
    """
    tokens, num_heads, size = out.shape
    if not len(partial):
        return
    assert plan.max_splits <= MOST_SPLITS
    group = num_heads // groups
    group_pad = triton.next_power_of_2(group)
    dim_pad = max(16, triton.next_power_of_2(size))
    _combine_kernel[(tokens, groups)](
        partial, log_sums, plan.splits, out, sinks, plan.max_splits,
        KV_HEADS=groups, GROUP=group, WIDTH=plan.width, HEAD_DIM=size,
        GROUP_PAD=group_pad, DIM_PAD=dim_pad,
        SPLITS_PAD=MOST_SPLITS,
        CHUNK=max(1, _COMBINE_ELEMENTS // (group_pad * dim_pad)), num_warps=4,
    )  # fmt: skip


@triton.jit
def capped_score(score, CAP: tl.constexpr):
    """Return cap · tanh(score / cap) with cap = CAP · log₂ e, for scores multiplied by log₂ e."""
    cap: tl.constexpr = CAP * 1.4426950408889634
    # tanh(x) = 1 - 2 / (1 + exp(2x)), whose exponential may overflow to infinity, or vanish.
    return cap - 2 * cap / (1 + tl.exp(score * (2 / cap)))


@triton.jit
def sink_share(sinks, heads, mask, log_sum):
    """Return the share of a softmax that remains for the tokens if there is an attention sink:
    sigmoid(log_sum - sink), with `log_sum` the base-2 logarithm of the tokens' sum of weights."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * LOG2_E
    return 1.0 / (1.0 + tl.exp2(sink - log_sum))


@triton.jit(do_not_specialize=["capacity"])
def _combine_kernel(
    partial, log_sums, splits, out, sinks, capacity,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program combines the splits of one token for one group of heads; it does nothing if the
    token's row has one split.

    It loads the splits' logarithms of sums for their maximum `top` and their total, and then adds
    the partial results, CHUNK splits at a time in ascending order, weighted by 2^(log_sum - top).
    Padding has the logarithm -inf, so its weight is 0.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token // WIDTH
    number = tl.load(splits + row)
    if number > 1:
        member = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, DIM_PAD)
        member_offset = (token % WIDTH) * GROUP + member
        split_queries = KV_HEADS * WIDTH * GROUP
        base = row * capacity * split_queries + head * (WIDTH * GROUP)
        split = tl.arange(0, SPLITS_PAD)
        offsets = base + split[:, None] * split_queries + member_offset[None, :]
        mask = (split < number)[:, None] & (member < GROUP)[None, :]
        all_sums = tl.load(log_sums + offsets, mask=mask, other=-float("inf"))
        top = tl.max(all_sums, 0)
        # 0 avoids -inf - -inf for padding, which has no split, and for sums that are all NaN.
        top = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp2(all_sums - top[None, :]), 0)
        real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(0, number, CHUNK):
            chunk = first + tl.arange(0, CHUNK)
            offset = base + chunk[:, None] * split_queries + member_offset[None, :]
            inside = (chunk < number)[:, None] & (member < GROUP)[None, :]
            log_sum = tl.load(log_sums + offset, mask=inside, other=-float("inf"))
            weight = tl.exp2(log_sum - top[None, :])
            result = tl.load(
                partial + offset[:, :, None] * HEAD_DIM + dim[None, None, :],
                mask=inside[:, :, None] & (dim < HEAD_DIM)[None, None, :],
                other=0.0,
            )
            sums += tl.sum(weight[:, :, None] * result, 0)
        sums = sums / tl.where(member < GROUP, total, 1.0)[:, None]
        if sinks is not None:
            log_sum = top + tl.log2(tl.where(member < GROUP, total, 1.0))
            sums *= sink_share(sinks, head * GROUP + member, member < GROUP, log_sum)[:, None]
        target = (token * KV_HEADS + head) * GROUP + member
        values = sums.to(out.dtype.element_ty)
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], values, mask=real)


@triton.jit
def byte_of_words(words, INDEX: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return byte INDEX (0 is the lowest) of each of `words`, int32 with four FP8 values each,
    converted to `dtype`, or to float32 for Triton's interpreter."""
    values = ((words >> (8 * INDEX)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return values.to(tl.float32 if INTERPRETED else dtype)


@triton.jit
def float16_excess(largest):
    """Return by what queries with the largest magnitudes `largest` are divided before they become
    float16: 1, or what brings the magnitude down to 32768. (float16 ends at 65504.)"""
    return tl.maximum(largest / 32768.0, 1.0)


@triton.jit
def convert_fp8(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert FP8 values to `dtype`, float16 or float32, before a product's layout conversion.

    The conversion to float16 is assembly marked as having side effects, because Triton moves no
    layout conversion past such an operation.
    """
    if INTERPRETED or dtype == tl.float32:
        converted = values.to(dtype)
    else:
        converted = tl.inline_asm_elementwise(
            "{.reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}",
            "=r,=r,r", [values], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return converted


@triton.jit
def accumulate_dot(a, b, acc, INTERPRETED: tl.constexpr):
    """Return acc + a·b, in float32 for the interpreter, which multiplies bfloat16 as integers."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
