"""The base class of all model families, `CausalLM`: a decoder and an output head, which computes
logits or a classifier's scores.

The loader finds a model's class in `model_registry.py` and fills its *weight slots*: places of
parameters with the names of the checkpoint's tensors that fill them (`WeightSlot`). `ModelRunner`
runs the model. Its residual *stream* is a tensor [T, hidden_size], or that tensor with results
that are still to be added (`Stream`), so that the next norm's kernel can add them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.interface.hidden_columns import HIDDEN_STATES
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.embedding import Embedding, LogitsLayer
from batchgen.engine.layers.feed_forward.self_conditioning import SelfConditioning
from batchgen.engine.layers.layer_inputs import LayerInputs
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.mxfp4_format import WeightFormat
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.rotary import RotaryTable
from batchgen.engine.layers.weight_slot import WeightSlot, named_parts, weight_slots
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.quantise import quantise_layer
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import ALONE, Stream, TensorParallel, summed
from batchgen.engine.vision.make_tower import make_tower
from batchgen.engine.vision.vision_tower import VisionTower
from batchgen.kernels.rules import BY_BATCH, BitRules

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The weight slots of the embedding and of the output layer, which may share a weight."""


class Decoder(nn.Module):
    """The part of a model from token ids to hidden states: embedding, layers and final norm.

    Args:
        rotaries: the rotary table of each layer; None for a layer without rotary embedding.
        layer_inputs: computes the inputs of layers besides the residual stream, if they have any.
        hidden_column: records the hidden states after `hidden_layers`
            (`ModelConfig.hidden_layers`).
        self_conditioning: computes the inputs of tokens on canvases.
    """

    checkpoint_names: Mapping[str, str] = {"layer_inputs": ""}

    def __init__(
        self,
        embed_tokens: Embedding,
        layers: Iterable[DecoderLayer],
        norm: RMSNorm,
        rotaries: Iterable[RotaryTable | None],
        layer_inputs: LayerInputs | None = None,
        hidden_column: OutputColumn | None = None,
        hidden_layers: Sequence[int] = (),
        self_conditioning: SelfConditioning | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.layer_inputs = embed_tokens, layer_inputs
        self.self_conditioning = self_conditioning
        self._hidden_column = hidden_column
        self._column_indices = {layer: index for index, layer in enumerate(hidden_layers)}
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotaries = tuple(rotaries)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute hidden states after the final norm; see `TokenModel.forward`."""
        stream: Stream = self.embed_tokens(input_ids)
        # The features of images replace the embeddings of their tokens.
        if ctx.images is not None:
            stream = ctx.images.put(summed(stream))
        if self.self_conditioning is not None and ctx.canvas_tokens:
            stream = self.self_conditioning(summed(stream), ctx)
        if self.layer_inputs is not None:
            stream = summed(stream)
            ctx = replace(ctx, layer_inputs=self.layer_inputs(input_ids, stream, ctx.images))
        # Layers may share a rotary table, whose angles are computed once.
        tables = dict.fromkeys(self.rotaries)
        rotary_positions = positions if ctx.rope_positions is None else ctx.rope_positions
        angles = {table: None if table is None else table(rotary_positions) for table in tables}
        # Only the last layer may compute fewer tokens (`wanted`). A layer with adapters knows by
        # the number of its tokens whether it has all of them or those of `outputs`. So if there are
        # as many outputs as tokens, it computes all, and the outputs are selected below.
        wanted = ctx.outputs
        if wanted is not None and ctx.adapted and len(wanted.index) == len(input_ids):
            wanted = None
        stream = self._recorded(0, stream, ctx)
        for index, (layer, table) in enumerate(zip(self.layers, self.rotaries, strict=True)):
            # The last layer writes its cache for all tokens, but returns only those of `outputs`.
            outputs = wanted if index == len(self.layers) - 1 else None
            stream = layer(stream, angles[table], ctx, outputs)
            if ctx.images is not None and index < ctx.images.num_layers:
                stream = ctx.images.add(summed(stream), index)
            if index + 1 < len(self.layers):  # those of the last layer are recorded after the norm
                stream = self._recorded(index + 1, stream, ctx)
        hidden: Tensor
        hidden, _ = self.norm.of_stream(stream)
        if wanted is None and ctx.outputs is not None:
            hidden = hidden[ctx.outputs.index]
        self._recorded(len(self.layers), hidden, ctx)
        return hidden

    def _recorded(self, layer: int, stream: Stream, ctx: ForwardContext) -> Stream:
        """Record the hidden states after `layer` layers in the output column, if that is requested.
        Return the stream."""
        column = self._hidden_column
        if column is None or layer not in self._column_indices or column.name not in ctx.columns:
            return stream
        states = summed(stream)
        ctx.record(column, states, self._column_indices[layer])
        return states


def hidden_column(config: ModelConfig) -> OutputColumn | None:
    """Return the output column of the hidden states after `hidden_layers`; None if there are
    none."""
    if not (layers := config.hidden_layers):
        return None
    return OutputColumn(
        HIDDEN_STATES,
        np.dtype(np.float32),
        (len(layers), config.hidden_size),
        scope="context",
        metadata=(("layers", str(list(layers))),),
    )


_BARE = re.compile(r"embed_tokens\.|layers\.\d|norm\.weight$")
"""The beginnings of tensor names in files of a decoder without its head."""


def full_name(name: str) -> str:
    """Return a checkpoint's tensor name with the prefix `model.`, which files of a decoder without
    its head leave out."""
    return f"model.{name}" if _BARE.match(name) else name


class CausalLM(TokenModel):
    """A decoder with an output layer for logits, or with a classifier's head, or without a head.

    Each family is a subclass in a separate file, and a line in the registry. The subclass makes the
    layers (`make_layer`), the final norm and the rotary tables, and translates the configuration.
    It knows nothing of strategies. This base class does not know which kinds of layers there are:
    `cache_specs` says what they keep, and `checkpoint_slots` maps their weights to checkpoints.

    Args:
        heads: which of `config.heads` to build: models that continue from this one's hidden states.
        form: quantises each layer to FP8 or 4 bits before the next layer is made, so that memory
            never holds all layers in `dtype`.
        vision: whether to build the vision tower.

    Attributes:
        skipped_parts: the parts of the checkpoint that were not loaded, in words for the user.
    """

    hf_class: ClassVar[str]
    """The class of transformers that reads this model's config.json."""
    is_diffusion: ClassVar[bool] = False
    """Whether the model fills in masked tokens (`ModelConfig.diffusion`)."""
    denoises_canvases: ClassVar[bool] = False
    """Whether the model denoises canvases of random tokens (`ModelConfig.canvas_length`)."""
    has_flat_files: ClassVar[bool] = False
    """Whether config.json may have the decoder's keys at the top level, next to `vision_config`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        heads: Collection[str] = (),
        form: WeightFormat | None = None,
        parallel: TensorParallel = ALONE,
        vision: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.device, self.dtype = device, dtype
        self.fp8_cache = config.kv_cache_dtype == "fp8"
        self.form = form and form.renamed(self._module_name)
        self.skipped_parts: tuple[str, ...] = ()
        self.visual = self._vision_tower() if vision else None
        # `turns_apart`: rotary positions differ from the positions in the row. `turns_by_axes`:
        # they have three axes (time, height, width), because tokens of images do.
        by_axes = self.visual is not None and self.visual.config.mrope_sections is not None
        self.turns_apart, self.turns_by_axes = by_axes or config.rope_border is not None, by_axes
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.model = Decoder(
            Embedding(
                config.vocab_size,
                config.hidden_size,
                scale=self.embedding_scale,
                where=self.where,
            ),
            (self._layer(index) for index in range(config.num_layers)),
            self.make_norm(),
            self.make_rotaries(),
            self.make_layer_inputs(),
            hidden_column(config),
            config.hidden_layers,
            self.make_self_conditioning(),
        )
        self.lm_head = self.score = None
        if config.has_logits:
            self.lm_head = LogitsLayer(config.hidden_size, config.vocab_size, where=self.where)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
        if config.labels is not None:
            sizes = config.hidden_size, len(config.labels)
            self.score = Linear(*sizes, bias=False, quantisable=False, where=self.where)
        self.count_parameters()
        if self.fp8_cache and not self.attention_shapes:
            raise ValueError(
                f"model.kv_cache_dtype is fp8, and {config.architecture} has no cache of keys "
                "and values: leave it out"
            )
        self.heads: Mapping[str, TokenModel] = {name: self._head(name) for name in heads}

    def _module_name(self, name: str) -> str:
        """Return the name that weight slots use for a checkpoint's module. The name of its weight
        decides, because a model may rename only that."""
        weight = self.piece_name(full_name(f"{name}.weight"), self.config)
        if weight.endswith(".weight"):
            return weight.removesuffix(".weight")
        return self.piece_name(full_name(name), self.config)

    def _vision_tower(self) -> VisionTower:
        config = self.config.vision
        if config is None:
            lack = self.config.vision_lack
            why = "" if lack is None else f": {lack}"
            raise ValueError(f"{self.config.architecture} reads no images{why}")
        # Every rank has the whole tower and encodes some of the images.
        return make_tower(config, where=Placement(self.device, self.dtype))

    def _layer(self, index: int) -> DecoderLayer:
        """Make a layer, and quantise it if the model is."""
        layer = self.make_layer(index)
        if self.form is not None:
            quantise_layer(layer, f"model.layers.{index}", self.form)
        return layer

    def _head(self, name: str) -> TokenModel:
        """Make a head, and quantise its layers if the model is."""
        head = self.make_head(name)
        if self.form is not None:
            for path, part in named_parts(head, name):
                if isinstance(part, DecoderLayer):
                    quantise_layer(part, path, self.form)
            head.count_parameters()
        return head

    @property
    def tower(self) -> VisionTower | None:
        return self.visual

    @property
    def parameters_per_token(self) -> int:
        """How many parameters a text token uses. Those of the vision tower do not count."""
        tower = () if self.visual is None else self.visual.parameters()
        return self.num_parameters - sum(parameter.numel() for parameter in tower)

    @classmethod
    def hf_config(cls) -> type[PretrainedConfig]:
        """Return the class of transformers that reads this model's config.json."""
        import transformers

        config_class: type[PretrainedConfig] = getattr(transformers, cls.hf_class)
        return config_class

    @classmethod
    @abstractmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        """Translate transformers' configuration of a checkpoint. Raises ValueError, naming the key,
        for what the engine does not support."""

    @abstractmethod
    def make_layer(self, index: int) -> DecoderLayer:
        """Make the layer with this index, starting at 0. The layers of a model may differ."""

    @abstractmethod
    def make_norm(self) -> RMSNorm:
        """Make the norm that follows the last layer."""

    def make_rotaries(self) -> Sequence[RotaryTable | None]:
        """Make the rotary tables, and return the table of each layer; None for a layer without
        rotary embedding."""
        return [None] * self.config.num_layers

    def make_layer_inputs(self) -> LayerInputs | None:
        """Make the module that computes the layers' inputs besides the residual stream; None if
        they have none."""
        return None

    def make_self_conditioning(self) -> SelfConditioning | None:
        """Make the module that computes the inputs of tokens on canvases; None for models without
        canvases."""
        return None

    def make_head(self, name: str) -> TokenModel:
        """Make one of `config.heads`, which may share weights with the model. Raises ValueError for
        another name."""
        has = f"it has {', '.join(self.config.heads)}" if self.config.heads else "it has none"
        raise ValueError(f"{self.config.architecture} has no head {name!r}: {has}")

    @property
    def embedding_scale(self) -> float:
        """The factor of token embeddings."""
        return 1.0

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The layers of the decoder, in their order."""
        layers: list[DecoderLayer] = []
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layers.append(layer)
        return layers

    @property
    def cache_specs(self) -> Sequence[CacheSpec | None]:
        """What each layer keeps between forwards, in the order of the layers."""
        return [layer.cache_spec for layer in self.layers]

    @classmethod
    def declared_columns(cls, config: ModelConfig) -> tuple[OutputColumn, ...]:
        """Return the output columns that a model of this configuration can record: columns of
        context scope, which have a value for each token that the model reads."""
        column = hidden_column(config)
        return () if column is None else (column,)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute hidden states after the final norm, as `TokenModel.forward` says."""
        hidden: Tensor = self.model(input_ids, positions, ctx)
        return hidden

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns of logits; see `TokenModel.own_logits`."""
        if self.lm_head is None:  # a model without an output layer generates no tokens
            return hidden.new_empty((len(hidden), 0))
        logits: Tensor = self.lm_head(hidden)
        return logits

    @property
    def adapts_logits(self) -> bool:
        head = self.lm_head
        return head is not None and (head.lora is not None or head.saved is not None)

    def class_scores(self, hidden: Tensor) -> Tensor:
        """Compute a classifier's scores, as `TokenModel.class_scores` says."""
        assert self.score is not None
        scores: Tensor = self.score(hidden)
        return scores

    def pack(self, rules: BitRules = BY_BATCH) -> None:
        """Convert the loaded weights of the model and its heads to the layout for computing."""
        super().pack(rules)
        for head in self.heads.values():
            head.pack(rules)

    def checkpoint_slots(self) -> list[WeightSlot]:
        """Return the weight slots of the model and its built heads. A weight shared by embedding
        and output layer has one slot, under the embedding's name."""
        slots = list(weight_slots(self, ""))
        if self.config.tie_word_embeddings:
            slots = [slot for slot in slots if slot.pieces != (LM_HEAD,)]
        for name, head in self.heads.items():
            slots += weight_slots(head, name)
        return slots

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Return the name that weight slots use for a checkpoint's tensor. Families whose
        checkpoints use other names override this; pieces of a head begin with the head's name."""
        return name

    def skipped_part(self, name: str) -> str | None:
        """Return, in words for the user, the part of the checkpoint to which a tensor belongs, if
        the part is not loaded; None if it is."""
        return None

    def is_derived(self, name: str) -> bool:
        """Return whether a checkpoint's tensor can be ignored, because it follows from others or
        belongs to a part of the model that is not built."""
        if name == LM_HEAD and self.lm_head is None:
            return True
        return name in self.copies or name.endswith(".rotary_emb.inv_freq")

    @property
    def copies(self) -> Mapping[str, str]:
        """Maps the names of tensors that repeat other tensors of the checkpoint to the names of
        those."""
        return {LM_HEAD: EMBEDDING} if self.config.tie_word_embeddings else {}
