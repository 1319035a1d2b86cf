"""The interface of a model to `ModelRunner`: it computes hidden states and logits of tokens, and
declares the caches that it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import (
    AttentionSpec,
    CacheSpec,
    LatentSpec,
    StateSpec,
    longest_window,
)
from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.lora.layer_lora import LoRAState
from batchgen.engine.models.packing import pack_layers
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.sampling.logits import Logits
from batchgen.engine.vision.vision_tower import VisionTower
from batchgen.kernels.four_bit.panels import WORD_VALUES
from batchgen.kernels.lora.lora_tokens import lora_tokens
from batchgen.kernels.rules import BY_BATCH, BitRules


class TokenModel(nn.Module, ABC):
    """A stack of layers with an output layer: a model, or a head that continues from another model.

    Every operation treats each token separately, except where a layer reads its cache through the
    `ForwardContext`: attention reads the paged cache, recurrent layers the row's state. So a
    token's result depends only on its own row.
    """

    reads_hidden: ClassVar[bool] = False
    """Whether the model reads a hidden state of another model with each token
    (`ForwardContext.hidden`)."""

    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    vocab_size: int
    num_parameters: int  # on this rank, without scales; shared parameters count once
    weight_bytes: int  # on this rank, including scales
    parallel: TensorParallel = ALONE
    fp8_cache: bool = False  # whether attention keeps its keys and values in FP8
    lora: LoRAState | None = None  # the adapters of the layers; None without any
    # Whether rotary positions may differ from tokens' positions (`rope_positions`).
    turns_apart: bool = False
    turns_by_axes: bool = False  # whether rotary positions may have three axes
    # After `pack`: why a token's bits depend on its batch, as a sentence for the user. None if they
    # do not, and on a GPU, where batchgen does not promise it.
    batch_dependence: str | None = None
    _packed_by: BitRules | None = None  # the rules of the last `pack`; None before

    def count_parameters(self) -> None:
        """Set `num_parameters` and `weight_bytes`, before weights are packed."""
        parameters = dict(self.named_parameters())
        self.weight_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self.num_parameters = sum(
            # int32 parameters are words of several 4-bit weights.
            parameter.numel() * (WORD_VALUES if parameter.dtype == torch.int32 else 1)
            for name, parameter in parameters.items()
            if not name.endswith("scales")
        )

    @property
    def where(self) -> Placement:
        """The device, dtype and ranks of the layers' parameters."""
        return Placement(self.device, self.dtype, self.parallel, self.fp8_cache)

    @property
    def parameters_per_token(self) -> int:
        """How many parameters a token uses; fewer than all in a mixture of experts."""
        return self.num_parameters

    @property
    def weight_bytes_per_token(self) -> int:
        """Approximately how many bytes of weights a token uses, assuming equal sizes."""
        return self.weight_bytes * self.parameters_per_token // self.num_parameters

    @property
    def tower(self) -> VisionTower | None:
        """The vision tower; None if the model reads no images."""
        return None

    @property
    @abstractmethod
    def cache_specs(self) -> Sequence[CacheSpec | None]:
        """What each layer keeps between forwards, in order; None for one that keeps nothing."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute the hidden states from which `own_logits` computes logits.

        Args:
            input_ids: [T] int64, the tokens.
            positions: [T] int64, their absolute positions in their rows.

        Returns:
            [T, hidden_size] in the model's dtype, or [R, hidden_size] if `ctx.outputs` names R
                tokens.
        """

    @abstractmethod
    def own_logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns of logits (`Logits.own`), in the model's dtype, from hidden
        states [R, hidden_size]."""

    def mean_embeddings(self, logits: Tensor) -> Tensor:
        """Compute the mean embeddings [R, hidden_size] of tokens with these logits [R, V]."""
        raise NotImplementedError("only models that denoise canvases read distributions")

    def class_scores(self, hidden: Tensor) -> Tensor:
        """Compute a classifier's scores [R, C] in the model's dtype, from hidden states [R,
        hidden_size]."""
        raise NotImplementedError("only classifiers score classes")

    @property
    def adapts_logits(self) -> bool:
        """Whether the output layer has adapters."""
        return False

    @contextmanager
    def adapted_logits(self, lora_slots: Tensor | None) -> Iterator[None]:
        """Let `own_logits` apply the adapters in these slots [R] inside the context."""
        if self.lora is None or lora_slots is None or not self.adapts_logits:
            yield
            return
        self.lora.tokens = lora_tokens(lora_slots, self.lora.num_slots)
        try:
            yield
        finally:
            self.lora.tokens = None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute all logits [R, vocab_size]."""
        return Logits(self.own_logits(hidden), self.vocab_size, self.parallel).whole()

    def pack(self, rules: BitRules = BY_BATCH) -> None:
        """Convert the loaded weights to the layout for computing. Afterwards they cannot be loaded
        again. A model that an earlier engine has packed by these rules is left unchanged.

        Args:
            rules: what the bits of a row may depend on.
        """
        if self._packed_by is rules:
            return
        self._packed_by = rules
        shapes = self.attention_shapes
        self.batch_dependence = pack_layers(self, shapes, self.dtype, self.device, rules)

    @property
    def attention_shapes(self) -> set[AttentionSpec]:
        """The distinct attention specs of the layers. On a GPU, tile sizes depend on them."""
        return {spec for spec in self.cache_specs if isinstance(spec, AttentionSpec)}

    @property
    def has_latents(self) -> bool:
        """Whether some layer has latent attention."""
        return any(isinstance(spec, LatentSpec) for spec in self.cache_specs)

    @property
    def window(self) -> int | None:
        """The largest window of all layers; None if no layer has one."""
        return longest_window(self.cache_specs)

    @property
    def has_row_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return any(isinstance(spec, StateSpec) for spec in self.cache_specs)
