"""Finds the thresholds of top-k, top-p and min-p without a sort, in Triton: the lowest logit of a
row that the filters keep. `candidates_triton` describes the method."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.candidates_triton import (
    LOWEST,
    TILES,
    ZERO_BITS,
    CandidateTiles,
    bound_of,
    image_of,
    list_groups,
    load_members,
    row_totals,
    search_members,
    summarise_chunk,
    value_of,
)
from batchgen.kernels.sampling.sampling_triton import ROW_ARGUMENTS, processed_logit


def thresholds(
    logits: Tensor,  # [R, V] before the temperature; V < 2²⁴
    temperature: Tensor,  # [R] float32
    top_k: Tensor,  # [R] int64; 0: no filter
    top_p: Tensor,  # [R] float32; 1: no filter
    min_p: Tensor,  # [R] float32; 0: no filter
    *,
    tiles: CandidateTiles = TILES,
) -> Tensor:
    """Return the lowest logit of each row, [R] float32, that top-k, top-p and min-p keep; -inf for
    rows without a filter.

    The filters are those of `sampling.filter_top_k_top_p_min_p` after `apply_temperature`. Tokens
    equal to the last kept one are kept too, even if they are equal only after the division by the
    temperature. The result has the scale of `logits`.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and vocab < 2**24
    groups = triton.cdiv(vocab, tiles.group)
    # The maximum and the weight of each group.
    summary = torch.empty((2, rows, groups), dtype=torch.float32, device=logits.device)
    listed = torch.empty((rows, groups), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    arguments = (
        logits, temperature, top_k, top_p, min_p, summary[0], summary[1], logits.stride(0), vocab,
        groups,
    )  # fmt: skip
    _summarise[(rows, triton.cdiv(vocab, tiles.chunk))](
        *arguments, GROUP=tiles.group, CHUNK=tiles.chunk, num_warps=8
    )
    _thresholds[(rows,)](
        *arguments, listed, out,
        BITS=ZERO_BITS[logits.dtype], GROUP=tiles.group, BLOCK=tiles.block, num_warps=16,
    )  # fmt: skip
    return out


@triton.jit
def _load_options(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab):
    """Return a row's top-k, whether that excludes any token, its top-p and its min-p."""
    top_k = tl.load(top_k_ptr + row)
    return top_k, (top_k > 0) & (top_k < vocab), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)


@triton.jit(do_not_specialize_on_alignment=[*ROW_ARGUMENTS, "weights_ptr"])
def _summarise(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, weights_ptr,
    stride, vocab, groups, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program summarises one chunk of one row; it does nothing if the row has no filter."""
    row = tl.program_id(0).to(tl.int64)
    _, limited, top_p, min_p = _load_options(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab)
    if limited | (top_p < 1) | (min_p > 0):
        summarise_chunk(
            logits_ptr + row * stride, maxima_ptr + row * groups, weights_ptr + row * groups,
            tl.program_id(1), vocab, -float("inf"), tl.load(temperature_ptr + row), GROUP, CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=[*ROW_ARGUMENTS, "weights_ptr"])
def _thresholds(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, weights_ptr,
    stride, vocab, groups, listed_ptr, out_ptr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program finds the threshold of one row: it lists the groups that may have tokens at the
    threshold, and searches their members for top-k, and from there on for top-p."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    maxima_ptr += row * groups
    weights_ptr += row * groups
    listed_ptr += row * groups
    temperature = tl.load(temperature_ptr + row)
    top_k, limited, top_p, min_p = _load_options(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab)
    nucleus = top_p < 1
    limit = -float("inf")
    if limited | nucleus | (min_p > 0):
        k = top_k.to(tl.float32)
        top, total = row_totals(maxima_ptr, weights_ptr, groups, temperature, BLOCK)
        min_p_logit = tl.where(min_p > 0, tl.log(min_p), -float("inf"))
        min_p_logit += processed_logit(top, top, temperature)
        # Groups whose maximum has a processed logit below `cut` are not searched: the filters keep
        # none of their tokens.
        cut = min_p_logit
        bound = -float("inf")
        if limited:
            bound = bound_of(
                maxima_ptr, weights_ptr, groups, k, total, top, temperature,
                MASS=False, BLOCK=BLOCK,
            )  # fmt: skip
            cut = processed_logit(bound, top, temperature)
        elif nucleus:
            # A guess, checked below: the groups that are not listed hold a quarter of the mass that
            # top-p may exclude. Usually the listed groups' other tokens leave enough room.
            share = 1 - (1 - top_p) * 0.25
            bound = bound_of(
                maxima_ptr, weights_ptr, groups, share, total, top, temperature,
                MASS=True, BLOCK=BLOCK,
            )  # fmt: skip
            cut = processed_logit(bound, top, temperature)
        base = image_of(bound, BITS).to(tl.int64)
        lowest = -float("inf")
        members = 0
        searching = True
        while searching:
            members = list_groups(
                maxima_ptr, listed_ptr, groups, cut, 0.0, 0.0, top, temperature, GROUP, BLOCK
            )
            image = base
            if limited:
                image = search_members(
                    logits_ptr, listed_ptr, members, vocab, image, k, total, top, temperature,
                    MASS=False, BITS=BITS, GROUP=GROUP, BLOCK=BLOCK,
                )  # fmt: skip
            if nucleus:
                image = search_members(
                    logits_ptr, listed_ptr, members, vocab, image, top_p,
                    tl.where(limited, 0.0, total), top, temperature,
                    MASS=True, BITS=BITS, GROUP=GROUP, BLOCK=BLOCK,
                )  # fmt: skip
            lowest = processed_logit(value_of(image, BITS), top, temperature)
            searching = nucleus & (lowest < cut)
            cut = -float("inf")  # if the guess was too high, every group is searched
            base = tl.cast(LOWEST >> BITS, tl.int64)
        limit = tl.maximum(lowest, min_p_logit)
        if temperature != 1:
            limit = _lowest_from(
                logits_ptr, listed_ptr, members, vocab, limit, top, temperature, GROUP, BLOCK
            )
    tl.store(out_ptr + row, limit)


@triton.jit
def _lowest_from(
    ptr, listed_ptr, members, vocab, limit, top, temperature,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the lowest logit of the listed groups whose processed logit is at least `limit`."""
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, members, BLOCK):
        _, values = load_members(ptr, listed_ptr, start, members, vocab, GROUP, BLOCK)
        kept = processed_logit(values, top, temperature) >= limit
        lowest = tl.minimum(lowest, tl.where(kept, values, float("inf")))
    return tl.min(lowest, axis=0)
