"""One layer of a decoder, and the protocols of its two parts.

The *mixer* mixes the tokens of a row (attention or a recurrence); the *feed-forward part* treats
each token separately. The models of `engine/models` are stacks of these layers.

Layers pass on the *residual stream*, to which every part adds its result. A `Stream` is a tensor
[T, hidden_size], or one with results still to be added, such as a sum over all ranks
(`PendingSum`); `summed` adds them.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.layer_inputs import LayerInput
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.tensor_parallel import Stream, summed

NormPlaces = Literal["before", "after", "both"]
"""Where a layer has norms: before its mixer and feed-forward part, after them, or both."""


class Mixer(Protocol):
    """The part of a layer in which a token sees earlier tokens: attention or a recurrence."""

    cache_spec: CacheSpec | None  # what the mixer keeps between forwards; None: nothing

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + mixed(hidden). The result may overwrite `residual`; None stands for
        zeros.

        The layer's cache is written for all T tokens. With `outputs`, the result has only the R
        tokens of `outputs`.

        Args:
            hidden, residual: [T, hidden_size].
            cos_sin: [T, R], from the layer's `RotaryTable`; None without rotary embedding.

        Returns:
            [T, hidden_size], or [R, hidden_size] with `outputs`.
        """


class FeedForward(Protocol):
    """The part of a layer that treats each token separately: an MLP, or experts."""

    def __call__(self, hidden: Tensor, residual: Tensor | None, ctx: ForwardContext) -> Stream:
        """Return residual + f(hidden), all [T, hidden_size]. The result may overwrite `residual`;
        None stands for zeros."""


@runtime_checkable
class HasInputProjection(Protocol):
    """A part of a layer whose input is read by one projection only. If that projection computes in
    FP8, the norm before it can quantise the input."""

    @property
    def input_projection(self) -> Linear: ...


@runtime_checkable
class HasNormedParts(Protocol):
    """A feed-forward part of several parts, each of which reads the result of a norm of its own."""

    @property
    def normed_parts(self) -> list[tuple[object, RMSNorm]]: ...

    def inputs_of(self, stream: Stream) -> tuple[Any, Tensor]:
        """Return what the parts read of the residual stream, and the stream with its pending sums
        added."""


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward part, each added to the residual stream.

    Args:
        mixer, mlp: the two parts; one of them may be None.
        before: the norms of what the mixer and the feed-forward part read. None, or None for the
            feed-forward part, reads the stream as it is. If a part is missing, the first norm is
            the other part's, and is called `norm` in checkpoints.
        after: the norms of the parts' results.
        scalar: [1], multiplies the stream after the layer. Requires `after`.
        canvas_scalar: [1], used instead of `scalar` for the tokens of canvases.
        own_input: adds an input of this layer to the stream, before the scalar. Requires `after`.
        mixer_name, mlp_name: the parts' names in checkpoints.
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
        """The parts of the layer that read the result of a norm, each with this norm."""
        pairs = [(self.mixer, self.mixer_norm), (self.mlp, self.mlp_norm)]
        normed: list[tuple[object, RMSNorm]] = [
            (part, norm) for part, norm in pairs if norm is not None
        ]
        return normed + (self.mlp.normed_parts if isinstance(self.mlp, HasNormedParts) else [])

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
        `outputs`. `stream` is the residual stream before it, which is overwritten; the other
        arguments are as for `Mixer`."""
        if self.mixer is not None:
            stream = self._mixed(self.mixer, stream, cos_sin, ctx, outputs)
        elif outputs is not None:
            stream = summed(stream)[outputs.index]
        if self.mlp is None:
            return stream
        if self.mlp_norm is None and isinstance(self.mlp, HasNormedParts):
            hidden, residual = self.mlp.inputs_of(stream)
        else:
            hidden, residual = _normed(self.mlp_norm, stream)
        if (norm := self.mlp_post_norm) is None:
            return self.mlp(hidden, residual, ctx)
        result = self.mlp(hidden, None, ctx)
        # Canvases have a scalar of their own.
        scalar = self.layer_scalar if self.canvas_scalar is None else None
        if self.own_input is None:
            stream = norm.add_to(residual, result, scalar)
        else:
            whole = summed(norm.add_to(residual, result))
            stream = self.own_input(whole, ctx, outputs, scalar)
        if self.canvas_scalar is None or self.layer_scalar is None:
            return stream
        whole, canvases = summed(stream), ctx.canvas_tokens
        if canvases:
            whole[:canvases].mul_(self.canvas_scalar)
        whole[canvases:].mul_(self.layer_scalar)
        return whole

    def _mixed(
        self,
        mixer: Mixer,
        stream: Stream,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return the residual stream after the mixer."""
        hidden, residual = _normed(self.mixer_norm, stream)
        if (norm := self.mixer_post_norm) is None:
            return mixer(hidden, residual, cos_sin, ctx, outputs)
        mixed = mixer(hidden, None, cos_sin, ctx, outputs)
        chosen = residual if outputs is None else residual[outputs.index]
        return norm.add_to(chosen, mixed)


_ONLY_NORM = {"mixer_norm": "norm", "mlp_norm": "norm"}
"""The names in checkpoints of the norm of a layer with one part."""


def _normed(norm: RMSNorm | None, stream: Stream) -> tuple[Any, Tensor]:
    """Return a part's input, and the residual stream with its pending sums added."""
    if norm is not None:
        return norm.of_stream(stream)
    whole = summed(stream)
    return whole, whole


def _norm_names(has_after: bool) -> dict[str, str]:
    """Return the names of the norms in checkpoints. With norms after the parts, the name
    `post_attention_layernorm` means another norm than without."""
    if not has_after:
        return {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "mixer_norm": "input_layernorm",
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
