"""The decoder that dense models share: pre-norm blocks of attention and gated MLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from batchgen.engine.execution.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.attention import Attention
from batchgen.engine.layers.linear import Linear, MergedLinear, empty_parameter
from batchgen.engine.layers.mlp import GatedMLP
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.rotary import RotaryTable
from batchgen.engine.models.config import ModelConfig
from batchgen.kernels.layers.embedding import embedding


class Embedding(nn.Module):
    """A [vocab_size, hidden_size] row for each token id."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.weight = empty_parameter(*shape, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return embedding(input_ids, self.weight)


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, index: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index, device=device, dtype=dtype)
        self.mlp = GatedMLP(config, device=device, dtype=dtype)
        self.input_layernorm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, device=device, dtype=dtype)

    def forward(
        self,
        residual: Tensor,
        cos_sin: Tensor,
        ctx: ForwardContext,
        outputs: OutputTokens | None = None,
    ) -> Tensor:
        """The stream after this block, [T, hidden_size], or [R, hidden_size] of the R outputs.

        Overwrites residual, the stream before it.
        """
        hidden = self.input_layernorm(residual)
        residual = self.self_attn(hidden, residual, cos_sin, ctx, outputs)
        stream: Tensor = self.mlp(self.post_attention_layernorm(residual), residual)
        return stream


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, device=device, dtype=dtype) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.rotary = RotaryTable(
            config.rope, config.head_dim, config.max_position_embeddings, device
        )

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        residual: Tensor = self.embed_tokens(input_ids)
        cos_sin = self.rotary(positions)
        # The last layer's KV is written for all tokens; the rest of it only for the outputs.
        for layer in self.layers[:-1]:
            residual = layer(residual, cos_sin, ctx)
        residual = self.layers[-1](residual, cos_sin, ctx, ctx.outputs)
        hidden: Tensor = self.norm(residual)
        return hidden


class DenseForCausalLM(nn.Module, ABC):
    """A decoder and its head; a model is a subclass and a line in the registry.

    Classes and submodules carry the names that transformers' checkpoints use.

    Every operation treats each token alone (attention reads the cache through `ctx`), so a token's
    result does not depend on its batch mates.
    """

    hf_config: ClassVar[type[PretrainedConfig]]
    """Reads the config.json of this model; its model_type is the one there."""
    diffusion: ClassVar[bool] = False
    """Fills in masked tokens; its configuration says how."""
    qk_norm: ClassVar[bool]
    """Queries and keys are normalised per head."""
    gguf_architecture: ClassVar[str | None]
    """Value of `general.architecture` in GGUF files of this model; None: they are not read."""
    gguf_permutes_qk: ClassVar[bool]
    """GGUF files of this model store the rows of q and k in the order of interleaved rotary."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, device=device, dtype=dtype)
        self.device, self.dtype = device, dtype
        self.lm_head = Linear(
            config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    @classmethod
    @abstractmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        """Raises ValueError naming what the engine does not support."""

    def pack(self) -> None:
        """Lay the loaded weights out for computing; they cannot be loaded again."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, each below config.max_position_embeddings.
            ctx: the T tokens' KV slots and attention metadata.

        Returns:
            [T, hidden_size] in the model's dtype, or [R, hidden_size] of ctx.outputs.
        """
        hidden: Tensor = self.model(input_ids, positions, ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] → [R, vocab_size], in the model's dtype."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Name of every tensor of a checkpoint → the (slice of a) parameter that it fills."""
        slots: dict[str, Tensor] = {}
        for path, module in self.named_modules():
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                slots.update((f"{parent}.{name}", slot) for name, slot in module.checkpoint_slots())
            elif module is not self.lm_head or not self.config.tie_word_embeddings:
                slots.update(
                    (f"{path}.{name}", parameter)
                    for name, parameter in module.named_parameters(recurse=False)
                )
        return slots
