"""Gemma 4 (Google 2026). Layers without a sliding window have larger heads, apply RoPE to a part of
each head, and use their keys as values.

The model with experts has an MLP in parallel to them. In the smallest models, the last layers read
keys and values cached by earlier layers, and all layers have per-layer embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from batchgen.engine.layers.decoder_layer import DecoderLayer, FeedForward, Mixer
from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.feed_forward.mlp_and_experts import MLPAndExperts
from batchgen.engine.layers.feed_forward.scaled_router import ScaledRouter
from batchgen.engine.layers.layer_inputs import LayerInput, LayerInputs
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.mixers.attention import Attention
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.rotary import RotaryTable
from batchgen.engine.models.gemma4_config import Gemma4Config, gemma4_config
from batchgen.engine.models.gemma_towers import (
    axial_tower,
    is_of_gemma_tower,
    piece_beside_gemma_tower,
)
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEForCausalLM
from batchgen.engine.models.vision_part import (
    VISION_TOWER,
    text_config,
    text_part,
    with_tower,
)
from batchgen.engine.parallel.tensor_parallel import EXPERTS_LANE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SOUND = re.compile(r"(model\.)?(audio_tower|embed_audio)\.")
_KEYS_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k|v)_(proj|norm)\.")


class Gemma4ForCausalLM(MoEForCausalLM):
    """Gemma 4: like Gemma 3, with norms of values, without a scale of scores, and with a factor of
    the residual stream after each layer. Norms multiply by the checkpoint's weight in float32."""

    qk_norm = "head"
    norm_places = "both"
    norms_in_float = True

    hf_class = "Gemma4TextConfig"

    @property
    def family(self) -> Gemma4Config:
        """The family's part of the configuration."""
        return self.config.family_as(Gemma4Config)

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer with norms before and after its parts. `MLPAndExperts` has its own norm
        before the MLP."""
        sparse = index in self.family.moe_layers
        return DecoderLayer(
            self.make_attention(index),
            self.make_mlp(index),
            before=(self.make_norm(), None if sparse else self.make_norm()),
            after=(self.make_norm(), self.make_norm()),
            scalar=self._scalar(),
            canvas_scalar=self._scalar() if self.denoises_canvases else None,
            own_input=self._layer_input(index),
            mlp_name="" if sparse else "mlp",
        )

    def _scalar(self) -> nn.Parameter:
        return empty_parameter(1, device=self.device, dtype=self.dtype)

    def make_mlp(self, index: int) -> FeedForward:
        """Make the feed-forward part of a layer: an MLP, with experts in parallel if the layer has
        some."""
        family, hidden, where = self.family, self.config.hidden_size, self.where
        is_wide = family.wide_mlps and family.kv_layers[index] != index
        width = family.intermediate_size * (2 if is_wide else 1)
        mlp = GatedMLP(hidden, width, bias=False, gate=family.gate, where=where)
        if index not in family.moe_layers:
            return mlp
        gate = ScaledRouter(hidden, family.num_experts, family.rms_norm_eps, where=where)
        return MLPAndExperts(
            mlp,
            self.make_experts(index, gate=gate, lane=EXPERTS_LANE),
            before=(self.make_norm(), self.make_norm()),
            after=(self.make_norm(), self.make_norm()),
        )

    def make_attention(self, index: int) -> Mixer:
        """Make the attention of a layer, which may read keys and values cached by an earlier
        layer."""
        family, shape = self.family, self.family.attention_of(index)
        return Attention(
            family.kv_layers[index],
            self.config.hidden_size,
            shape,
            qkv_bias=family.qkv_bias,
            output_bias=family.output_bias,
            qk_norm=family.qk_norm,
            norm_eps=family.rms_norm_eps,
            scale=family.attention_scale,
            norms_in_float=True,
            value_norm=True,
            keys_are_values=family.keys_are_values and shape.window is None,
            reads_only=family.kv_layers[index] != index,
            looks_ahead=shape.window is not None and family.images_see_whole,
            where=self.where,
        )

    def make_layer_inputs(self) -> LayerInputs | None:
        """Make the module that computes per-layer embeddings; None for models without them."""
        config, size = self.config, self.family.input_size
        if not size:
            return None
        norm = RMSNorm(size, self.family.rms_norm_eps, in_float=True, where=self.where)
        sizes = config.vocab_size, config.hidden_size, config.num_layers, size
        return LayerInputs(*sizes, norm, pad_id=self.family.pad_id, where=self.where)

    def _layer_input(self, index: int) -> LayerInput | None:
        hidden, size = self.config.hidden_size, self.family.input_size
        if not size:
            return None
        return LayerInput(index, hidden, size, self.make_norm(), where=self.where)

    def make_rotaries(self) -> Sequence[RotaryTable]:
        """Make a table for layers with a sliding window, and one for the others."""
        family, positions = self.family, self.config.max_position_embeddings
        layer_tables = [
            (rope, family.full_rotary_dim if window is None else family.rotary_dim)
            for rope, window in zip(family.layer_ropes, family.layer_windows, strict=True)
            if rope is not None
        ]
        tables = {
            (rope, size): RotaryTable(rope, size, positions, self.device)
            for rope, size in dict.fromkeys(layer_tables)
        }
        return [tables[kind] for kind in layer_tables]

    @property
    def parameters_per_token(self) -> int:
        inputs = self.model.layer_inputs
        table = 0 if inputs is None else inputs.table.weight.numel()
        return super().parameters_per_token - table

    def is_derived(self, name: str) -> bool:
        return super().is_derived(name) or self._is_unused(name)

    def _is_unused(self, name: str) -> bool:
        """Return whether a tensor would compute keys or values in a layer that reads those of
        another layer."""
        match, family = _KEYS_VALUES.match(name), self.family
        layer = int(match[1]) if match is not None else -1
        return 0 <= layer < len(family.kv_layers) and family.kv_layers[layer] != layer

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return gemma4_config(hf, cls)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 with a vision tower, which is loaded only if rows have images, and in some
    checkpoints an audio tower, which is never loaded."""

    hf_class = "Gemma4Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        decoder = text_part(hf, super().config_from_hf(text_config(hf)))
        return with_tower(hf, decoder, read=axial_tower)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate a checkpoint's tensor name by removing the prefixes of decoder and tower."""
        return piece_beside_gemma_tower(name)

    def skipped_part(self, name: str) -> str | None:
        """Return the name of a tower for its tensors, if it is not built; the loader then leaves
        them out."""
        if _SOUND.match(name):
            return "the tower for sound"
        return VISION_TOWER if self.visual is None and is_of_gemma_tower(name) else None
