"""nano_sdar and nano_hybrid: transformers' modules, and what they learn by."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from nano_learning import (
    HEAD_DIM,
    IM_END_ID,
    PAD_ID,
    TEXT_CONFIG,
    Batch,
    answer_targets,
    draw_weights,
    mean_loss,
)
from nano_problems import SCHEMA
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTopKRouter,
)

from batchgen import ARSpecStrategy, DLLMStrategy

SEQUENCE_LENGTH = 192
"""Tokens of a sequence: room for the longest problem and its answer, in either form."""
MASK_ID = 259
THRESHOLD = 0.9
"""The confidence above which nano_sdar unmasks a token when it is graded."""
DRAFTS, DRAFT_WEIGHT = 3, 0.3
"""How many tokens the MTP head learns to draft, and the weight of the loss of each."""
BALANCE_WEIGHT = 0.01
FULL_EVERY = 4
"""One in this many layers of nano_hybrid has full attention."""
_SHARED = TEXT_CONFIG | {"pad_token_id": PAD_ID}


# --- nano_sdar ------------------------------------------------------------------------------------


class SDAR:
    """Learns by block diffusion (BD3-LM, Arriola et al. 2025): a noised and a clean copy of every
    sequence go through one forward, in which a noised block sees itself and the clean blocks before
    it, as it does when it is decoded."""

    def __init__(self, args: Namespace) -> None:
        size, heads = args.hidden_size, args.hidden_size // HEAD_DIM
        if size % HEAD_DIM or SEQUENCE_LENGTH % args.block_size:
            raise ValueError("--hidden-size is a multiple of 64, --block-size a divisor of 192")
        self.files = {"answer_schema": SCHEMA}
        self.facts = {"threshold": THRESHOLD}
        self.strategy = DLLMStrategy(confidence_threshold=THRESHOLD)
        self.block_size = args.block_size
        self.config = _SHARED | {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "block_size": args.block_size,
            "hidden_size": size,
            "intermediate_size": 3 * size,
            "mask_token_id": MASK_ID,
            "max_window_layers": args.layers,
            "num_attention_heads": heads,
            "num_hidden_layers": args.layers,
            "num_key_value_heads": max(heads // 2, 1),
            "rope_theta": 10000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        }
        kept = {k: v for k, v in self.config.items() if k not in ("architectures", "model_type")}
        self.module: Any = Qwen3ForCausalLM(Qwen3Config(**kept | {"dtype": "float32"}))
        draw_weights(self.module, args.seed, lambda name: args.layers)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Estimate the bound on the negative log-likelihood, in nats per token of the answers.

        The padding is predicted too, so that the model fills a block with <|im_end|> after the end.
        It does not count as tokens.
        """
        noised, weight = add_noise(batch, self.block_size, generator)
        length, device = batch.ids.shape[1], batch.ids.device
        out = self.module(
            torch.cat([noised, batch.ids], dim=1),
            position_ids=torch.arange(length, device=device).repeat(2)[None],
            attention_mask=training_mask(length, self.block_size, device)[None, None],
            use_cache=False,
        )
        logits = out.logits[:, :length].float().flatten(0, 1)
        losses = F.cross_entropy(logits, batch.ids.flatten(), reduction="none")
        return (losses * weight.flatten()).sum() / (batch.lens - batch.prompt_lens).sum()

    held_out_loss = loss


def training_mask(length: int, block_size: int, device: torch.device) -> Tensor:
    """Make the mask [2N, 2N] bool for the noised copy followed by the clean one.

    A noised block sees itself and the clean blocks before it. The clean copy sees itself, causal
    over blocks, and nothing of the noised copy.
    """
    block = torch.arange(length, device=device) // block_size
    itself = block[:, None] == block[None, :]
    earlier = block[:, None] > block[None, :]
    noised = torch.cat([itself, earlier], dim=1)
    return torch.cat([noised, torch.cat([torch.zeros_like(itself), earlier | itself], dim=1)])


