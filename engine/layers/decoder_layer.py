"""One layer of a decoder, and the protocols that its two parts follow: the *mixer*, which mixes the
tokens of a row (attention or a recurrence), and the *feed-forward part*, which treats each token
alone. The models of `engine/models` are stacks of these layers."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.feed_forward.mlp_and_experts import MLPAndExperts
from batchgen.engine.layers.layer_inputs import LayerInput
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.tensor_parallel import Stream, summed

NormPlaces = Literal["before", "after", "both"]
"""Where the norms of a layer stand: before its mixer and its feed-forward part, after, or both."""


class Mixer(Protocol):
    """The part of a layer in which a token sees earlier tokens: attention or a recurrence."""

    cache_spec: CacheSpec | None  # what the part keeps between forwards, if anything

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + mixed(hidden); the result may overwrite `residual`.

        `hidden` and `residual` are [T, hidden_size], and `cos_sin` [T, R] is from the `RotaryTable`
        of the layer, None if it rotates nothing. The layer's cache is written for all T tokens, but
        with `outputs` the result is [R, hidden_size], of the wanted tokens alone.
        """


class FeedForward(Protocol):
    """The part of a layer that treats each token by itself: an MLP, or experts."""

    def __call__(self, hidden: Tensor, residual: Tensor, ctx: ForwardContext) -> Stream:
        """Return residual + f(hidden), all [T, hidden_size]; it may overwrite `residual`."""


@runtime_checkable
class HasInputProjection(Protocol):
    """A part in which one projection alone reads the hidden states, in FP8 if it computes so."""

    @property
    def input_projection(self) -> Linear: ...


class DecoderLayer(nn.Module):
    """Mixer and feed-forward part, each of which is added to the residual stream.

    A norm stands before each part, after it, or at both places: `before` normalises what the mixer
    and the feed-forward part read, and `after` what they yield. The stream behind the layer is
    multiplied by `scalar` [1], which needs norms after the parts, and that of tokens on a canvas by
    `canvas_scalar` [1] instead. A feed-forward part without a
    norm before it reads the stream as it is. `own_input` adds what the layer reads besides the
    stream, before the product with the scalar, and needs such norms, too. `mixer_name` and
    `mlp_name` are the parts' names in checkpoints. A layer may lack one of the parts; the norm
    before the other, the first of `before`, is called `norm` then.
    """

    def __init__(
        self,
        mixer: Mixer | None,
        mlp: FeedForward | None,
        *,
        before: tuple[RMSNorm, RMSNorm | None] | None,
        after: tuple[RMSNorm, RMSNorm] | None = None,
        scalar: nn.Parameter | None = None,
        canvas_scalar: nn.Parameter | None = None,
        own_input: LayerInput | None = None,
        mixer_name: str = "self_attn",
        mlp_name: str = "mlp",
    ) -> None:
        super().__init__()
        parts = {"mixer": mixer_name, "mlp": mlp_name, "own_input": ""}
        both = mixer is not None and mlp is not None
        names = _norm_names(after is not None) if both else _ONLY_NORM
        self.checkpoint_names = parts | names
        self.mixer = mixer
        self.mlp = mlp
        first, second = (None, None) if before is None else before
        if mixer is None:
            first, second = None, first
        self.mixer_norm: RMSNorm | None = first
        self.mlp_norm: RMSNorm | None = second
        assert both or (before is not None and before[1] is None and after is None)
        self.mixer_post_norm: RMSNorm | None = after and after[0]
        self.mlp_post_norm: RMSNorm | None = after and after[1]
        assert after is not None or (scalar is None and own_input is None)
        assert scalar is not None or canvas_scalar is None
        self.own_input, self.layer_scalar = own_input, scalar
        self.canvas_scalar = canvas_scalar

    @property
    def normed_parts(self) -> list[tuple[object, RMSNorm]]:
        """The parts of the layer that read what a norm yields, each with its norm."""
        pairs = [(self.mixer, self.mixer_norm), (self.mlp, self.mlp_norm)]
        if isinstance(self.mlp, MLPAndExperts):
            pairs += [(self.mlp.mlp, self.mlp.mlp_norm), (self.mlp.moe, self.mlp.moe_norm)]
        return [(part, norm) for part, norm in pairs if norm is not None]

    @property
    def cache_spec(self) -> CacheSpec | None:
        """What the layer keeps between forwards."""
        return None if self.mixer is None else self.mixer.cache_spec

    def forward(
        self,
        stream: Stream,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None = None,
    ) -> Stream:
        """Return the residual stream after this layer, [T, hidden_size], or [R, hidden_size] of
        `outputs`.

        `stream` is the residual stream before it, which is overwritten; other arguments are as for
        `Mixer`.
        """
        if self.mixer is not None:
            stream = self._mixed(self.mixer, stream, cos_sin, ctx, outputs)
        elif outputs is not None:
            stream = summed(stream)[outputs.index]
        if self.mlp is None:
            return stream
        hidden, residual = _normed(self.mlp_norm, stream)
        if (norm := self.mlp_post_norm) is None:
            return self.mlp(hidden, residual, ctx)
        yielded: Tensor = norm.of_stream(self.mlp(hidden, torch.zeros_like(residual), ctx))[0]
        whole = residual + yielded
        if self.own_input is not None:
            whole = self.own_input(whole, ctx, outputs)
        if self.layer_scalar is None:
            return whole
        if self.canvas_scalar is None or not ctx.canvas_tokens:
            return whole.mul_(self.layer_scalar)
        whole[: ctx.canvas_tokens].mul_(self.canvas_scalar)
        whole[ctx.canvas_tokens :].mul_(self.layer_scalar)
        return whole

    def _mixed(
        self,
        mixer: Mixer,
        stream: Stream,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return the residual stream behind the mixer."""
        hidden, residual = _normed(self.mixer_norm, stream)
        if (norm := self.mixer_post_norm) is None:
            return mixer(hidden, residual, cos_sin, ctx, outputs)
        mixed = mixer(hidden, torch.zeros_like(residual), cos_sin, ctx, outputs)
        chosen = residual if outputs is None else residual[outputs.index]
        result: Tensor = chosen + norm.of_stream(mixed)[0]
        return result


_ONLY_NORM = {"mixer_norm": "norm", "mlp_norm": "norm"}


def _normed(norm: RMSNorm | None, stream: Stream) -> tuple[Any, Tensor]:
    """Return what a part of a layer reads, and the residual stream with pending sums."""
    if norm is not None:
        return norm.of_stream(stream)
    whole = summed(stream)
    return whole, whole


def _norm_names(has_after: bool) -> dict[str, str]:
    """Return what checkpoints call the norms: a norm after the mixer takes the name that the one
    before the feed-forward part has otherwise."""
    if not has_after:
        return {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "mixer_norm": "input_layernorm",
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
