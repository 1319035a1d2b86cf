"""Runs one forward of a model: from the tokens of a batch to their hidden states.

`ModelRunner` calls `run_forward` for each step, and `ForwardGraphs` captures it. The tokens come in
one or two *parts*: those of decoding rows, and those of a prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import (
    ForwardContext,
    ImageFeatures,
    ImagePlanes,
    OutputTokens,
    RowMetadata,
)
from batchgen.engine.caches.model_caches import ModelCaches
from batchgen.engine.caches.replay import ReplayStep
from batchgen.engine.caches.row_states import RowStates
from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.models.token_model import TokenModel
from batchgen.kernels.attention.kv_cache import slot_mapping
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.lora.lora_tokens import lora_tokens
from batchgen.kernels.rules import BitRules


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a forward that attention and recurrent layers compute together: those
    of the decoding rows, or those of a prefill."""

    inputs: ModelInputs  # the T tokens and their B rows
    # [T] int32, the row of each token; None if all rows have the same number of tokens.
    rows: Tensor | None = None
    # Maps a tile size in tokens to the tiles of prefill attention. Required in a captured graph,
    # which does not know the rows' lengths; None: cut from `inputs.query_lens`.
    tiles: Mapping[int, Tensor] | None = None
    # The number of tokens of each row in a decode step; None for a prefill.
    width: int | None = None
    # [B + 1] int32, the index of each row's first token, for models with recurrent layers. Required
    # in a captured prefill; None: computed from the rows' lengths.
    starts: Tensor | None = None
    # The image tokens; None if there are none. At most one part of a forward has some.
    images: ImageFeatures | ImagePlanes | None = None
    # Whether each row's tokens form a canvas (the block of tokens that a diffusion model writes at
    # once), whose tokens attend to the whole canvas and to all tokens before it. Parts with
    # canvases come first and have `ModelInputs.hidden`.
    canvas: bool = False


class Forward(Protocol):
    """Computes the hidden states of all tokens of the parts, or only of `outputs`. It can be
    captured as a CUDA graph, so it neither waits for the device nor reads data of the device."""

    def __call__(self, parts: Sequence[Part], outputs: OutputTokens | None = None) -> Tensor: ...


def run_forward(
    model: TokenModel,
    caches: ModelCaches,
    block_length: int,
    rules: BitRules,
    parts: Sequence[Part],
    outputs: OutputTokens | None = None,
) -> Tensor:
    """Run a model's forward over the tokens of all parts. Returns the hidden states of all tokens
    [T, hidden_size], or of `outputs` [R, hidden_size].

    Args:
        block_length: the block length of block-causal attention, which is causal between blocks and
            full inside a block; 1 is ordinary causal attention.
        rules: what the bits of a row may depend on.
        outputs: the R tokens whose hidden states the caller needs; None: all tokens.
    """
    kv_slots = [_slots(part, part.inputs.block_tables, caches) for part in parts]
    window_slots = [
        _slots(part, part.inputs.window_tables, caches)
        for part in parts
        if part.inputs.window_tables is not None
    ]
    if model.lora is not None:
        # The linear layers read this while the forward is being launched.
        slots = _joined([_lora_slots(part) for part in parts])
        model.lora.tokens = lora_tokens(slots, model.lora.num_slots)
        if outputs is not None and len(outputs.index) != len(slots):
            model.lora.outputs = lora_tokens(slots[outputs.index], model.lora.num_slots)
    hidden_inputs = [part.inputs.hidden for part in parts if part.inputs.hidden is not None]
    context = ForwardContext(
        caches.layers,
        _joined(kv_slots),
        [_attention_metadata(part, block_length, rules) for part in parts],
        [] if caches.states is None else [_row_metadata(part, caches.states) for part in parts],
        caches.columns,
        _joined(hidden_inputs) if model.reads_hidden or parts[0].canvas else None,
        outputs,
        _rope_positions(parts) if model.turns_apart else None,
        _images(parts),
        window_slots=_joined(window_slots) if window_slots else None,
        adapted=model.lora is not None,
        canvas_tokens=sum(len(part.inputs.input_ids) for part in parts if part.canvas),
    )
    hidden: Tensor = model(
        _joined([part.inputs.input_ids for part in parts]),
        _joined([part.inputs.positions for part in parts]),
        context,
    )
    if model.lora is not None:
        model.lora.tokens = model.lora.outputs = None
    return hidden


