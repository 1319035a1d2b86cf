"""Digests of what each operation of a model computed for each token, used to find where a row's
bits depend on its batch.

The audit (`pipelines/proof/audit/operations.py`) runs the same row in two batches, with a `Tape`
watching the model each time, and asks for the first operation whose digests differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from batchgen.engine.layers import linear as linear_layer
from batchgen.engine.layers import norm as norm_layer
from batchgen.engine.layers.feed_forward import experts as experts_layer
from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.engine.layers.feed_forward import moe as moe_layer
from batchgen.engine.layers.mixers import attention as attention_layer
from batchgen.engine.layers.mixers import gated_delta_net as delta_layer
from batchgen.engine.layers.mixers import mamba2 as mamba_layer
from batchgen.engine.layers.mixers import mla as latent_layer
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.parallel import tensor_parallel as streams

_OPERATIONS = 256
"""The most operations of a model that are watched."""
_OPERATIONS_OF: tuple[tuple[Any, str, str | None, Callable[[Any], Tensor] | None], ...] = (
    (linear_layer, "linear", None, None),
    (linear_layer, "add_linear_", None, None),
    (norm_layer, "rms_norm", "norm", None),
    (norm_layer, "rms_norm_of_sum", "sum and norm", None),
    (streams, "add_post_norm", "sum of norms", lambda match: match[0]),
    (mlp_layer, "silu_and_mul", "silu", None),
    (attention_layer, "prepare_qkv", "rotary", None),
    (attention_layer, "paged_attention", "attention", None),
    (attention_layer, "mul_sigmoid", "output gate", None),
    (latent_layer, "prepare_latent", "rotary", None),
    (latent_layer, "latent_attention", "attention", None),
    (delta_layer, "gated_rms_norm", "recurrence", None),
    (mamba_layer, "norm_of_gated", "recurrence", None),
    (moe_layer, "route", "routing", lambda match: match[1]),
    (experts_layer, "grouped_parts", "experts", lambda match: match.transpose(0, 1)),
)
"""The operations to watch, each as (the module that calls it, the function's name there, its label,
how to get the values [tokens, …] from its result). Products have no label: they are named after
their weight."""


class Tape:
    """Digests of the values that each operation computed for the token at each KV slot.

    Attributes:
        plane: [operations, slots] int64, the digests; 0 means that the operation has not seen the
            slot.
        operations: maps (layer index, operation's name, number of earlier calls in this layer and
            forward) to a row of `plane`.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        # A digest is the sum of a token's values, as integers, times these random odd factors.
        draws = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(2**62, (2**18,), generator=draws) * 2 + 1).to(device)
        self.plane = torch.zeros(_OPERATIONS, slots, dtype=torch.int64, device=device)
        self.operations: dict[tuple[int, str, int], int] = {}
        # The current forward: its tokens' KV slots; the layer that runs (None: nothing is
        # recorded); the calls of each operation in that layer; and whether the last layer computes
        # all tokens.
        self._slots = torch.empty(0)
        self._layer: int | None = None
        self._seen: Counter[str] = Counter()
        self._whole = True

    def resize(self, slots: int) -> None:
        """Make room for this number of KV slots and clear all digests."""
        self.plane = self.plane.new_zeros(len(self.plane), slots)

    def first_difference(self, one: Tensor, other: Tensor) -> tuple[str, int] | None:
        """Compare two planes [operations, tokens]. Returns the name of the first operation, in the
        order of the layers, whose digests differ at a token that both have seen, and the index of
        the first such token. Returns None if all agree."""
        order = sorted(self.operations.items(), key=lambda match: (match[0][0], match[1]))
        for (layer, name, _), index in order:
            a, b = one[index], other[index]
            differs = ((a != b) & (a != 0) & (b != 0)).nonzero()
            if len(differs):
                return f"{name} of layer {layer}", int(differs[0])
        return None

    @contextmanager
    def watching(self, model: CausalLM) -> Iterator[None]:
        """Record the operations of the model's layers inside the context."""
        weights = {
            id(module.weight): path.rpartition(".")[2]
            for path, module in model.named_modules()
            if isinstance(module, linear_layer.Linear)
        }
        with ExitStack() as stack:
            handles = [
                model.model.register_forward_pre_hook(self._begin),
                model.model.register_forward_hook(self._end),
            ]
            for index, layer in enumerate(model.layers):
                enter = partial(self._enter, index, index == len(model.layers) - 1)
                handles.append(layer.register_forward_pre_hook(enter))
            for handle in handles:
                stack.callback(handle.remove)
            for module, name, label, rows in _OPERATIONS_OF:
                noting = self._noting(getattr(module, name), label, rows, weights)
                stack.enter_context(_replaced(module, name, noting))
            yield

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin a forward; `args` are those of `Decoder.forward`."""
        _, _, ctx = args
        self._slots, self._layer = ctx.kv_slots, None
        self._whole = ctx.outputs is None
        self.plane.index_fill_(1, self._slots, 0)  # clear what earlier rows left at these slots

    def _enter(self, layer: int, last: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._layer = layer if self._whole or not last else None
        self._seen.clear()

    def _end(self, module: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> None:
        if self._layer is not None:
            self._note("last norm", hidden)
        self._layer = None

    def _noting(
        self,
        run: Callable[..., Any],
        label: str | None,
        rows: Callable[[Any], Tensor] | None,
        weights: dict[int, str],
    ) -> Callable[..., Any]:
        """Return a function that calls `run` and records the result. `label` and `rows` are from
        `_OPERATIONS_OF`; `weights` has the names of weights by their id."""

        def noting(*args: Any, **options: Any) -> Any:
            result = run(*args, **options)
            if self._layer is not None and result is not None:
                names = (weights[id(arg)] for arg in args[1:] if id(arg) in weights)
                self._note(label or next(names), result if rows is None else rows(result))
            return result

        return noting

    def _note(self, name: str, values: Tensor) -> None:
        """Record the digests of an operation's values [tokens, …] in the current layer."""
        assert self._layer is not None
        if len(values) != len(self._slots):  # not of the forward's tokens
            return
        key = self._layer, name, self._seen[name]
        self._seen[name] += 1
        index = self.operations.setdefault(key, len(self.operations))
        values = values.flatten(1).contiguous()
        bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).long()
        digests = bits.mul_(self._factors[: bits.shape[1]]).sum(1)
        self.plane[index].index_copy_(0, self._slots, digests)


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of `owner` inside the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
