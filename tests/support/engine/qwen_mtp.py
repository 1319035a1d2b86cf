"""Tiny random checkpoints of Qwen3.5, Qwen3-Next, DeepSeek-V3 and GLM-4.7-Flash with a head for
multi-token prediction, and the head as transformers has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_layers import MtpModel

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "mtp_num_hidden_layers": 1,
    # What transformers calls the head's layers.
    "num_mtp_layers": 1,
    "mtp_layer_types": ["full_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_NAMES = {
    "layers.0.enorm": "mtp.pre_fc_norm_embedding",
    "layers.0.hnorm": "mtp.pre_fc_norm_hidden",
    "layers.0.eh_proj": "mtp.fc",
    "layers.0.post_norm": "mtp.norm",
    "layers.0.mtp_block": "mtp.layers.0",
}
_LATENT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "num_mtp_layers": 1,
}
_LATENT_NAMES = {
    "layers.0.enorm": "model.layers.2.enorm",
    "layers.0.hnorm": "model.layers.2.hnorm",
    "layers.0.eh_proj": "model.layers.2.eh_proj",
    "layers.0.post_norm": "model.layers.2.shared_head.norm",
    "layers.0.mtp_block": "model.layers.2",
}


class TheirHead:
    """transformers' model and its head.

    Args:
        kind: qwen3_5, qwen3_5_moe, qwen3_next, deepseek_v3, glm4_moe_lite or glm4_moe.
        sizes: entries of the configuration to replace.
    """

    def __init__(self, kind: str, **sizes: Any) -> None:
        torch.manual_seed(0)
        model: PreTrainedModel
        values = _SIZES | sizes
        self._names = _NAMES if kind.startswith("qwen") else _LATENT_NAMES
        if kind == "deepseek_v3":
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**_LATENT | sizes))
        elif kind == "glm4_moe_lite":
            head = {"mtp_mlp_layer_types": ["sparse"]}
            model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**_LATENT | head | sizes))
        elif kind == "glm4_moe":
            plain = {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}
            model = Glm4MoeForCausalLM(Glm4MoeConfig(**_LATENT | plain | sizes))
        elif kind == "qwen3_5":
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))
        elif kind == "qwen3_5_moe":
            model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values, **_EXPERTS))
        else:
            config = Qwen3NextConfig(**values, **_EXPERTS, norm_topk_prob=True)
            model = Qwen3NextForCausalLM(config)
        self.model, self._head = model, MtpModel(model, 1)
        self.model.train(False)
        self._head.train(False)
        for parameter in self._head.layers.parameters():  # some are not initialised
            parameter.data.normal_(0, 0.15)
        for module in (self.model, self._head.layers):
            for name, parameter in module.named_parameters():
                if "norm" in name:
                    parameter.data.uniform_(0.5, 1.5)
                elif name.endswith("gate.weight"):
                    parameter.data.normal_(0, 0.5)

    def save(self, folder: Path, *, split_experts: bool = False, head: bool = True) -> Path:
        """Write a checkpoint with the names that published ones have.

        Args:
            split_experts: the head's experts stand in tensors of their own.
            head: write the head's tensors at all.
        """
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name, values in self._head.layers.state_dict(prefix="layers.").items():
            theirs = next(before for before in self._names if name.startswith(before))
            published = self._names[theirs] + name.removeprefix(theirs)
            if head:
                parts = _split(published, values) if split_experts else {published: values}
                tensors |= {name: part.contiguous().clone() for name, part in parts.items()}
        if head and self._names is _LATENT_NAMES:  # once more what the head shares with the model
            shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
            for name, source in shared.items():
                tensors[f"model.layers.2.{name}.weight"] = tensors[f"{source}.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def hidden(self, ids: list[int]) -> Tensor:
        """[n, hidden_size], the model's hidden states after its last norm."""
        with torch.inference_mode():
            found: Tensor = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        return found

    def states(self, ids: list[int], hidden: Tensor) -> Tensor:
        """[n, hidden_size], the head's hidden states after tokens [n] and hidden states of the
        positions before them."""
        head, count = self._head, len(ids)
        positions = torch.arange(count).unsqueeze(0)
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        with torch.inference_mode():
            embedded = head.embed_tokens(torch.tensor([ids]))
            rotary: Any = head.rotary_emb
            turned = rotary(embedded, positions)
            layer = head.layers[0]
            found: Tensor = layer(embedded, hidden.unsqueeze(0), turned, mask, positions, None)[0]
        return found

    def logits(self, states: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = self._head.shared_head(states)
        return found


def _split(name: str, values: Tensor) -> dict[str, Tensor]:
    """The projections of each expert in a tensor of its own; other tensors as they are."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: values}
    path, which = name.rsplit(".", 1)
    found: dict[str, Tensor] = {}
    for expert, own in enumerate(values):
        parts = {which: own}
        if which == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), own.chunk(2), strict=True))
        found |= {f"{path}.{expert}.{part}.weight": weight for part, weight in parts.items()}
    return found
