"""The block-diffusion objective (BD3-LM, Arriola et al. 2025), and a plain decoder to measure with.

A block here is a block of positions that are decoded together. Training runs a noised and a clean
copy of every sequence through one forward. A noised block sees itself and the clean blocks before
it, which is also what it sees when it is decoded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nano_batch import Batch, Decoded, collect
from nano_sdar import NanoSDAR
from nano_tokenizer import IM_END_ID, MASK_ID
from torch import Tensor


def block_causal_mask(length: int, block_size: int, device: torch.device) -> Tensor:
    """Make the mask [length, length] bool of attention that is causal over blocks, full inside."""
    block = torch.arange(length, device=device) // block_size
    return block[:, None] >= block[None, :]


def training_mask(length: int, block_size: int, device: torch.device) -> Tensor:
    """Make the mask [2 · length, 2 · length] bool for the noised copy followed by the clean one.

    A noised block sees itself and the clean blocks before it. The clean copy sees itself, causal
    over blocks, and nothing of the noised copy.
    """
    block = torch.arange(length, device=device) // block_size
    itself = block[:, None] == block[None, :]
    earlier = block[:, None] > block[None, :]
    noised = torch.cat([itself, earlier], dim=1)
    clean = torch.cat([torch.zeros_like(itself), earlier | itself], dim=1)
    return torch.cat([noised, clean])


def denoise(model: NanoSDAR, noised: Tensor, clean: Tensor) -> Tensor:
    """Compute the hidden states [B, N, hidden_size] of the noised copy.

    `noised` and `clean` are the token ids of both copies, [B, N] int64 each.
    """
    length, device = noised.shape[1], noised.device
    positions = torch.arange(length, device=device).repeat(2)
    mask = training_mask(length, model.config.block_size, device)
    hidden: Tensor = model(torch.cat([noised, clean], dim=1), positions, mask)
    return hidden[:, :length]


def add_noise(batch: Batch, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask positions of the answers at random.

    Of the m positions of a block that are not prompt, k are masked, with k uniform in 1 to m. Each
    masked position weighs m / k, and the others weigh 0. The weighted loss has the expectation of
    the linear schedule's bound on the negative log-likelihood, in which the mask rate t is uniform
    in (0, 1) and the weight is 1 / t. Its variance is smaller, as no small t gets a large weight.

    Returns:
        The noised ids, [B, N] int64, and the weight of each position's cross-entropy, [B, N]
        float32.
    """
    rows, length = batch.ids.shape
    device, shape = batch.ids.device, (rows, length // block_size, block_size)
    positions = torch.arange(length, device=device)
    free = (positions >= batch.prompt_lens[:, None]).view(shape)
    count = free.sum(-1, keepdim=True)
    rate = torch.rand((*shape[:2], 1), device=device, generator=generator)
    masked_count = (rate * count).long() + 1
    order = torch.rand(shape, device=device, generator=generator).masked_fill(~free, 2.0)
    rank = order.argsort(-1).argsort(-1)
    masked = ((rank < masked_count) & free).view(rows, length)
    weight = (count / masked_count).expand(shape).reshape(rows, length) * masked
    return batch.ids.masked_fill(masked, MASK_ID), weight


def diffusion_loss(model: NanoSDAR, batch: Batch, generator: torch.Generator) -> Tensor:
    """Estimate the bound on the negative log-likelihood, in nats per token of the answers.

    The padding is predicted too, so that the model fills a block with <|im_end|> after the end. It
    does not count as tokens.
    """
    noised, weight = add_noise(batch, model.config.block_size, generator)
    logits = model.logits(denoise(model, noised, batch.ids))
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids.flatten(), reduction="none")
    tokens = (batch.lens - batch.prompt_lens).sum()
    return (losses * weight.flatten()).sum() / tokens


@torch.inference_mode()
def decode(model: NanoSDAR, batch: Batch, threshold: float) -> Decoded:
    """Answer the prompts greedily, by the rule `low_confidence_dynamic`.

    Each step unmasks the positions of a row's block whose most likely token has a probability above
    `threshold`, and always the most confident one. A row ends with the block that holds an
    <|im_end|>.

    Args:
        model: runs without a cache, over whole sequences.
        batch: of which only the prompts are read; N is the room for prompt and answer.
        threshold: a probability.
    """
    size, device = model.config.block_size, batch.ids.device
    rows, length = batch.ids.shape
    positions = torch.arange(length, device=device)
    mask = block_causal_mask(length, size, device)
    masked = positions >= batch.prompt_lens[:, None]
    ids = batch.ids.masked_fill(masked, MASK_ID)
    start = batch.prompt_lens // size * size
    active = torch.ones(rows, dtype=torch.bool, device=device)
    steps = torch.zeros(rows, dtype=torch.int64, device=device)
    while active.any():
        block = start[:, None] + torch.arange(size, device=device)
        hidden = model(ids, positions, mask)
        hidden = hidden.gather(1, block[..., None].expand(-1, -1, hidden.shape[-1]))
        confidence, token = model.logits(hidden).softmax(-1).max(-1)
        open_ = masked.gather(1, block) & active[:, None]
        confidence = confidence.masked_fill(~open_, -1.0)
        best = F.one_hot(confidence.argmax(-1), size).bool()
        chosen = ((confidence > threshold) | best) & open_
        steps += active
        ids.scatter_(1, block, torch.where(chosen, token, ids.gather(1, block)))
        masked.scatter_(1, block, masked.gather(1, block) & ~chosen)
        complete = ~masked.gather(1, block).any(-1) & active
        generated = block >= batch.prompt_lens[:, None]
        ended = ((ids.gather(1, block) == IM_END_ID) & generated).any(-1) | (start + size >= length)
        active &= ~(complete & ended)
        start = torch.where(complete & active, start + size, start)
    return collect(ids, batch.prompt_lens, steps.tolist())
