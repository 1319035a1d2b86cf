"""Tensors at fixed addresses for the inputs of captured graphs.

A CUDA graph reads the same addresses at every replay. So `ForwardGraphs` copies each batch into
these tensors first, padded to the captured size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ImageFeatures, ImagePlanes
from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.forward import Part
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.kernels.attention.prefill_plan import cut_tiles


class RaggedInputs:
    """Fixed tensors for a prefill whose row lengths are known only at the replay.

    They hold one row more than a batch can have. This filler row owns only the scratch block, and
    its tokens pad the batch to the captured size.

    Args:
        tokens, rows: the most tokens and rows of a prefill.
        max_blocks: the most cache blocks of a row.
        tiles: the sizes of the model's prefill-attention tiles, in tokens.
        scratch: a row on the scratch block that has every optional input the model reads.
        features: the planes of image features of one token, [1 + K, 1, hidden_size]; None if the
            model reads no images.
    """

    def __init__(
        self,
        tokens: int,
        rows: int,
        max_blocks: int,
        tiles: Collection[int],
        scratch: ModelInputs,
        features: Tensor | None = None,
    ) -> None:
        device = scratch.positions.device
        self._inputs = ModelInputs.on_scratch(
            np.array([*[0] * rows, tokens]),
            max_blocks,
            device,
            states=scratch.state_slots is not None,
            snapshots=scratch.state_slots is not None,
            hidden=scratch.hidden,
            rope_positions=scratch.rope_positions,
            windows=scratch.window_tables is not None,
            lora=scratch.lora_slots is not None,
        )
        self._images: ImagePlanes | None = None
        if features is not None:
            mask = torch.zeros((tokens, 1), dtype=torch.bool, device=device)
            planes, _, width = features.shape
            self._images = ImagePlanes(mask, features.new_zeros((planes, tokens, width)))
        # The row of each token, at first the filler row for all.
        self._rows = torch.full((tokens,), rows, dtype=torch.int32, device=device)
        self._filler = rows
        # Lines as in `PrefillPlan.tiles`; zeros are tiles without tokens. Besides full tiles, each
        # row can have one that is not full.
        self._tiles = {
            size: torch.zeros((-(-tokens // size) + rows, 3), dtype=torch.int32, device=device)
            for size in tiles
        }
        # The index of each row's first token, and the number of tokens at the end.
        self._starts: Tensor | None = None
        if scratch.state_slots is not None:
            self._starts = torch.zeros(rows + 2, dtype=torch.int32, device=device)

    def part(self, size: int) -> Part:
        """Return the first `size` tokens of the fixed inputs as a part of a forward."""
        lens = np.zeros(self._filler + 1, np.int64)
        lens[self._filler] = size
        inputs = replace(self._inputs.first(len(lens), size), query_lens=lens)
        tiles = {tile: cut[: -(-size // tile) + self._filler] for tile, cut in self._tiles.items()}
        images = None if self._images is None else self._images.first(size)
        return Part(inputs, self._rows[:size], tiles, starts=self._starts, images=images)

    def fill(self, inputs: ModelInputs, size: int, images: ImageFeatures | None = None) -> None:
        """Copy a batch with its image tokens into the fixed inputs, and pad it to `size` tokens."""
        fixed, count, rows = self._inputs, len(inputs.input_ids), inputs.num_rows
        fixed.input_ids[:count].copy_(inputs.input_ids)
        fixed.positions[:count].copy_(inputs.positions)
        if fixed.hidden is not None and inputs.hidden is not None:
            fixed.hidden[:count].copy_(inputs.hidden)
        if fixed.rope_positions is not None:
            positions = inputs.rotary_positions
            has_axes = positions.dim() == fixed.rope_positions.dim()
            fixed.rope_positions[:count].copy_(positions if has_axes else positions.unsqueeze(1))
        if self._images is not None:
            self._images.fill(images)
        _fill_tables(fixed, inputs)
        _fill_lora(fixed, inputs)
        device = fixed.positions.device
        row_of = np.full(size, self._filler, np.int32)
        row_of[:count] = np.repeat(np.arange(rows), inputs.query_lens)
        self._rows[:size].copy_(upload(row_of, torch.int32, device))
        for tile, fixed_tiles in self._tiles.items():
            tiles = np.zeros((-(-size // tile) + self._filler, 3), np.int32)
            cut = cut_tiles(inputs.query_lens.tolist(), tile, inputs.context_lens.tolist())
            tiles[: len(cut)] = cut.numpy()
            fixed_tiles[: len(tiles)].copy_(upload(tiles, torch.int32, device))
        if self._starts is not None:
            self._fill_states(inputs, size)

    def _fill_states(self, inputs: ModelInputs, size: int) -> None:
        """Copy the rows' state slots, snapshots and starts. Unused rows get no tokens."""
        fixed, rows = self._inputs, inputs.num_rows
        assert fixed.state_slots is not None and inputs.state_slots is not None
        assert fixed.snapshots is not None and self._starts is not None
        fixed.state_slots[:rows].copy_(inputs.state_slots)
        fixed.state_slots[rows:].zero_()
        fixed.snapshots.zero_()
        if inputs.snapshots is not None:
            fixed.snapshots[:rows].copy_(inputs.snapshots)
        # Unused rows, and the filler row after them, start after the last token of the batch.
        starts = np.full(self._filler + 2, int(inputs.query_lens.sum()), np.int32)
        starts[1 : rows + 1] = inputs.query_lens.cumsum()
        starts[0], starts[-1] = 0, size
        self._starts.copy_(upload(starts, torch.int32, self._starts.device))


