"""How many KV blocks fit, and their allocation."""

from __future__ import annotations

import os

import numpy as np
import torch

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.model_config import ModelConfig
from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.sampler import SamplingInputs, sample
from batchgen.engine.sampling_params import SamplingParams
from batchgen.kernels.kv_cache import KVCache

_CPU_SHARE = 0.3
"""Of the available memory: a CPU shares its memory with everything else."""


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


def choose_num_blocks(model: DenseForCausalLM, config: EngineConfig, max_model_len: int) -> int:
    """Blocks of the KV cache, the scratch block included: as given, else what free memory allows,
    and no more than all rows in flight at full length can fill.

    Raises:
        ValueError: there is no room for one row of `max_model_len` tokens if that was asked for,
            or for one block.
    """
    per_block = kv_bytes_per_block(model.config, config.block_size, model.dtype)
    row_blocks = -(-max_model_len // config.block_size)
    if config.kv_cache_gib is not None:
        room = int(config.kv_cache_gib * 2**30)
        advice = "raise kv_cache_gib"
    elif model.device.type == "cuda":
        room = _free_cuda_bytes(model, config, max_model_len)
        advice = "raise gpu_memory_utilization, lower max_batched_tokens or free the GPU"
    else:
        room = int(_available_cpu_bytes() * _CPU_SHARE)
        advice = "set kv_cache_gib"
    num_blocks = min(room // per_block, config.max_num_seqs * row_blocks + 1)
    needed = row_blocks + 1 if config.max_model_len is not None else 2
    if num_blocks < needed:
        raise ValueError(
            f"the KV cache would have {max(room, 0) / 2**30:.3f} GiB, too little for "
            f"{(needed - 1) * config.block_size} tokens ({needed * per_block / 2**30:.3f} GiB): "
            f"{advice}, or lower max_model_len"
        )
    return num_blocks


def _available_cpu_bytes() -> int:
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_cuda_bytes(model: DenseForCausalLM, config: EngineConfig, max_model_len: int) -> int:
    """What is left of the allowed share after weights and the largest prefill and sampling step."""
    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _largest_step(model, config, max_model_len)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    return int(total * config.gpu_memory_utilization) - used_by_others - peak


def _largest_step(model: DenseForCausalLM, config: EngineConfig, max_model_len: int) -> None:
    """Run the costliest step on the scratch block alone."""
    kv_caches = allocate_kv(
        model.config, 2, config.block_size, dtype=model.dtype, device=model.device
    )
    runner = ModelRunner(model, kv_caches)
    lens = [max_model_len] * (config.max_batched_tokens // max_model_len)
    if rest := config.max_batched_tokens - sum(lens):
        lens.append(rest)
    zeros = torch.zeros(config.max_batched_tokens, dtype=torch.int64, device=model.device)
    positions = torch.cat([torch.arange(n, device=model.device) for n in lens])
    tables = zeros.new_zeros((len(lens), -(-max(lens) // config.block_size)))
    inputs = ModelInputs(zeros, positions, tables, tuple(lens), tuple(lens))
    rows = config.max_num_seqs
    output = runner.forward(inputs, logits_of=zeros.new_zeros(rows))
    params = SamplingParams(
        top_k=50, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=True, top_logprobs=20
    )
    sampling = SamplingInputs.build(
        params=[params] * rows,
        prompt_lens=[1] * rows,
        histories=[[0]] * rows,
        stop_ids=[()] * rows,
        capacities=[2] * rows,
        device=model.device,
    )
    sample(output.logits, sampling, output.positions)
