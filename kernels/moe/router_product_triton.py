"""The float32 product of bfloat16 tokens with a router's float32 weight, on tensor cores.

A float32 weight is the sum of three bfloat16 values, one for each 8 bits of its significand. Their
products with a token's bfloat16 values are exact in float32. So three products in bfloat16, summed
in float32, are a product in float32 without the rounding of TF32, at many times the rate of one
that does without tensor cores.

A router has few experts, so there are few tiles of its result, and the sums over H are cut between
programs. The programs write parts of the logits, which the routing adds up in order. How sums are
cut depends on E and H alone, so a token's logits here do not depend on its batch mates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 64
"""Tokens of a tile."""
_EXPERTS = 64
"""Experts of a tile: the fewest rows that the matrix instruction of Hopper has on its left."""
_STEP = 64
"""Terms that tensor cores add up. They cut off what a sum has below its last bits, where float32
rounds, so longer sums are float32's own."""
_PARTS = 16
"""The parts of the logits of so many experts as a tile has; so 512 tokens make 128 programs. More
experts have fewer parts, but `_LEAST_PARTS`."""
_LEAST_PARTS = 4


def router_product_triton(x: Tensor, weight: Tensor) -> Tensor:
    """`router_product.router_product` in one launch.

    Args:
        x: [T, H] bfloat16, T at least 1, the last axis contiguous.
        weight: [E, H] float32, contiguous.

    Returns:
        Parts [P, T, E] float32 of the logits. Where a value of x is not finite, a token's logits
        are not either.
    """
    (tokens, depth), experts = x.shape, len(weight)
    assert x.dtype == torch.bfloat16 and weight.dtype == torch.float32
    assert weight.shape[1] == depth and x.stride(1) == 1 and weight.is_contiguous()
    steps, tiles = triton.cdiv(depth, _STEP), triton.cdiv(experts, _EXPERTS)
    steps_of_part = triton.cdiv(steps, max(_LEAST_PARTS, _PARTS // tiles))
    parts = triton.cdiv(steps, steps_of_part)
    out = torch.empty((parts, tokens, experts), dtype=torch.float32, device=x.device)
    _router_product[(triton.cdiv(tokens, _TOKENS), tiles, parts)](
        x, weight, out, x.stride(0), tokens, experts, depth, STEPS=steps_of_part,
        BLOCK_T=_TOKENS, BLOCK_E=_EXPERTS, BLOCK_H=_STEP, INTERPRETED=not x.is_cuda,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _router_product(
    x_ptr, weight_ptr, out_ptr, stride, tokens, experts, depth, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program adds up STEPS · BLOCK_H terms of a tile of logits."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    # The experts are the rows of the tile: the matrix instruction takes what was computed from the
    # weight on its left, without a way through shared memory.
    total = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for step in range(STEPS):
        term = (part * STEPS + step) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = term < depth
        x = tl.load(
            x_ptr + token[None, :] * stride + term[:, None],
            mask=(token < tokens)[None, :] & inside[:, None],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + expert[:, None] * depth + term[None, :],
            mask=(expert < experts)[:, None] & inside[None, :],
            other=0.0,
        )
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        if INTERPRETED:
            # The interpreter multiplies the bits of bfloat16 as integers; these products are the
            # same.
            x, high = x.to(tl.float32), high.to(tl.float32)
            middle, low = middle.to(tl.float32), low.to(tl.float32)
        sums = tl.dot(low, x, input_precision="ieee")
        sums = tl.dot(middle, x, sums, input_precision="ieee")
        sums = tl.dot(high, x, sums, input_precision="ieee")
        total += sums
    place = (part * tokens + token)[None, :] * experts + expert[:, None]
    tl.store(out_ptr + place, total, mask=(token < tokens)[None, :] & (expert < experts)[:, None])