def add_noise(batch: Batch, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask positions of the answers at random; returns the noised ids and the weights of the
    positions' losses, [B, N] each.

    Of the m positions of a block that are not prompt, k are masked, with k uniform in 1 to m. Each
    masked position weighs m / k, and the others weigh 0. The weighted loss has the expectation of
    the linear schedule's bound on the negative log-likelihood, in which the mask rate t is uniform
    in (0, 1) and the weight is 1 / t. Its variance is smaller, as no small t gets a large weight.
    """
    rows, length = batch.ids.shape
    device, shape = batch.ids.device, (rows, length // block_size, block_size)
    positions = torch.arange(length, device=device)
    free = (positions >= batch.prompt_lens[:, None]).view(shape)
    count = free.sum(-1, keepdim=True)
    rate = torch.rand((*shape[:2], 1), device=device, generator=generator)
    masked_count = (rate * count).long() + 1
    order = torch.rand(shape, device=device, generator=generator).masked_fill(~free, 2.0)
    masked = ((order.argsort(-1).argsort(-1) < masked_count) & free).view(rows, length)
    weight = (count / masked_count).expand(shape).reshape(rows, length) * masked
    return batch.ids.masked_fill(masked, MASK_ID), weight


# --- nano_hybrid ----------------------------------------------------------------------------------


class MTP(nn.Module):
    """The head's own weights; its embedding and its output embedding are the model's."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, FULL_EVERY - 1)])
        self.norm = Qwen3_5MoeRMSNorm(size, eps=eps)


class Hybrid:
    """Learns the next token and, with an MTP head, the tokens behind it.

    In a pass over a sequence the head computes at position i from the hidden state h(i) and the
    token i + 1 a prediction of token i + 2. To draft more than one token it is applied to its own
    output: pass d > 0 takes at position i what pass d - 1 gave at i - 1, as if that were h(i). It
    sees there what it would see when it drafts behind position i - d: keys of pass 0 up to i - d,
    and then one key of each later pass.
    """

    def __init__(self, args: Namespace) -> None:
        if args.layers < FULL_EVERY:
            raise ValueError(f"--layers is at least {FULL_EVERY}, so that one has full attention")
        self.files = {"answer_schema": SCHEMA}
        self.facts = {"drafts": DRAFTS}
        self.strategy = ARSpecStrategy(proposer="mtp", num_spec_tokens=DRAFTS, adaptive=False)
        types = ["linear_attention"] * (FULL_EVERY - 1) + ["full_attention"]
        self.config = _SHARED | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "hidden_size": args.hidden_size,
            "num_hidden_layers": args.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM,
            "linear_conv_kernel_dim": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 128,
            "attn_output_gate": True,
            "full_attention_interval": FULL_EVERY,
            "layer_types": [types[layer % FULL_EVERY] for layer in range(args.layers)],
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "output_router_logits": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "router_aux_loss_coef": 0.001,
        }
        config = Qwen3_5MoeTextConfig(**self.config | {"dtype": "float32", "use_cache": False})
        config._attn_implementation = "sdpa"
        self.module: Any = Qwen3_5MoeForCausalLM(config)
        self.module.mtp = MTP(config)
        draw_weights(self.module, args.seed, lambda name: args.layers)
        self._routed: list[tuple[Tensor, Tensor]] = []
        for module in self.module.modules():
            if isinstance(module, Qwen3_5MoeTopKRouter):
                module.register_forward_hook(self._note_routes)
        if args.compile:
            for layer in [*self.module.model.layers, *self.module.mtp.layers]:
                layer.compile(dynamic=False)

    def _note_routes(self, module: nn.Module, given: Any, out: tuple[Tensor, ...]) -> None:
        self._routed.append((out[0].float().softmax(-1), out[2]))

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        self._routed.clear()
        hidden, answer = self._answer(batch)
        drafts = torch.stack([
            mean_loss(
                self.module.lm_head(drafted),
                answer_targets(batch, 2, batch.prompt_lens + index + 1),
            )
            for index, drafted in enumerate(self.passes(hidden, batch.ids))
        ])  # fmt: skip
        real = (torch.arange(SEQUENCE_LENGTH, device=hidden.device) < batch.lens[:, None]).float()
        uneven = torch.stack([balance(*routed, real.flatten()) for routed in self._routed])
        uneven = uneven[:-DRAFTS].mean() + uneven[-DRAFTS:].mean()
        return answer + DRAFT_WEIGHT * drafts.sum() + BALANCE_WEIGHT * uneven

    def held_out_loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        return self._answer(batch)[1]

    def _answer(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The hidden states, and the loss of predicting the answers; prompts are given."""
        hidden = self.module.model(batch.ids, use_cache=False).last_hidden_state
        return hidden, mean_loss(self.module.lm_head(hidden), answer_targets(batch))

    def passes(self, hidden: Tensor, ids: Tensor) -> Iterator[Tensor]:
        """Yield the head's hidden states [B, T, hidden_size] in pass after pass.

        When it decodes, the first token of the answer is the model's, and drafts follow it.
        """
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
    """Make the mask [T, (drafted + 1)·T] bool of pass `drafted`: which keys it sees."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    passes = [behind >= drafted, *(behind == drafted - i for i in range(1, drafted + 1))]
    return torch.cat(passes, dim=1)


def balance(probabilities: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
    """The balance loss of Switch Transformers (Fedus et al. 2021): 1 if all experts get as many
    tokens. `real` is 1 for the tokens that count, else 0."""
    experts, top_k = probabilities.shape[-1], chosen.shape[-1]
    used = F.one_hot(chosen, experts).sum(1) * real[:, None] / top_k
    chance = (probabilities * real[:, None]).sum(0)
    return (used.sum(0) * chance).sum() * experts / real.sum() ** 2
