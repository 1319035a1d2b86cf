"""The objective of nano_hybrid, and a plain decoder that speculates with its MTP head.

In a pass over a sequence the MTP head computes at position i from the hidden state h(i) and the
token i + 1 a prediction of token i + 2. To draft more than one token it is applied to its own
output: pass d > 0 takes at position i what pass d - 1 gave at i - 1, as if that were h(i). It sees
there what it would see when it drafts behind position i - d: keys of pass 0 up to i - d, and then
one key of each later pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from nano_batch import Batch, Decoded, collect
from nano_hybrid import Drafted, NanoHybrid, Past
from nano_tokenizer import IM_END_ID
from torch import Tensor

DRAFTS = 3
"""How many tokens the head learns to draft, and drafts when the model is measured."""
DRAFT_WEIGHT = 0.3
"""The weight of the loss of each draft."""
BALANCE_WEIGHT = 0.01


class Losses(NamedTuple):
    """Means over tokens.

    Attributes:
        answer: nats per token of the answers.
        drafts: the sum over the head's passes of nats per token.
        balance: how unevenly experts are used, in the model and in the head; 1 each is even.
    """

    answer: Tensor
    drafts: Tensor
    balance: Tensor

    def total(self) -> Tensor:
        """Compute what training makes small."""
        return self.answer + DRAFT_WEIGHT * self.drafts + BALANCE_WEIGHT * self.balance


def draft_mask(length: int, drafted: int, device: torch.device) -> Tensor:
    """Make the mask [length, (drafted + 1) · length] bool of pass `drafted`: which keys it sees."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    passes = [behind >= drafted, *(behind == drafted - i for i in range(1, drafted + 1))]
    return torch.cat(passes, dim=1)


def passes(
    model: NanoHybrid, hidden: Tensor, ids: Tensor, real: Tensor, count: int
) -> Iterator[Drafted]:
    """Yield what the head computes in `count` passes, one after the other.

    Args:
        model: of which the head is run.
        hidden: [B, T, hidden_size], the model's hidden states.
        ids: [B, T] int64. It is read again in each pass, so that a caller may fill in what the
            passes before have drafted.
        real: [B, T] float32, 1 for the tokens that the balance loss counts, else 0.
        count: of passes.
    """
    past: Past | None = None
    for index in range(count):
        following = F.pad(ids[:, 1:], (0, 1), value=IM_END_ID)
        # The first pass has the usual causal mask, for which there are fast kernels.
        mask = draft_mask(ids.shape[1], index, ids.device) if index else None
        drafted = model.draft(hidden, following, real, past, mask)
        yield drafted
        hidden, past = F.pad(drafted.hidden[:, :-1], (0, 0, 1, 0)), drafted.past


def losses(model: NanoHybrid, batch: Batch) -> Losses:
    """Compute the losses of predicting the answers and of drafting them. Prompts are given."""
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    real = (positions < batch.lens[:, None]).float()
    hidden, balance = model(batch.ids, real)
    first = batch.prompt_lens[:, None]
    answer = _mean_loss(model.logits(hidden), batch, 1, first)
    drafts = torch.zeros_like(answer)
    for index, drafted in enumerate(passes(model, hidden, batch.ids, real, DRAFTS)):
        # When it decodes, the first token of the answer is the model's, and drafts follow it.
        drafts = drafts + _mean_loss(model.logits(drafted.hidden), batch, 2, first + index + 1)
        balance = balance + drafted.balance / DRAFTS
    return Losses(answer, drafts, balance)


def _mean_loss(logits: Tensor, batch: Batch, ahead: int, first: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the tokens from position `first`, [B, 1], to the row's end.

    The logits [B, T, vocabulary] at a position predict the token that is `ahead` behind it.
    """
    length = batch.ids.shape[1]
    positions = torch.arange(ahead, length, device=batch.ids.device)
    counts = (positions >= first) & (positions < batch.lens[:, None])
    targets = batch.ids[:, ahead:].masked_fill(~counts, -100)
    total = F.cross_entropy(
        logits[:, : length - ahead].flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return total / counts.sum()


@torch.inference_mode()
def decode(model: NanoHybrid, batch: Batch, drafts: int) -> Decoded:
    """Answer the prompts greedily; the head drafts, and each forward of the model checks drafts.

    A forward yields the drafts up to the first one that is not the model's most likely token, and
    then this token. The first forward, over the prompt, has no drafts. A row ends with <|im_end|>.

    Args:
        model: runs without a cache, over whole sequences.
        batch: of which only the prompts are read; N is the room for prompt and answer.
        drafts: how many tokens the head drafts; 0 is plain decoding.
    """
    rows, room = batch.ids.shape
    device = batch.ids.device
    # Behind what is known there is space for drafts, the token behind them, and the next drafts.
    space = 2 * drafts + 1
    ids = F.pad(batch.ids, (0, space), value=IM_END_ID)
    known, steps = batch.prompt_lens.clone(), torch.zeros(rows, dtype=torch.int64, device=device)
    drafted = torch.full((rows, drafts), -1, device=device)
    ahead = torch.arange(drafts + 1, device=device)
    active = torch.arange(rows, device=device)
    while len(active):
        width = int(known[active].max()) + space
        part, count = ids[active, :width], known[active]
        real = torch.ones(part.shape, device=device)
        hidden, _ = model(part, real)
        at = count[:, None] + ahead
        told = _most_likely(model, hidden, at - 1)
        agrees = (told[:, :drafts] == drafted[active]).long().cumprod(-1)
        accepted = agrees.sum(-1, keepdim=True)
        part.scatter_(1, at, told)
        ended = ((told == IM_END_ID) & (ahead <= accepted)).any(-1)
        count = (count + accepted[:, 0] + 1).clamp(max=room)
        for index, head in enumerate(passes(model, hidden, part, real, drafts)):
            draft = _most_likely(model, head.hidden, count[:, None] - 2 + index)
            drafted[active, index] = draft[:, 0]
            part.scatter_(1, count[:, None] + index, draft)
        ids[active, :width], known[active] = part, count
        steps[active] += 1
        active = active[~ended & (count < room)]
    return collect(ids[:, :room], batch.prompt_lens, steps.tolist())


def _most_likely(model: NanoHybrid, hidden: Tensor, at: Tensor) -> Tensor:
    """Return the most likely tokens [B, J] int64 by the hidden states at the positions `at`."""
    chosen = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
    return model.logits(chosen).argmax(-1)
