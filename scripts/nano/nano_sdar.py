"""nano_sdar: learns by block diffusion (BD3-LM, Arriola et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from nano_learning import Batch, Recipe
from nano_sums import make_batch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM


class SDAR:
    """The model, trained by block diffusion. A noised and a clean copy of every sequence go through
    one forward. A noised block attends to itself and to the clean blocks before it, as in
    decoding."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._block, self._mask_id = config["block_size"], config["mask_token_id"]
        self.module: Any = Qwen3ForCausalLM(
            Qwen3Config(**config | {"dtype": "float32", "model_type": "qwen3"})
        )

    def loss(self, batch: Batch) -> Tensor:
        """Estimate the bound on the negative log-likelihood, in nats per token of the answers.

        The padding is predicted too, so that the model fills a block with <|im_end|> after the end.
        It does not count as tokens.
        """
        noised, weight = add_noise(batch, self._block, self._mask_id)
        length, device = batch.ids.shape[1], batch.ids.device
        out = self.module(
            torch.cat([noised, batch.ids], dim=1),
            position_ids=torch.arange(length, device=device).repeat(2)[None],
            attention_mask=training_mask(length, self._block, device)[None, None],
            use_cache=False,
        )
        logits = out.logits[:, :length].float().flatten(0, 1)
        losses = F.cross_entropy(logits, batch.ids.flatten(), reduction="none")
        return (losses * weight.flatten()).sum() / (batch.lens - batch.prompt_lens).sum()


def training_mask(length: int, block_size: int, device: torch.device) -> Tensor:
    """Return the attention mask [2N, 2N] bool for the noised copy followed by the clean copy.

    A noised block attends to itself and to the clean blocks before it. The clean copy attends to
    itself, causally over blocks, and never to the noised copy.
    """
    block = torch.arange(length, device=device) // block_size
    itself = block[:, None] == block[None, :]
    earlier = block[:, None] > block[None, :]
    noised = torch.cat([itself, earlier], dim=1)
    return torch.cat([noised, torch.cat([torch.zeros_like(itself), earlier | itself], dim=1)])


def add_noise(batch: Batch, block_size: int, mask_id: int) -> tuple[Tensor, Tensor]:
    """Mask positions of the answers at random; returns the noised ids and the weights of the
    positions' losses, [B, N] each.

    Of the m positions of a block that are not prompt, k are masked, with k uniform in 1 to m. Each
    masked position weighs m / k, and the others weigh 0. The weighted loss has the expectation of
    the bound on the negative log-likelihood, in which the mask rate t is uniform in (0, 1) and the
    weight is 1 / t. Its variance is smaller, as no small t gets a large weight.
    """
    rows, length = batch.ids.shape
    device, shape = batch.ids.device, (rows, length // block_size, block_size)
    positions = torch.arange(length, device=device)
    free = (positions >= batch.prompt_lens[:, None]).view(shape)
    count = free.sum(-1, keepdim=True)
    masked_count = (torch.rand((*shape[:2], 1), device=device) * count).long() + 1
    order = torch.rand(shape, device=device).masked_fill(~free, 2.0)
    masked = ((order.argsort(-1).argsort(-1) < masked_count) & free).view(rows, length)
    weight = (count / masked_count).expand(shape).reshape(rows, length) * masked
    return batch.ids.masked_fill(masked, mask_id), weight


RECIPE = Recipe(SDAR, make_batch, steps=5700, batch_size=256, lr=1e-3)
