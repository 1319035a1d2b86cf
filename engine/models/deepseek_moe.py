"""What models with the mixtures of experts of DeepSeek-V3 share, whatever their attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.causal_lm import EMBEDDING, LM_HEAD
from batchgen.engine.models.model_config import ModelConfig, check_positive, extra_value
from batchgen.engine.models.moe_model import MoEForCausalLM
from batchgen.engine.models.mtp import MTP_HEAD
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
"""What checkpoints call the head's own parts, by how they begin; the rest is its layer's."""


class DeepseekMoEForCausalLM(MoEForCausalLM):
    """A decoder whose checkpoints hold, behind the last layer, those that predict tokens further
    ahead (`MTPHead`)."""

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Name the tensors of the layer behind the last one as the head's weight slots do."""
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
        """The head for multi-token prediction shares what checkpoints hold once more."""
        logits = EMBEDDING if self.config.tie_word_embeddings else LM_HEAD
        shared = {
            f"{MTP_HEAD}.embed_tokens.weight": EMBEDDING,
            f"{MTP_HEAD}.lm_head.weight": logits,
        }
        return {**super().copies, **shared}

    def skipped_part(self, name: str) -> str | None:
        """Name the layers behind the last one, which predict tokens further ahead."""
        match = _LAYER.match(name)
        is_head = match is not None and int(match[1]) >= self.config.num_layers
        return "the head for multi-token prediction" if is_head and not self.heads else None


def mtp_layers(hf: PretrainedConfig) -> int:
    """Return how many layers behind the last one predict tokens further ahead; 0 if the
    configuration does not say. transformers 5.17 and 5.23 have different names for it."""
    known = extra_value(hf, "num_mtp_layers", int, 0)
    return extra_value(hf, "num_nextn_predict_layers", int, known)


def sigmoid_router(hf: PretrainedConfig) -> Router:
    """Return the form of a router whose scores are sigmoids, corrected for the choice.

    Raises ValueError if the number of groups is none.
    """
    check_positive(n_group=hf.n_group, topk_group=hf.topk_group)
    form = RouterForm(
        sigmoid=True,
        groups=hf.n_group,
        kept_groups=hf.topk_group,
        group_best=2,
        scale=hf.routed_scaling_factor,
        least_sum=1e-20,
    )
    return Router(form, corrected=True, float32=True, gates_shared=False)


def sparse_from(hf: PretrainedConfig) -> list[int]:
    """Return a DeepSeek checkpoint's layers with experts: from `first_k_dense_replace` on, the
    multiples of `moe_layer_freq`; raise ValueError if that is not positive."""
    # transformers knows no such key, and keeps what the file says.
    step = extra_value(hf, "moe_layer_freq", int, 1)
    check_positive(moe_layer_freq=step)
    if not hf.n_routed_experts:
        return []
    first = max(0, extra_value(hf, "first_k_dense_replace", int, 0))
    return [i for i in range(first, hf.num_hidden_layers) if i % step == 0]
