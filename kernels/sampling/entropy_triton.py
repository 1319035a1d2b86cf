"""The entropy of the distribution that a token is drawn from, in Triton, in two passes over the
logits. `sampling.entropy_of` and the engine's sampler call it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.sampling_triton import CHUNK, ROW_ARGUMENTS, load_logits


def entropy_of_triton(
    logits: Tensor,  # [R, V]; the last axis is contiguous
    temperature: Tensor,  # [R] float32
    threshold: Tensor | None,  # [R] float32 in the scale of `logits`, or -inf
) -> Tensor:
    """Compute what `sampling.entropy_of` does, [R] float32 in nats; the arguments are those of
    `sampling_triton.draw_triton`."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        # A pointer must be given even where the kernel does not read it.
        limits = temperature if threshold is None else threshold
        _entropy[(rows,)](
            logits, temperature, limits, out, logits.stride(0), vocab,
            FILTERED=threshold is not None, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=[*ROW_ARGUMENTS, "out_ptr"])
def _entropy(
    logits_ptr, temperature_ptr, threshold_ptr, out_ptr, stride, vocab,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program computes the entropy of one row: log Σw - Σ w log w / Σw, with w = exp((logit -
    top) / temperature), over the tokens from the threshold on."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    index = tl.arange(0, CHUNK)
    top = -float("inf")
    for start in range(0, vocab, CHUNK):
        top = tl.maximum(top, tl.max(load_logits(logits_ptr, start + index, vocab), axis=0))
    limit = -float("inf")
    if FILTERED:
        limit = tl.load(threshold_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab, CHUNK):
        logits = load_logits(logits_ptr, start + index, vocab)
        kept = (logits >= limit) & (logits > -float("inf"))
        scaled = tl.where(kept, (logits - top) / temperature, 0.0)
        weights = tl.where(kept, tl.exp(scaled), 0.0)
        total += tl.sum(weights, axis=0)
        weighted += tl.sum(weights * scaled, axis=0)
    tl.store(out_ptr + row, tl.maximum(tl.log(total) - weighted / total, 0.0))
