"""Forecasts the memory plan before weights are loaded, also for devices that are not present.
`engine_estimate.py` calls this to tell a user whether a job fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.engine.device.host_limits import available_memory
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.layers.linear import Linear
from batchgen.engine.memory.largest_steps import GRAPH_BYTES, LIBRARY_BYTES, replay_bytes
from batchgen.engine.memory.memory_plan import CPU_SHARE, MemoryPlan, Room, divide_memory
from batchgen.engine.memory.model_use import ModelUse, weight_bytes
from batchgen.engine.vision.vision_config import VisionConfig
from batchgen.kernels.four_bit.linear import is_dequantised

_CONTEXT_BYTES = 768 * 2**20
"""The bytes that CUDA itself takes on a GPU: its context and the libraries' code."""
_ACTIVATIONS = 14
"""The most values, in multiples of the hidden size, that are alive per prefill token."""
_PATCH_WIDTHS = 16
"""The most values, in multiples of the tower's width, that are alive per image patch."""
_NUM_GRAPHS = 60
"""Approximately how many CUDA graphs the memory plan reserves memory for."""


def expected_memory(
    uses: Sequence[ModelUse], config: ResolvedConfig, gpu_bytes: int | None
) -> MemoryPlan:
    """Return what `plan_memory` will probably decide once the weights are loaded.

    The division is the same, but the available memory differs. On a GPU, `plan_memory` measures the
    activations by running a forward, and here they are estimated. On a CPU, the weights are not in
    memory yet, so they are subtracted from the free memory.

    Args:
        uses: the models that will run; their parameters may be on the meta device.
        config: the engine's settings for that device.
        gpu_bytes: the memory of the GPU; None for this machine's CPU.

    Raises:
        ValueError: as for `plan_memory`, and if the weights alone do not fit.
    """
    weights = weight_bytes(uses)
    if gpu_bytes is None:
        # The ranks share the machine's memory.
        ranks = uses[0].model.parallel.size
        free = available_memory() - ranks * weights
        if free <= 0:
            raise ValueError(
                f"the weights need {ranks * weights / 2**30:.2f} GiB, and the machine has "
                f"{available_memory() / 2**30:.2f} GiB free"
            )
        return divide_memory(uses, config, Room(int(free * CPU_SHARE) // ranks))
    activations = sum(_activation_bytes(use, config) for use in uses)
    usable = int(gpu_bytes * config.gpu_memory_utilization) - _CONTEXT_BYTES
    if weights + activations > usable:
        raise ValueError(
            f"the weights need {weights / 2**30:.2f} GiB and a step about "
            f"{activations / 2**30:.2f}, and engine.gpu_memory_utilization leaves "
            f"{max(usable, 0) / 2**30:.2f} GiB of the GPU: choose a larger GPU or a smaller model"
        )
    return divide_memory(uses, config, Room(usable - weights - activations, activations, gpu_bytes))


def _activation_bytes(use: ModelUse, config: ResolvedConfig) -> int:
    """Estimate the bytes that a step needs besides weights and caches."""
    model, rows = use.model, config.max_num_seqs * max(use.widths)
    activations = config.max_batched_tokens * _ACTIVATIONS * model.hidden_size
    # Logits twice in the model's dtype, and once in float32.
    logits = rows * model.vocab_size * (2 * model.dtype.itemsize + 4)
    # The token ids of rows with penalties, 8 bytes each: three times, as they are copied when rows
    # join.
    histories = config.max_num_seqs * config.max_model_len * 3 * 8
    graphs = _NUM_GRAPHS * GRAPH_BYTES if config.cuda_graph else 0
    step = activations * model.dtype.itemsize
    mixtures = (part for part in model.modules() if isinstance(part, SparseMoE))
    scratch = [mixture.scratch_bytes(config.max_batched_tokens) for mixture in mixtures]
    if is_dequantised(config.max_batched_tokens, config.rules):
        scratch += [each.scratch_bytes for each in model.modules() if isinstance(each, Linear)]
    step += max(scratch, default=0)
    if model.tower is not None:
        step = max(step, _image_bytes(model.tower.config, config, model.dtype.itemsize))
    again = replay_bytes(0, config)
    return step + logits + histories + graphs + again + LIBRARY_BYTES


def _image_bytes(tower: VisionConfig, config: ResolvedConfig, itemsize: int) -> int:
    """Estimate the bytes that encoding a step's images needs."""
    patches = config.image_tokens * tower.merge_size**2
    values = _PATCH_WIDTHS * tower.width + 2 * tower.mlp_size + 3 * tower.patch_values
    return patches * values * itemsize
