"""The common part of models with DeepSeek-V3's mixture of experts, with any kind of attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.causal_lm import EMBEDDING, LM_HEAD
from batchgen.engine.models.model_config import ModelConfig, check_positive, extra_value
from batchgen.engine.models.moe_model import MoEForCausalLM
from batchgen.engine.models.mtp import MTP_HEAD, MTP_PART
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "embed_tokens.": "embed_tokens.",
    "shared_head.head.": "lm_head.",
}
"""Maps the beginnings of a head's published tensor names to those of `MTPHead`. All other tensors
belong to the head's layer."""


class DeepseekMoEForCausalLM(MoEForCausalLM):
    """A decoder whose checkpoints hold, after the last layer, layers for multi-token prediction
    (`MTPHead`)."""

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the tensor names of the layer after the last one to those of the head's weight
        slots."""
        match = _LAYER.match(name)
        if match is None or int(match[1]) < config.num_layers:
            return name
        rest = name[match.end() :]
        for published, internal in _HEAD_NAMES.items():
            if rest.startswith(published):
                return f"{MTP_HEAD}.{internal}{rest.removeprefix(published)}"
        return f"{MTP_HEAD}.layers.0.{rest}"

    @property
    def copies(self) -> Mapping[str, str]:
        """Also maps the head's copies of the embedding and output layer, which checkpoints
        repeat."""
        logits = EMBEDDING if self.config.tie_word_embeddings else LM_HEAD
        shared = {
            f"{MTP_HEAD}.embed_tokens.weight": EMBEDDING,
            f"{MTP_HEAD}.lm_head.weight": logits,
        }
        return {**super().copies, **shared}

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the multi-token prediction head for its tensors, if the head is not
        built."""
        match = _LAYER.match(name)
        is_head = match is not None and int(match[1]) >= self.config.num_layers
        return MTP_PART if is_head and not self.heads else None


def mtp_layers(hf: PretrainedConfig) -> int:
    """Return the number of layers for multi-token prediction after the last one; 0 if the
    configuration does not say. transformers 5.17 and 5.23 have different names for it."""
    known = extra_value(hf, "num_mtp_layers", int, 0)
    return extra_value(hf, "num_nextn_predict_layers", int, known)


def sigmoid_router(hf: PretrainedConfig) -> Router:
    """Return a router with sigmoid scores and a correction for the choice. Raises ValueError if a
    number of groups is not positive."""
    check_positive(n_group=hf.n_group, topk_group=hf.topk_group)
    form = RouterForm(
        sigmoid=True,  # score = sigmoid(logit)
        groups=hf.n_group,
        kept_groups=hf.topk_group,
        group_best=2,  # a group's score is the sum of its two largest
        scale=hf.routed_scaling_factor,
        least_sum=1e-20,
    )
    return Router(
        form,
        corrected=True,  # experts are chosen by score + correction, and weighted by the score
        float32=True,  # logits are computed in float32
        gates_shared=False,  # + shared(x), without a gate
    )


def sparse_from(hf: PretrainedConfig) -> list[int]:
    """Return the indices of a DeepSeek model's layers with experts: the multiples of
    `moe_layer_freq` from `first_k_dense_replace` on. Raises ValueError if `moe_layer_freq` is not
    positive."""
    # transformers does not know this key, and keeps the file's value.
    step = extra_value(hf, "moe_layer_freq", int, 1)
    check_positive(moe_layer_freq=step)
    if not hf.n_routed_experts:
        return []
    first = max(0, extra_value(hf, "first_k_dense_replace", int, 0))
    return [i for i in range(first, hf.num_hidden_layers) if i % step == 0]