def fill_rows(fixed: ModelInputs, inputs: ModelInputs, size: int) -> None:
    """Copy a batch of B rows of W tokens each into the first rows of fixed inputs. The rows from B
    to `size` pad the batch; they use the scratch block and the scratch state slot."""
    rows, tokens = inputs.num_rows, len(inputs.input_ids)
    fixed.input_ids[:tokens].copy_(inputs.input_ids)
    fixed.positions[:tokens].copy_(inputs.positions)
    if fixed.hidden is not None and inputs.hidden is not None:
        fixed.hidden[:tokens].copy_(inputs.hidden)
    _fill_tables(fixed, inputs)
    _fill_lora(fixed, inputs)
    if fixed.state_slots is not None and inputs.state_slots is not None:
        fixed.state_slots[:rows].copy_(inputs.state_slots)
    if fixed.rope_shifts is not None and inputs.rope_shifts is not None:
        fixed.rope_shifts[:rows].copy_(inputs.rope_shifts)
        fixed.rope_shifts[rows:size].zero_()
    if rows < size:
        # A batch without rows is padded with rows of one token.
        width = max(tokens // max(rows, 1), 1)
        fixed.positions[tokens : size * width].zero_()
        fixed.block_tables[rows:size, 0].zero_()
        if fixed.window_tables is not None:
            fixed.window_tables[rows:size, 0].zero_()
        if fixed.state_slots is not None:
            fixed.state_slots[rows:size].zero_()


def _fill_lora(fixed: ModelInputs, inputs: ModelInputs) -> None:
    """Copy adapter slots [B]. Padding rows have no adapter."""
    if fixed.lora_slots is not None and inputs.lora_slots is not None:
        fixed.lora_slots[: inputs.num_rows].copy_(inputs.lora_slots)
        fixed.lora_slots[inputs.num_rows :].zero_()


def _fill_tables(fixed: ModelInputs, inputs: ModelInputs) -> None:
    """Copy block tables [B, N], without columns past the width of the fixed tables. A batch's
    tables grow ahead of need, so they may be wider than its longest row."""
    pairs = [
        (fixed.block_tables, inputs.block_tables),
        (fixed.window_tables, inputs.window_tables),
    ]
    for target, tables in pairs:
        if target is not None and tables is not None:
            rows, blocks = tables.shape
            blocks = min(blocks, target.shape[1])
            target[:rows, :blocks].copy_(tables[:, :blocks])
