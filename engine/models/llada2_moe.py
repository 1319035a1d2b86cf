"""LLaDA2.0 and 2.1, mini and flash (inclusionAI 2025, 2026; arXiv 2512.15745 and 2602.08676): a
decoder like GLM-4.5's, with the weight names of Ling, for block diffusion.

Sources: modeling_llada2_moe.py (sajadn/Megatron-Bridge at 4fde5488, a copy of the checkpoints'
file), srt/models/llada2.py (sgl-project/sglang at 02ceb3b3) and
configs/model_configs/llada2_flash/config.json (inclusionAI/dFactory at c29d72cc).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from batchgen.engine.models.deepseek_moe import sigmoid_router, sparse_from
from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import Diffusion, ModelConfig, partial_rope
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended
from batchgen.engine.models.sdar import extended_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK_LENGTH = 32
"""The block length of `generate` in the checkpoints' modelling file; config.json does not give
it."""
_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.query_key_value.": ".self_attn.qkv_proj.",
    ".attention.query_layernorm.": ".self_attn.q_norm.",
    ".attention.key_layernorm.": ".self_attn.k_norm.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}
"""Maps parts of published names to those of other models."""
_FIXED = {
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "norm_head": False,
    "use_bias": False,
    "use_sliding_window": False,
    "norm_softmax": False,
    "using_split_qkv_in_self_attention": False,
}
"""Keys for which the engine supports only these values."""
_UNUSED = (
    *("embedding_dropout", "output_dropout", "use_rmsnorm", "rotary_dim", "max_window_layers"),
    "sliding_window",
)
"""Keys of published files that have no effect. `partial_rotary_factor` says how much of a head has
RoPE."""


class LLaDA2MoeModelLM(MoEForCausalLM):
    """LLaDA2: queries and keys are normalised, then half of each head is rotated. The first layers
    have no experts; the others have DeepSeek-V3's routed experts and a shared one."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys
    is_diffusion = True

    @classmethod
    def hf_config(cls) -> type[PretrainedConfig]:
        return _config_class()

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        for key, value in _FIXED.items():
            if getattr(hf, key) != value:
                raise ValueError(f"{key} is {getattr(hf, key)!r:.60}, and must be {value!r}")
        head_dim = head_size(hf)
        rope, rotary_dim = partial_rope(hf.rope_parameters, head_dim)
        dense = dense_config(
            hf,
            cls,
            head_dim=head_dim,
            qkv_bias=hf.use_qkv_bias,
            output_bias=False,
            mlp_bias=False,
            rope=rope,
            rotary_dim=rotary_dim,
        )
        shared: int = hf.moe_shared_expert_intermediate_size or hf.moe_intermediate_size
        config = extended(
            dense,
            MoEConfig,
            moe_layers=tuple(sparse_from(hf)),
            num_experts=hf.n_routed_experts or 0,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.moe_intermediate_size,
            renormalise=hf.num_experts_per_tok > 1,  # a single weight stays the score
            # Shared experts are one wide MLP; None: there are none.
            shared_size=(hf.num_shared_experts or 0) * shared or None,
            router=sigmoid_router(hf),
        )
        block_length = BLOCK_LENGTH if hf.block_size is None else hf.block_size
        return replace(config, diffusion=Diffusion(hf.mask_token_id, block_length))

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names to those of other models."""
        for published, internal in _NAMES.items():
            name = name.replace(published, internal)
        return name


@cache
def _config_class() -> type[PretrainedConfig]:
    """Return a class that reads LLaDA2's config.json without running the checkpoint's code."""
    from transformers import Glm4MoeConfig

    kind = extended_class(
        Glm4MoeConfig,
        "llada2_moe",
        mask_token_id=(int | None, None),
        block_size=(int | None, None),
        num_shared_experts=(int | None, 0),
        moe_shared_expert_intermediate_size=(int | None, None),
        score_function=(str | None, "sigmoid"),
        router_dtype=(str | None, None),
        moe_router_enable_expert_bias=(bool, True),
        use_qk_norm=(bool, True),
        use_qkv_bias=(bool, False),
        use_bias=(bool, False),
        norm_head=(bool, False),
        use_sliding_window=(bool, False),
        norm_softmax=(bool, False),
        using_split_qkv_in_self_attention=(bool, False),
        **dict.fromkeys(_UNUSED, (object, None)),
        tie_word_embeddings=(bool, False),
    )
    kind.attribute_map = {**kind.attribute_map, "num_experts": "n_routed_experts"}
    return kind
