"""nano_hybrid: a small Qwen3.5-MoE, with a head that drafts further tokens (MTP).

Three layers of four are Gated DeltaNet (Yang et al. 2024), every fourth has full attention with an
output gate; all have a mixture of experts beside one shared expert. The names and shapes of the
state dict are those of published checkpoints. The model has a few million parameters: this code
runs on one device, without caches, and computes all experts for all tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from nano_delta_net import GatedDeltaNet, ShortConv
from nano_hybrid_config import HybridConfig
from nano_layers import MLP, angles, draw_weights, rotate
from nano_tokenizer import VOCAB_SIZE
from safetensors.torch import load_file
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Norm with the weight 1 + w, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, self.eps)


class Past(NamedTuple):
    """Keys and values [B, heads, T', head_dim] that an attention layer sees before its own."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Full attention with an output gate."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_heads * width * 2, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * width, size, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, past: Past | None, mask: Tensor | None) -> tuple[Tensor, Past]:
        """Compute [B, T, hidden_size], and `past` with the keys and values of this call at its end.

        Args:
            x: the normed stream [B, T, hidden_size].
            past: keys and values from earlier calls.
            mask: [T, keys] bool, whether a query sees a key; None is causal, without `past`.
        """
        length, width = x.shape[1], self.config.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * width)).chunk(2, dim=-1)
        k, v = (proj(x).unflatten(-1, (-1, width)) for proj in (self.k_proj, self.v_proj))
        rotary = int(width * self.config.rotary_factor)
        cos, sin = angles(torch.arange(length, device=x.device), rotary, self.config.rope_theta)
        q, k = (self._rotate(t.transpose(1, 2), cos, sin) for t in (self.q_norm(q), self.k_norm(k)))
        q, k, v = q.to(v.dtype), k.to(v.dtype), v.transpose(1, 2)
        # The KV heads are repeated, as PyTorch's fast kernels take either a mask or grouped heads.
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        if past is not None:
            k, v = torch.cat([past.keys, k], dim=2), torch.cat([past.values, v], dim=2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out = out.transpose(1, 2) * gate.sigmoid()
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected, Past(k, v)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([rotate(rotated, cos, sin), rest], dim=-1)


class Router(nn.Module):
    """Weights [B, T, experts] float32, 0 for those that a token does not use, and probabilities."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.weight).softmax(-1)
        best, experts = probabilities.topk(self.top_k, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, experts, best), probabilities


class Experts(nn.Module):
    """The weights of all experts; each is a gated MLP, with its gate before its up projection."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        count, size, inside = config.num_experts, config.hidden_size, config.expert_size
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2 * inside, size))
        self.down_proj = nn.Parameter(torch.zeros(count, size, inside))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Compute [B, T, hidden_size] from x, likewise, and the experts' `weights`."""
        gate, up = (
            F.linear(x, self.gate_up_proj.flatten(0, 1))
            .unflatten(-1, (len(self.down_proj), 2, -1))
            .unbind(-2)
        )
        inside = F.silu(gate) * up * weights[..., None].to(up.dtype)
        return F.linear(inside.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Compute [B, T, hidden_size] from the normed stream x, likewise, and the balance loss.

        Args:
            x: [B, T, hidden_size].
            real: [B, T] float32, 1 for the tokens that the loss counts, else 0.

        Returns:
            The output, and the balance loss of Switch Transformers (Fedus et al. 2021), which is 1
            when all experts get as many tokens.
        """
        weights, probabilities = self.gate(x)
        count = real.sum()
        used = ((weights > 0) * real[..., None]).sum((0, 1)) / count / self.gate.top_k
        chance = (probabilities * real[..., None]).sum((0, 1)) / count
        balance = (used.detach() * chance).sum() * len(used)
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return self.experts(x, weights) + shared, balance


class Layer(nn.Module):
    """A layer of either type; its attention is named as in published checkpoints."""

    def __init__(self, config: HybridConfig, layer_type: str) -> None:
        super().__init__()
        self.full = layer_type == "full_attention"
        if self.full:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, real: Tensor, past: Past | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Past | None]:
        """Compute the stream after the layer, its balance loss, and what `Attention` returns."""
        normed = self.input_layernorm(x)
        if self.full:
            mixed, past = self.self_attn(normed, past, mask)
        else:
            mixed = self.linear_attn(normed)
        x = x + mixed
        out, balance = self.mlp(self.post_attention_layernorm(x), real)
        return x + out, balance, past


class Decoder(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTP(nn.Module):
    """The head's own weights; its embedding and its output embedding are the model's."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(size, eps), RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = RMSNorm(size, eps)


class Drafted(NamedTuple):
    """What one pass of the MTP head gives.

    Attributes:
        hidden: [B, T, hidden_size], after the head's norm.
        balance: the balance loss of its experts.
        past: its keys and values so far.
    """

    hidden: Tensor
    balance: Tensor
    past: Past


class NanoHybrid(nn.Module):
    """The model with its MTP head. The output embedding is tied to the input's."""

    def __init__(self, config: HybridConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.model, self.mtp = config, Decoder(config), MTP(config)
        generator = torch.Generator().manual_seed(seed)
        last = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
        draw_weights(self.named_parameters(), config.num_layers, generator, last=last)
        for module in self.modules():
            if isinstance(module, ShortConv):  # as PyTorch's own convolutions begin
                bound = module.weight.shape[-1] ** -0.5
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)

    def forward(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the hidden states [B, T, hidden_size] after the last norm, and the balance loss.

        Args:
            ids: [B, T] int64.
            real: [B, T] float32, 1 for the tokens that the balance loss counts, else 0.
        """
        x, balances = self.model.embed_tokens(ids), []
        for layer in self.model.layers:
            x, balance, _ = layer(x, real)
            balances.append(balance)
        return self.model.norm(x), torch.stack(balances).mean()

    def draft(
        self,
        hidden: Tensor,
        following: Tensor,
        real: Tensor,
        past: Past | None,
        mask: Tensor | None,
    ) -> Drafted:
        """Run the MTP head at all positions.

        Args:
            hidden: [B, T, hidden_size], of the model or of the head itself, after its norm.
            following: [B, T] int64, the token after each position.
            real: as for the model.
            past: of earlier passes over the same positions; None in the first one.
            mask: as `Attention` takes it.
        """
        head = self.mtp
        embedded = head.pre_fc_norm_embedding(self.model.embed_tokens(following))
        x = head.fc(torch.cat([embedded, head.pre_fc_norm_hidden(hidden)], dim=-1))
        x, balance, past = head.layers[0](x, real, past, mask)
        assert past is not None
        return Drafted(head.norm(x), balance, past)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., vocab_size] float32 of hidden states [..., hidden_size]."""
        return F.linear(hidden, self.model.embed_tokens.weight).float()


def load(folder: Path) -> NanoHybrid:
    """Read a folder that training has written; the weights become float32."""
    model = NanoHybrid(HybridConfig.from_hf(json.loads((folder / "config.json").read_text())))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model
