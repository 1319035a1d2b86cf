"""What the routers of transformers' models choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.engine.dllm_reference import block_causal


def ids_of(result: tuple[Tensor, ...]) -> Tensor:
    """The experts in what a router of transformers returns, in whatever order its version has."""
    (ids,) = (part for part in result if not part.is_floating_point())
    return ids


def router_ids(model: PreTrainedModel, ids: Sequence[int], block_length: int = 1) -> Tensor:
    """[T, layers with experts, k], the experts of each token, those with the largest weight first.

    Attention is causal over blocks of this length and full inside.
    """
    seen = block_causal(len(ids), block_length)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        out = model.model(
            torch.tensor([list(ids)]), attention_mask=mask[None, None], output_router_logits=True
        )
    return torch.stack(
        [logits.topk(model.config.num_experts_per_tok).indices for logits in out.router_logits], 1
    )
