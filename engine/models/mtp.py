"""A head for multi-token prediction (MTP), which continues from the hidden states of its target.
The strategy `ar_spec` uses it to draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.linear import Linear
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.token_model import TokenModel

MTP_HEAD = "mtp"
"""The name of the multi-token prediction head, which is also the prefix of its weight slots."""
MTP_PART = "the head for multi-token prediction"
"""The name of the head if it was not loaded, for messages."""


def check_mtp_layers(number: int) -> None:
    """Raise ValueError if the multi-token prediction head does not have exactly one layer."""
    if number != 1:
        raise ValueError(
            f"the head for multi-token prediction has {number} layers, and only one is supported"
        )


class MTPHead(TokenModel):
    """One layer over a token's embedding and the hidden state that the token was drawn from.

    With h_i the target's hidden state of position i after its final norm, and e_{i+1} the embedding
    of the token at position i + 1, the head computes

        norm(layer(fc([norm_e(e_{i+1}), norm_h(h_i)])))

    and from this the logits of the token at position i + 2. The result can replace the target's
    hidden state, so that the head continues from its own predictions. This is the head of Qwen3.5,
    and, with other names, of DeepSeek-V3 (2024). Embedding, rotary table and output layer are the
    target's.

    Args:
        spared: how many parameters of experts a token does not use.
    """

    reads_hidden = True

    def __init__(self, target: CausalLM, layer: DecoderLayer, *, spared: int = 0) -> None:
        super().__init__()
        self.device, self.dtype = target.device, target.dtype
        self.parallel, self.turns_apart = target.parallel, target.turns_apart
        self.turns_by_axes = target.turns_by_axes
        self.hidden_size, self.vocab_size = target.hidden_size, target.vocab_size
        size = target.hidden_size
        self.pre_fc_norm_embedding = target.make_norm()
        self.pre_fc_norm_hidden = target.make_norm()
        self.fc = Linear(2 * size, size, bias=False, where=self.where)
        self.layers = nn.ModuleList([layer])
        self.norm = target.make_norm()
        self.count_parameters()
        self._spared = spared
        # In a tuple, so that the target's weights do not count as the head's.
        assert target.lm_head is not None, "models without a layer for logits have no heads"
        self._shared = target.model.embed_tokens, target.model.rotaries[-1], target.lm_head

    @property
    def parameters_per_token(self) -> int:
        return self.num_parameters - self._spared

    @property
    def cache_specs(self) -> Sequence[CacheSpec | None]:
        (layer,) = self.layers
        assert isinstance(layer, DecoderLayer)
        return [layer.cache_spec]

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute the hidden states for the token after each position, as `TokenModel.forward`
        does. `ctx.hidden` has the target's hidden states [T, hidden_size] of the positions."""
        embed_tokens, rotary, _ = self._shared
        assert ctx.hidden is not None
        embedded, _ = self.pre_fc_norm_embedding.of_stream(embed_tokens(input_ids))
        merged = torch.cat((embedded, self.pre_fc_norm_hidden(ctx.hidden)), -1)
        rotary_positions = positions if ctx.rope_positions is None else ctx.rope_positions
        cos_sin = None if rotary is None else rotary(rotary_positions)
        (layer,) = self.layers
        hidden: Tensor
        hidden, _ = self.norm.of_stream(layer(self.fc(merged), cos_sin, ctx, ctx.outputs))
        return hidden

    def own_logits(self, hidden: Tensor) -> Tensor:
        _, _, lm_head = self._shared
        logits: Tensor = lm_head(hidden)
        return logits
