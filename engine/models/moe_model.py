"""Decoders with experts in some layers: the base class of all families of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.layers.decoder_layer import DecoderLayer, FeedForward
from batchgen.engine.layers.feed_forward.expert_slots import PLAIN_EXPERTS, ExpertForm
from batchgen.engine.layers.feed_forward.moe import SOFTMAX_ROUTER, Router, SparseMoE
from batchgen.engine.models.dense import DenseConfig, DenseForCausalLM
from batchgen.engine.models.model_config import ModelConfig, check_positive, extra_value
from batchgen.engine.models.mtp import MTP_HEAD, MTPHead, check_mtp_layers
from batchgen.engine.models.token_model import TokenModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROUTED_EXPERTS = "routed_experts"
"""The name of the output column of the experts that each token was routed to."""
_REPLAY = (
    "entry t belongs to token t of prompt_token_ids followed by token_ids, whose last token has no "
    "entry because the model never read it; entry[t][l] are the ids of the experts that the token "
    "went through in layer moe_layers[l] of the model, the one that the router chose first in "
    "front. To replay the routing in training, let token t in that layer go through these experts, "
    "with weights that the trained router gives them"
)


NO_EXPERTS: dict[str, Any] = {
    "moe_layers": (), "num_experts": 0, "experts_per_token": 0, "expert_size": 0,
    "renormalise": True,
}  # fmt: skip
"""The fields of `MoEConfig` in a model without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(DenseConfig):
    """The configuration of decoders with experts, in addition to `DenseConfig`."""

    moe_layers: tuple[int, ...]  # ascending indices; all other layers have an MLP
    num_experts: int
    experts_per_token: int  # in each layer with experts
    expert_size: int  # the intermediate size of one expert
    renormalise: bool  # whether a token's expert weights are divided by their sum
    shared_size: int | None = None  # the intermediate size of the shared expert, if there is one
    latent_size: int | None = None  # the size of experts' inputs, if not the hidden size
    router: Router = SOFTMAX_ROUTER
    variant: ExpertForm = PLAIN_EXPERTS
    mtp_layers: int = 0  # the number of layers of the multi-token prediction head; 0: no head

    def __post_init__(self) -> None:
        # A dataclass with slots is created anew, so super() without arguments would find the old
        # class.
        super(MoEConfig, self).__post_init__()
        if not self.moe_layers:
            return
        check_positive(
            num_experts=self.num_experts,
            num_experts_per_tok=self.experts_per_token,
            moe_intermediate_size=self.expert_size,
        )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} is more than num_experts "
                f"{self.num_experts}"
            )
        if self.shared_size is not None:
            check_positive(shared_expert_intermediate_size=self.shared_size)
        self.router.form.check(self.num_experts, self.experts_per_token)

    @property
    def routed_experts(self) -> OutputColumn:
        """The column of the experts that each token was routed to, [moe_layers, experts per token],
        in the order of the router's choice."""
        return OutputColumn(
            ROUTED_EXPERTS,
            np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16),
            (len(self.moe_layers), self.experts_per_token),
            "context",
            metadata=(
                ("moe_layers", str(list(self.moe_layers))),
                ("num_experts", str(self.num_experts)),
                ("use", _REPLAY),
            ),
        )


class MoEForCausalLM(DenseForCausalLM):
    """A decoder with experts in the layers that its configuration names."""

    @property
    def family(self) -> MoEConfig:
        """The family's part of the configuration."""
        return self.config.family_as(MoEConfig)

    @property
    def parameters_per_token(self) -> int:
        return super().parameters_per_token - len(self.family.moe_layers) * self.spared_parameters

    @property
    def spared_parameters(self) -> int:
        """How many parameters of a layer's experts on this rank a token does not use, if its
        experts are spread evenly over ranks."""
        family = self.family
        hidden, inner = family.latent_size or self.config.hidden_size, family.expert_size
        products = len(family.variant.first) + 1  # gate and up, or only up; and down
        # The weights, and the biases of gate and up, and of down.
        expert = products * hidden * inner + (2 * inner + hidden) * family.variant.biased
        return (family.num_experts - family.experts_per_token) * expert // self.parallel.size

    @classmethod
    def declared_columns(cls, config: ModelConfig) -> tuple[OutputColumn, ...]:
        family = config.family_as(MoEConfig)
        experts = (family.routed_experts,) if family.moe_layers else ()
        return (*experts, *super().declared_columns(config))

    def make_mlp(self, index: int) -> FeedForward:
        if index in self.family.moe_layers:
            return self.make_experts(index)
        return super().make_mlp(index)

    def make_experts(self, index: int, **options: Any) -> SparseMoE:
        """Make the experts of the layer with this index; `options` are further arguments of
        `SparseMoE`."""
        family = self.family
        return SparseMoE(
            self.config.hidden_size,
            family.num_experts,
            family.experts_per_token,
            family.expert_size,
            renormalise=family.renormalise,
            shared_size=family.shared_size,
            latent_size=family.latent_size,
            router=family.router,
            variant=family.variant,
            column=(family.routed_experts, family.moe_layers.index(index)),
            **options,
            where=self.where,
        )

    def make_head(self, name: str) -> TokenModel:
        """Make the multi-token prediction head, with experts if a layer of the model has some. It
        shares the model's embedding and output layer, of which checkpoints may hold copies."""
        if name != MTP_HEAD or name not in self.config.heads:
            return super().make_head(name)
        check_mtp_layers(self.family.mtp_layers)
        sparse = self.family.moe_layers
        layer = DecoderLayer(
            self.make_attention(0),  # the head's only cache has index 0
            self.make_mlp(sparse[-1] if sparse else 0),
            before=(self.make_norm(), self.make_norm()),
        )
        return MTPHead(self, layer, spared=self.spared_parameters if sparse else 0)


def moe_config(
    hf: PretrainedConfig, dense: ModelConfig, *, shared_size: int | None = None
) -> ModelConfig:
    """Add Qwen's experts to a configuration without them. Raises ValueError for invalid values.
    `shared_size` is the intermediate size of a shared expert."""
    return extended(
        dense,
        MoEConfig,
        moe_layers=sparse_layers(hf),
        num_experts=num_experts(hf),
        experts_per_token=hf.num_experts_per_tok,
        expert_size=hf.moe_intermediate_size,
        renormalise=hf.norm_topk_prob,
        shared_size=shared_size,
    )


def extended(dense: ModelConfig, kind: type[MoEConfig], **values: Any) -> ModelConfig:
    """Return the configuration with `kind` as its family, which takes the values of the dense
    family."""
    common = dense.family_as(DenseConfig)
    values |= {field.name: getattr(common, field.name) for field in fields(DenseConfig)}
    family = kind(**values)
    return replace(dense, family=family, heads=(MTP_HEAD,) if family.mtp_layers else ())


def sparse_layers(hf: PretrainedConfig) -> tuple[int, ...]:
    """Return the indices of the layers with experts, from Qwen's keys. Raises ValueError for an
    invalid step."""
    check_positive(decoder_sparse_step=hf.decoder_sparse_step)
    return tuple(
        index
        for index in range(hf.num_hidden_layers)
        if index not in hf.mlp_only_layers
        and num_experts(hf) > 0
        and (index + 1) % hf.decoder_sparse_step == 0
    )


def num_experts(hf: PretrainedConfig) -> int:
    """Return the number of experts in a layer. transformers renamed the field in 5.23; earlier
    versions keep the new name as an unknown key."""
    renamed = "num_local_experts" in hf.to_dict()
    return extra_value(hf, "num_local_experts" if renamed else "num_experts", int, 0)