def _attention_metadata(part: Part, block_length: int, rules: BitRules) -> AttentionMetadata:
    """Return what the attention layers read about a part."""
    positions, widened = part.inputs.positions, 0
    if part.canvas:
        # Every token gets the position of the canvas's last token, so that causal attention lets it
        # see the whole canvas. Windows become longer by as much as the first token moved.
        rows = positions.view(part.inputs.num_rows, -1)
        positions, widened = rows[:, -1:].expand_as(rows).flatten(), rows.shape[1] - 1
    return AttentionMetadata(
        positions,
        tuple(part.inputs.query_lens.tolist()),
        tuple(part.inputs.context_lens.tolist()),
        part.inputs.block_tables,
        part.tiles,
        decode_width=part.width,
        block_length=block_length,
        window_tables=part.inputs.window_tables,
        last_seen=part.inputs.last_seen,
        replayed=_replayed(part, rules),
        rules=rules,
        widened=widened,
    )


def _lora_slots(part: Part) -> Tensor:
    """Return the adapter slots of a part's tokens, [T] int64."""
    inputs = part.inputs
    if part.rows is not None and inputs.lora_slots is not None:
        return inputs.lora_slots.index_select(0, part.rows)
    slots = inputs.lora_slots_of_tokens
    assert slots is not None
    return slots


def _replayed(part: Part, rules: BitRules) -> tuple[int, ...] | None:
    """Return how many tokens of each row attention computes as decode steps do; None if there are
    none."""
    replayed = part.inputs.replayed
    return tuple(replayed.tolist()) if rules.replay and replayed is not None else None


def _slots(part: Part, tables: Tensor, caches: ModelCaches) -> Tensor:
    """Compute the KV slots of a part's tokens [T] int64 from its block tables [B, N]. A KV slot is
    the place of a token in the paged cache: block · block_size + offset."""
    return slot_mapping(part.inputs.positions, part.rows, tables, caches.block_size)


def _rope_positions(parts: Sequence[Part]) -> Tensor:
    """Return the positions at which rotary tables are read, [T] or [T, 3]."""
    positions_of_parts = [part.inputs.rotary_positions for part in parts]
    if any(positions.dim() == 2 for positions in positions_of_parts):
        positions_of_parts = [
            p if p.dim() == 2 else p.unsqueeze(1).expand(-1, 3) for p in positions_of_parts
        ]
    return _joined(positions_of_parts)


def _images(parts: Sequence[Part]) -> ImageFeatures | ImagePlanes | None:
    """Return the image tokens of the part that has some; None if there are none."""
    start = 0
    for part in parts:
        if part.images is not None:
            return part.images.behind(start)
        start += len(part.inputs.input_ids)
    return None


def _row_metadata(part: Part, states: RowStates) -> RowMetadata:
    """Describe a part's rows for the model's recurrent layers."""
    inputs, device = part.inputs, part.inputs.positions.device
    assert inputs.state_slots is not None
    starts, lens = part.starts, None
    if starts is None:
        lens = tuple(inputs.query_lens.tolist())
        # An upload would put a host address into a captured graph, so a decode step computes its
        # starts on the device.
        if part.width is not None:
            last = part.width * inputs.num_rows
            starts = torch.arange(0, last + 1, part.width, dtype=torch.int32, device=device)
        else:
            starts = upload([0, *inputs.query_lens.cumsum().tolist()], torch.int32, device)
    snapshots = None if part.width is not None else inputs.snapshots
    replayed, replay = None, list[ReplayStep]()
    if inputs.replayed is not None:
        assert inputs.replayed_before is not None
        replayed = tuple(inputs.replayed.tolist())
        if states.fold > 1:
            replay = states.replay(
                inputs.state_slots, inputs.query_lens, inputs.replayed, inputs.replayed_before
            )
    return RowMetadata(
        inputs.state_slots, inputs.positions, starts, part.width, snapshots, lens, replayed, replay
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors on their first axis. A single tensor is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
