"""Runs the largest steps that an engine may run, to measure how much memory they take.

The steps run on the *scratch block*, block 0 of the paged cache, which belongs to no row. The
memory plan reserves the measured memory, and gives the rest to the caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.vision.vision_tower import VisionTower
from batchgen.kernels.attention.metadata import MOST_ROWS

GRAPH_BYTES = 8 * 2**20
"""An upper bound on the memory of one captured graph: the driver's record and the graph's
outputs."""
LIBRARY_BYTES = 256 * 2**20
"""A reserve for kernels that are loaded later, and for cuBLAS's workspaces."""

_TABLE_ENTRY_BYTES = 8
_SCORE_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""The most bytes of float32 logits of given tokens that are scored at once. A CPU copies them, and
is as fast with few."""


def activation_bytes(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the bytes that a step needs besides weights and caches: the larger of prefill and
    decode, measured on the scratch block; the pool of all CUDA graphs, even of those that are
    captured later or never; images; and sampling."""
    model, width = use.model, max(use.widths)
    runner = scratch_runner(use, config)
    prefill = _peak(model.device, lambda: largest_prefill(runner, use, config))
    rows = config.max_num_seqs
    inputs = _largest_decode_inputs(runner, use, config)
    decode = _peak(model.device, lambda: _run_decode(runner, inputs, use, config))
    prefill += replay_bytes(decode, config)
    tower = model.tower
    images = 0
    if tower is not None:
        images = _peak(model.device, lambda: largest_image(tower, config))
    graphs = 0
    if config.cuda_graph:
        shapes = use.graph_shapes(config)
        # The graphs' fixed inputs have three block tables of this size (`ForwardGraphs`).
        graphs = decode + 3 * inputs.block_tables.nbytes + len(shapes) * GRAPH_BYTES
        if shapes.alone_tokens:
            graphs += prefill * shapes.alone_tokens // config.max_batched_tokens
        if tower is not None:
            graphs += tower.feature_bytes(shapes.alone_tokens + shapes.chunk_tokens)
    # The logits and their float32 copy for penalties; the rows' histories, copied when rows join.
    logits = max(rows * width, max_scored_tokens(model, config))
    sampling = logits * model.vocab_size * (model.dtype.itemsize + 4)
    sampling += rows * config.max_model_len * 3 * 8
    return max(prefill, decode, images) + graphs + sampling + LIBRARY_BYTES


def replay_bytes(decode: int, config: ResolvedConfig) -> int:
    """Return the additional bytes of a prefill that replays tokens as decode steps: tables of each
    token's blocks (also for windows), and the bytes of one such step.

    Args:
        decode: the bytes of the largest decode step, which may have fewer rows.
    """
    if not config.rules.replay:
        return 0
    tables = 2 * config.max_batched_tokens * config.row_blocks * _TABLE_ENTRY_BYTES
    return tables + decode * max(1, -(-MOST_ROWS // config.max_num_seqs))


def max_scored_tokens(model: TokenModel, config: ResolvedConfig) -> int:
    """Return the most given tokens that are scored at once, a multiple of 16: as many as have
    float32 logits within a budget. On a GPU they are at most the rows of a decode step, whose
    logits need memory anyway, but at least 32."""
    fitting = _SCORE_BYTES[model.device.type] // (4 * model.vocab_size)
    limit = 4096 if model.device.type == "cpu" else max(32, config.max_num_seqs)
    return max(16, min(fitting, limit) // 16 * 16)


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work`, and return by how many bytes it raised the peak of torch's reserved memory."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def largest_image(tower: VisionTower, config: ResolvedConfig) -> None:
    """Encode a square image of approximately the most image tokens of a step, or as many images of
    the only supported size."""
    rules, count = tower.config.rules, 1
    pixels = (math.isqrt(config.image_tokens - 1) + 1) * rules.pixels_per_token
    if rules.image_side is not None:
        pixels = rules.image_side
        count = max(1, config.image_tokens // rules.num_tokens(pixels, pixels))
    image = torch.zeros((pixels, pixels, 3), dtype=torch.uint8, device=tower.device)
    tower([image] * count)


def _scratch_inputs(
    runner: ModelRunner, lens: npt.NDArray[np.int64], num_blocks: int
) -> ModelInputs:
    """Make rows of these lengths that attend to all their tokens, but own only the scratch
    block."""
    positions = np.concatenate([np.arange(n) for n in lens])
    return replace(
        runner.scratch_inputs(lens, num_blocks),
        positions=torch.as_tensor(positions, device=runner.device),
        context_lens=lens,
    )


def scratch_runner(use: ModelUse, config: ResolvedConfig) -> ModelRunner:
    """Make a runner of the model with the smallest caches: little more than the scratch block."""
    # The number of records must be the engine's, because kernels are compiled for it.
    sizes = CacheSizes(2, config.block_size, num_rows=0, fold=config.fold)
    return ModelRunner(use.model, use.caches(sizes), rules=config.rules)


def largest_prefill(
    runner: ModelRunner, use: ModelUse, config: ResolvedConfig, *, looks_ahead: bool = False
) -> None:
    """Run a prefill of the most tokens, with logits for as many rows as can be in flight. With
    `looks_ahead`, use the kernels for images whose tokens attend to each other."""
    longest = config.max_model_len
    lens = [longest] * (config.max_batched_tokens // longest)
    if rest := config.max_batched_tokens - sum(lens):
        lens.append(rest)
    inputs = _scratch_inputs(runner, np.array(lens), config.row_blocks)
    if runner.model.turns_apart:  # `rope_shifts` would require rows of equal length
        positions = inputs.positions
        if runner.model.turns_by_axes:
            positions = positions.unsqueeze(1).expand(-1, 3).contiguous()
        inputs = replace(inputs, rope_shifts=None, rope_positions=positions)
    if looks_ahead:
        inputs = replace(inputs, last_seen=inputs.positions)
    rows = np.zeros(config.max_num_seqs, np.int64)
    runner.prefill(PrefillInputs(inputs, rows, use.all_hidden))


def largest_decode(runner: ModelRunner, use: ModelUse, config: ResolvedConfig) -> None:
    """Run a decode step of the most rows, together with the most prefill tokens of a mixed step."""
    _run_decode(runner, _largest_decode_inputs(runner, use, config), use, config)


def _largest_decode_inputs(
    runner: ModelRunner, use: ModelUse, config: ResolvedConfig
) -> ModelInputs:
    """Make the inputs of `largest_decode`."""
    rows = config.max_num_seqs * use.forward_rows + _mixed_chunk(use, config)
    return _scratch_inputs(runner, np.full(rows, max(use.widths)), config.row_blocks)


def _run_decode(
    runner: ModelRunner, inputs: ModelInputs, use: ModelUse, config: ResolvedConfig
) -> None:
    """Run a decode step, with logits for the tokens of all rows and of the mixed step's chunk."""
    yielding = config.max_num_seqs * max(use.widths) + _mixed_chunk(use, config)
    slots = inputs.lora_slots_of_tokens
    yielding_slots = None if slots is None else slots[:yielding]
    runner.compute_logits(runner.hidden_states(inputs)[:yielding], yielding_slots)


def _mixed_chunk(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the most prefill tokens in the same forward as decoding rows."""
    return config.chunk_tokens if max(use.widths) == 1 else 0
