"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.moe.routing_triton import route_triton


def route(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the k most probable experts of each token.

    The probabilities are a softmax over all experts, computed in float32 (Shazeer et al. 2017, in
    the order of Qwen's models: first the softmax, then the choice). Of equally probable experts
    the one with the lower id comes first.

    Args:
        logits: [T, E], the router's result for each token.
        k: the number of experts of a token, at most E.
        renormalise: whether the k weights are divided by their sum.

    Returns:
        ids: [T, k] int32, the experts of each token, the most probable first.
        weights: [T, k] float32, their probabilities. A row of logits that is not finite has ids
            in [0, E) all the same; its weights are NaN, and no other row's are.
    """
    if logits.is_cuda:
        return route_triton(logits, k, renormalise=renormalise)
    return route_reference(logits, k, renormalise=renormalise)


def route_reference(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """`route` in PyTorch."""
    probabilities = logits.float().softmax(-1)
    count = probabilities.shape[1]
    # Equal probabilities are told apart by the id, as torch.topk may order them in any way. The
    # bits of a float that is not negative have its order; those of NaN are above or below all.
    order = probabilities.view(torch.int32).long() * count
    order += torch.arange(count - 1, -1, -1, device=logits.device)
    ids = count - 1 - order.topk(k).values % count
    weights = probabilities.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights
