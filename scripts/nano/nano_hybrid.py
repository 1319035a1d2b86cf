"""nano_hybrid: a Qwen3.5-MoE that learns to predict the next token and, with an MTP head, the
tokens after it. `train_nano.py` trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from nano_learning import IM_END_ID, Batch, Recipe, answer_loss
from nano_sums import make_batch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTopKRouter,
    load_balancing_loss_func,
)

DRAFTS, DRAFT_WEIGHT = 3, 0.3
"""How many tokens the MTP head learns to draft, and the weight of the loss of each."""
BALANCE_WEIGHT = 0.005
"""The weight of the loss that grows if tokens go to few of the experts."""


def all_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute all E experts of each token x [T, H], and sum those of `ids` [T, K] by their
    `weights`.

    This is affordable because the experts are few and small. Grouped products in float32 do not
    compile.
    """
    chosen = x.new_zeros(len(x), len(module.down_proj)).scatter(1, ids, weights.to(x.dtype))
    inner = module._apply_gate(torch.einsum("th,eih->tei", x, module.gate_up_proj))
    return torch.einsum("tei,ehi->th", inner * chosen[..., None], module.down_proj)


class MTP(nn.Module):
    """The MTP head's own weights. It shares the model's embedding and output embedding."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        assert config.layer_types is not None
        full = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, full)])
        self.norm = Qwen3_5MoeRMSNorm(size, eps=eps)


class Hybrid:
    """The model with its MTP head, trained together.

    In a pass over a sequence, the head computes at position i, from the hidden state h(i) and token
    i + 1, a prediction of token i + 2. To draft more than one token, the head is applied to its own
    output: pass d > 0 takes at position i the output of pass d - 1 at i - 1 in place of h(i). It
    attends to what it would attend to when drafting after position i - d: the keys of pass 0 up to
    i - d, then one key of each later pass.
    """

    def __init__(self, contents: dict[str, Any]) -> None:
        config = Qwen3_5MoeTextConfig(**contents | {"dtype": "float32", "use_cache": False})
        config._attn_implementation = "sdpa"
        ALL_EXPERTS_FUNCTIONS.register("all", all_experts)
        config._experts_implementation = "all"
        self.module: Any = Qwen3_5MoeForCausalLM(config)
        self.module.mtp = MTP(config)
        self.module.mtp.apply(self.module._init_weights)
        self._experts = config.num_experts, config.num_experts_per_tok
        self._routed: list[Tensor] = []
        for module in self.module.modules():
            if isinstance(module, Qwen3_5MoeTopKRouter):
                module.register_forward_hook(lambda *call: self._routed.append(call[2][0]))
        if torch.cuda.is_available():
            for layer in [*self.module.model.layers, *self.module.mtp.layers]:
                layer.compile(dynamic=False)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the next token, plus those of the drafts and of uneven routing."""
        self._routed.clear()
        hidden = self.module.model(batch.ids, use_cache=False).last_hidden_state
        loss = answer_loss(self.module.lm_head(hidden), batch)
        for index, drafted in enumerate(self.passes(hidden, batch.ids)):
            # When it decodes, the first token of the answer is the model's, and drafts follow it.
            logits = self.module.lm_head(drafted)
            loss = loss + DRAFT_WEIGHT * answer_loss(logits, batch, ahead=2, skip=index + 1)
        real = torch.arange(batch.ids.shape[1], device=hidden.device) < batch.lens[:, None]
        losses = (load_balancing_loss_func((each,), *self._experts, real) for each in self._routed)
        uneven = torch.stack([torch.as_tensor(each) for each in losses])
        return loss + BALANCE_WEIGHT * (uneven[:-DRAFTS].mean() + uneven[-DRAFTS:].mean())

    def passes(self, hidden: Tensor, ids: Tensor) -> Iterator[Tensor]:
        """Yield the head's hidden states [B, N, hidden_size], one pass after another."""
        head, base, length = self.module.mtp, self.module.model, ids.shape[1]
        embedded = head.pre_fc_norm_embedding(
            base.embed_tokens(F.pad(ids[:, 1:], (0, 1), value=IM_END_ID))
        )
        positions = torch.arange(length, device=ids.device)
        angles = base.rotary_emb(hidden, positions.expand(3, 1, -1))
        past = DynamicCache()
        for index in range(DRAFTS):
            x = head.fc(torch.cat([embedded, head.pre_fc_norm_hidden(hidden)], dim=-1))
            mask = draft_mask(length, index, ids.device)[None, None]
            x = head.layers[0](x, angles, attention_mask=mask, past_key_values=past)
            drafted = head.norm(x)
            yield drafted
            hidden = F.pad(drafted[:, :-1], (0, 0, 1, 0))


def draft_mask(length: int, drafted: int, device: torch.device) -> Tensor:
    """Return the mask [N, (drafted + 1)·N] bool of the keys that pass `drafted` attends to."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    passes = [behind >= drafted, *(behind == drafted - i for i in range(1, drafted + 1))]
    return torch.cat(passes, dim=1)


RECIPE = Recipe(Hybrid, make_batch, steps=2700, batch_size=512, lr=2e-3)
