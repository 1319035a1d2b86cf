"""What the device's memory is used for: how many KV blocks fit, and their allocation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.execution.cuda_graph import GraphShapes, launch_bound_tokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.kernels.attention.decode import split_length
from batchgen.kernels.attention.kv_cache import KVCache

_CPU_SHARE = 0.3
"""Of the available memory: a CPU shares its memory with everything else."""
_GRAPH_BYTES = 8 * 2**20
"""The driver's record of one captured decode step, with its outputs."""
_LIBRARY_BYTES = 256 * 2**20
"""Kernels loaded later, and the workspaces of the library of matrix products."""


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def allocate_kv(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """One zeroed cache per layer."""
    heads = (config.num_kv_heads, num_blocks, block_size, config.head_dim)
    shape = (config.num_layers, 2, *heads)
    if device.type == "cpu":
        # calloc: memory is taken page by page as blocks are used, not all at the start.
        data = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        planes = torch.from_numpy(data).view(dtype).view(shape)
    else:
        planes = torch.zeros(shape, dtype=dtype, device=device)
    return [KVCache(key, value) for key, value in planes]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine's memory is used for, in bytes.

    Attributes:
        work_space: activations of the largest prefill and sampling step, CUDA graphs; on a CPU 0,
            because it is not reserved there.
        num_blocks: of the KV cache, the scratch block included.
        kv_tokens: that fit into the cache.
        total: of the device; None for a CPU.
    """

    weights: int
    work_space: int
    kv_cache: int
    num_blocks: int
    kv_tokens: int
    total: int | None

    def __str__(self) -> str:
        def gib(size: int) -> str:
            return f"{size / 2**30:.2f} GiB"

        parts = [f"weights {gib(self.weights)}"]
        if self.work_space:
            parts.append(f"work space and CUDA graphs {gib(self.work_space)}")
        parts.append(f"KV cache {gib(self.kv_cache)} ({self.kv_tokens:,} tokens)")
        return ", ".join(parts) + ("" if self.total is None else f" of {gib(self.total)}")


class ModelUse(NamedTuple):
    """A model, how many tokens of a row it reads in one decode forward (all that can occur), and
    how many rows of a forward there may be for each row of the batch."""

    model: DenseForCausalLM
    widths: tuple[int, ...]
    forward_rows: int = 1


def plan_memory(uses: Sequence[ModelUse], config: EngineConfig, max_model_len: int) -> MemoryPlan:
    """Blocks of the KV cache: as given, else what free memory allows after all else, and no more
    than all rows in flight at full length can fill.

    Args:
        uses: the models that run, on one device; each has a KV cache of the same blocks.
        config: resolved for the models' device.

    Raises:
        ValueError: there is no room for one row of `max_model_len` tokens if that was asked for,
            or for one block.
    """
    device = uses[0].model.device
    per_block = sum(
        kv_bytes_per_block(use.model.config, config.block_size, use.model.dtype) for use in uses
    )
    row_blocks = -(-max_model_len // config.block_size)
    work_space, total = 0, None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        work_space = sum(_work_space(use, config, max_model_len) for use in uses)
        room = _free_cuda_bytes(device, config) - work_space
        advice = "raise gpu_memory_utilization, lower max_batched_tokens or free the GPU"
    else:
        room = int(_available_cpu_bytes() * _CPU_SHARE)
        advice = "set kv_cache_gib"
    if config.kv_cache_gib is not None:
        asked, advice = int(config.kv_cache_gib * 2**30), "raise kv_cache_gib"
        if total is not None and asked > room:
            raise ValueError(
                f"kv_cache_gib is {config.kv_cache_gib}, but {max(room, 0) / 2**30:.2f} GiB are "
                "left after weights and work space: lower it, or raise gpu_memory_utilization"
            )
        room = asked
    num_blocks = min(room // per_block, config.max_num_seqs * row_blocks + 1)
    needed = row_blocks + 1 if config.max_model_len is not None else 2
    if num_blocks < needed:
        raise ValueError(
            f"the KV cache would have {max(room, 0) / 2**30:.3f} GiB, too little for "
            f"{(needed - 1) * config.block_size} tokens ({needed * per_block / 2**30:.3f} GiB): "
            f"{advice}, or lower max_model_len"
        )
    return MemoryPlan(
        weights=sum(use.model.num_parameters * use.model.dtype.itemsize for use in uses),
        work_space=work_space,
        kv_cache=num_blocks * per_block,
        num_blocks=num_blocks,
        kv_tokens=(num_blocks - 1) * config.block_size,
        total=total,
    )


def graph_shapes(use: ModelUse, config: EngineConfig, max_model_len: int) -> GraphShapes:
    """What is captured as CUDA graphs.

    Args:
        config: resolved for the model's device.
    """
    model = use.model
    assert config.max_batched_tokens is not None and config.chunk_tokens is not None
    max_blocks = -(-max_model_len // config.block_size)
    short_blocks = split_length(config.max_num_seqs, model.config.num_kv_heads) // config.block_size
    return GraphShapes(
        max_rows=config.max_num_seqs * use.forward_rows,
        max_blocks=max_blocks,
        chunk_tokens=config.chunk_tokens,
        prefill_tokens=launch_bound_tokens(
            model.config.num_layers, model.num_parameters, config.max_batched_tokens
        ),
        short_blocks=short_blocks if short_blocks < max_blocks else 0,
        widths=use.widths,
    )


def _available_cpu_bytes() -> int:
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_cuda_bytes(device: torch.device, config: EngineConfig) -> int:
    """What is left of the allowed share of the device's memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - config.gpu_memory_utilization))


def _work_space(use: ModelUse, config: EngineConfig, max_model_len: int) -> int:
    """Bytes that a step needs besides weights and cache: the largest prefill, measured on the
    scratch block alone, the costliest sampling, and the largest decode step for the graphs' pool.
    """
    model, width = use.model, max(use.widths)
    kv_caches = allocate_kv(
        model.config, 2, config.block_size, dtype=model.dtype, device=model.device
    )
    runner = ModelRunner(model, kv_caches)
    prefill = _peak(model.device, lambda: _largest_prefill(runner, config, max_model_len))
    rows, blocks = config.max_num_seqs, -(-max_model_len // config.block_size)
    assert config.max_batched_tokens is not None and config.chunk_tokens is not None
    more = config.chunk_tokens if width == 1 else 0
    lens = np.full(rows * use.forward_rows + more, width)
    inputs = _scratch_inputs(lens, blocks, model.device)
    yielding = rows * width + more
    decode = _peak(
        model.device, lambda: runner.compute_logits(runner.hidden_states(inputs)[:yielding])
    )
    graphs = 0
    if config.cuda_graph:
        shapes = graph_shapes(use, config, max_model_len)
        graphs = decode + 3 * inputs.block_tables.nbytes + len(shapes) * _GRAPH_BYTES
        if shapes.prefill_tokens:
            graphs += prefill * shapes.prefill_tokens // config.max_batched_tokens
    # The logits and their float32 copy for penalties; histories, of which joining rows make copies.
    sampling = rows * width * model.config.vocab_size * (model.dtype.itemsize + 4)
    sampling += rows * max_model_len * 3 * 8
    return max(prefill, decode) + graphs + sampling + _LIBRARY_BYTES


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes reserved while it works, beyond those of before."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _scratch_inputs(
    lens: npt.NDArray[np.int64], num_blocks: int, device: torch.device
) -> ModelInputs:
    """Rows whose contexts are their tokens, on the scratch block."""
    positions = np.concatenate([np.arange(n) for n in lens])
    inputs = ModelInputs.on_scratch(lens, num_blocks, device)
    return replace(inputs, positions=torch.as_tensor(positions, device=device), context_lens=lens)


def _largest_prefill(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> None:
    """The largest prefill, with the head of as many rows as can end in one."""
    assert config.max_batched_tokens is not None
    lens = [max_model_len] * (config.max_batched_tokens // max_model_len)
    if rest := config.max_batched_tokens - sum(lens):
        lens.append(rest)
    blocks = -(-max_model_len // config.block_size)
    inputs = _scratch_inputs(np.array(lens), blocks, runner.device)
    runner.prefill(inputs, np.zeros(config.max_num_seqs, np.int64))
