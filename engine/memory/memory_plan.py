"""The memory plan: how the device's memory is divided between weights, caches and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.base.engine_config import ResolvedConfig
from batchgen.engine.base.host_limits import available_memory
from batchgen.engine.base.outputs import OutputColumn
from batchgen.engine.caches.model_caches import (
    CacheSizes,
    ModelCaches,
    paged_token_bytes,
    row_bytes,
    state_bytes,
)
from batchgen.engine.execution.graph_shapes import GraphShapes, launch_bound_tokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.models.token_model import TokenModel
from batchgen.kernels.attention.decode_plan import split_length

CPU_SHARE = 0.3
"""The share of a CPU's available memory that the caches may take."""
_SNAPSHOT_SHARE = 0.1
"""The largest share of the caches' memory for state snapshots if the user gives no number."""
_SNAPSHOTS_PER_ROW = 4
"""The most state snapshots per row in flight that are kept when the user gives no number."""
GRAPH_BYTES = 8 * 2**20
"""A bound on the memory of one captured graph: the driver's record of it and its outputs."""
LIBRARY_BYTES = 256 * 2**20
"""A reserve for kernels that are loaded later and for cuBLAS's workspaces."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the engine uses its memory, in bytes. The names are those of metrics.json."""

    weights: int  # the parameters of all models
    # The activations of the largest prefill and of the largest sampling step, and the CUDA graphs.
    # It is 0 on a CPU, where this memory is not reserved.
    work_space: int
    kv_cache: int  # the paged cache of all models, including the planes of columns of context scope
    num_blocks: int  # the number of blocks in the paged cache, including the scratch block
    kv_tokens: int  # the number of tokens that fit into the paged cache
    total: int | None  # the whole memory of the GPU; None for a CPU
    # The states of the rows in flight and their records, for models with recurrent layers.
    row_states: int = 0
    checkpoints: int = 0  # the states that are kept for prefix reuse
    num_checkpoints: int = 0  # the number of states that are kept for prefix reuse

    def __str__(self) -> str:
        parts = [f"weights {_gib(self.weights)}"]
        if self.work_space:
            parts.append(f"work space and CUDA graphs {_gib(self.work_space)}")
        parts.append(f"KV cache {_gib(self.kv_cache)} ({self.kv_tokens:,} tokens)")
        if self.row_states:
            parts.append(f"row states {_gib(self.row_states)}")
        if self.checkpoints:
            parts.append(f"checkpoints {_gib(self.checkpoints)} ({self.num_checkpoints:,} states)")
        return ", ".join(parts) + ("" if self.total is None else f" of {_gib(self.total)}")


class ModelUse(NamedTuple):
    """A model and how a strategy runs it."""

    model: TokenModel  # the model, on its device
    # Every number of tokens per row that a decode forward of this model can have.
    widths: tuple[int, ...]
    forward_rows: int = 1  # the most rows that a decode forward has for each row of the batch
    columns: tuple[OutputColumn, ...] = ()  # the columns of context scope that the model records
    all_hidden: bool = False  # the hidden states of all tokens of a prefill are wanted

    def caches(self, sizes: CacheSizes) -> ModelCaches:
        """Allocate the caches of the model's layers on its device."""
        model = self.model
        return ModelCaches.allocate(
            model.cache_specs,
            self.columns,
            sizes,
            width=max(self.widths),
            dtype=model.dtype,
            device=model.device,
        )

    def graph_shapes(self, config: ResolvedConfig) -> GraphShapes:
        """Choose the sizes of batches that are captured as CUDA graphs for this model."""
        model = self.model
        # Contexts count as short only if no layer's attention would split them.
        short_tokens = min(
            (split_length(config.max_num_seqs, s.num_kv_heads) for s in model.attention_shapes),
            default=0,
        )
        short_blocks = short_tokens // config.block_size
        return GraphShapes(
            max_rows=config.max_num_seqs * self.forward_rows,
            max_blocks=config.row_blocks,
            chunk_tokens=config.chunk_tokens,
            prefill_tokens=launch_bound_tokens(
                len(model.cache_specs), model.parameters_per_token, config.max_batched_tokens
            ),
            short_blocks=short_blocks if short_blocks < config.row_blocks else 0,
            widths=self.widths,
            all_tokens=bool(self.columns) or self.all_hidden,
        )


def plan_memory(uses: Sequence[ModelUse], config: ResolvedConfig) -> MemoryPlan:
    """Decide how many blocks and snapshots the caches have: as many as the user asked for, else
    what the free memory holds, but no more than all rows in flight can fill at full length. The
    models share one device and one numbering of blocks.

    Raises:
        ValueError: there is no room for the states of all rows in flight, for the snapshots or the
            cache that the user asked for, for one block, or for one row of `max_model_len` tokens
            if the user gave that length.
    """
    device, parallel = uses[0].model.device, uses[0].model.parallel
    if device.type == "cpu":
        # The ranks share the machine's memory.
        room = int(available_memory() * CPU_SHARE) // parallel.size
        return divide_memory(uses, config, Room(parallel.least(room)))
    total = torch.cuda.get_device_properties(device).total_memory
    activations = sum(_activation_bytes(use, config) for use in uses)
    room = _free_cuda_bytes(device, config) - activations
    return divide_memory(uses, config, Room(parallel.least(room), activations, total))


class Room(NamedTuple):
    """The memory for everything that rows keep, in bytes."""

    caches: int  # what the caches may take
    activations: int = 0  # `MemoryPlan.work_space`
    total: int | None = None  # of the GPU; None for a CPU


def divide_memory(uses: Sequence[ModelUse], config: ResolvedConfig, given: Room) -> MemoryPlan:
    """Divide the memory that is given for caches, as `plan_memory` says; the weights need not be
    loaded."""
    room, total = given.caches, given.total
    advice = "set kv_cache_gib"
    if total is not None:
        advice = "raise gpu_memory_utilization, lower max_batched_tokens or free the GPU"
    row_states = sum(_row_state_bytes(use, config) for use in uses)
    if row_states > room:
        raise ValueError(
            f"the states of {config.max_num_seqs} rows need {_gib(row_states)}, and {_gib(room)} "
            "are left: lower max_num_seqs"
        )
    room -= row_states
    state = sum(state_bytes(use.model.cache_specs) for use in uses)
    num_snapshots = _num_snapshots(state, room, config)
    room -= num_snapshots * state
    if config.kv_cache_gib is not None:
        asked, advice = int(config.kv_cache_gib * 2**30), "raise kv_cache_gib"
        if total is not None and asked > room:
            raise ValueError(
                f"kv_cache_gib is {config.kv_cache_gib}, but {max(room, 0) / 2**30:.2f} GiB are "
                "left after weights and work space: lower it, or raise gpu_memory_utilization"
            )
        room = asked
    per_block = config.block_size * cache_token_bytes(uses)
    num_blocks = _num_blocks(per_block, room, config, advice)
    return MemoryPlan(
        weights=weight_bytes(uses),
        work_space=given.activations,
        kv_cache=num_blocks * per_block,
        num_blocks=num_blocks,
        kv_tokens=(num_blocks - 1) * config.block_size,
        total=total,
        row_states=row_states,
        checkpoints=num_snapshots * state,
        num_checkpoints=num_snapshots,
    )


def cache_token_bytes(uses: Sequence[ModelUse]) -> int:
    """Return the bytes that one token takes in the paged caches of all models."""
    return sum(
        paged_token_bytes(use.model.cache_specs, use.columns, use.model.dtype) for use in uses
    )


def weight_bytes(uses: Sequence[ModelUse]) -> int:
    """Return the bytes of the parameters of all models."""
    return sum(use.model.weight_bytes for use in uses)


def _row_state_bytes(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the bytes for the states and records of all rows in flight and of the scratch slot."""
    specs = use.model.cache_specs
    per_row = row_bytes(specs, max(use.widths), config.most_pending)
    return (1 + config.max_num_seqs) * per_row


def _num_snapshots(state: int, room: int, config: ResolvedConfig) -> int:
    """Return how many snapshots of `state` bytes are kept for prefix reuse, given `room` bytes.
    Raises ValueError if the number that the user asked for does not fit."""
    if not state or not config.prefix_caching:
        return 0
    if config.state_checkpoints is None:
        most = _SNAPSHOTS_PER_ROW * config.max_num_seqs
        return min(int(room * _SNAPSHOT_SHARE) // state, most)
    if config.state_checkpoints * state > room:
        raise ValueError(
            f"state_checkpoints is {config.state_checkpoints}, which need "
            f"{_gib(config.state_checkpoints * state)}, and {_gib(room)} are left: lower it"
        )
    return config.state_checkpoints


def _num_blocks(per_block: int, room: int, config: ResolvedConfig, advice: str) -> int:
    """Return how many blocks of `per_block` bytes `room` bytes hold, with the scratch block. Raises
    ValueError if there are too few; the message ends with the advice."""
    most = config.max_num_seqs * config.row_blocks + 1
    if not per_block:  # Without attention, blocks are only counted and need no memory.
        return most
    num_blocks = min(room // per_block, most)
    needed = config.row_blocks + 1 if config.is_len_asked_for else 2
    if num_blocks < needed:
        raise ValueError(
            f"the KV cache would have {max(room, 0) / 2**30:.3f} GiB, too little for "
            f"{(needed - 1) * config.block_size} tokens ({needed * per_block / 2**30:.3f} GiB): "
            f"{advice}, or lower max_model_len"
        )
    return num_blocks


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _free_cuda_bytes(device: torch.device, config: ResolvedConfig) -> int:
    """Return the bytes that are free within `gpu_memory_utilization` of the GPU's memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - config.gpu_memory_utilization))


def _activation_bytes(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the bytes that a step needs besides weights and caches: for the larger of prefill and
    decode, measured on the scratch block, for the pool of all CUDA graphs, though most are captured
    later or never, and for sampling."""
    model, width = use.model, max(use.widths)
    runner = scratch_runner(use, config)
    prefill = _peak(model.device, lambda: largest_prefill(runner, use, config))
    rows = config.max_num_seqs
    inputs = _largest_decode_inputs(runner, use, config)
    decode = _peak(model.device, lambda: _run_decode(runner, inputs, use, config))
    graphs = 0
    if config.cuda_graph:
        shapes = use.graph_shapes(config)
        graphs = decode + 3 * inputs.block_tables.nbytes + len(shapes) * GRAPH_BYTES
        if shapes.prefill_tokens:
            graphs += prefill * shapes.prefill_tokens // config.max_batched_tokens
    # The logits and their float32 copy for penalties; the rows' histories, copied when rows join.
    sampling = rows * width * model.vocab_size * (model.dtype.itemsize + 4)
    sampling += rows * config.max_model_len * 3 * 8
    return max(prefill, decode) + graphs + sampling + LIBRARY_BYTES


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work` and return the most bytes that torch reserved meanwhile, beyond those before."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _scratch_inputs(
    runner: ModelRunner, lens: npt.NDArray[np.int64], num_blocks: int
) -> ModelInputs:
    """Make rows of these lengths that attend to all their tokens but own only the scratch block."""
    positions = np.concatenate([np.arange(n) for n in lens])
    return replace(
        runner.scratch_inputs(lens, num_blocks),
        positions=torch.as_tensor(positions, device=runner.device),
        context_lens=lens,
    )


def scratch_runner(use: ModelUse, config: ResolvedConfig) -> ModelRunner:
    """Make a runner of the model whose caches hold little more than the scratch block."""
    # With the records that the engine keeps, because kernels are compiled for their number.
    sizes = CacheSizes(2, config.block_size, num_rows=0, most_pending=config.most_pending)
    return ModelRunner(use.model, use.caches(sizes))


def largest_prefill(runner: ModelRunner, use: ModelUse, config: ResolvedConfig) -> None:
    """Run a prefill of the most tokens, with logits for as many rows as can be in flight."""
    longest = config.max_model_len
    lens = [longest] * (config.max_batched_tokens // longest)
    if rest := config.max_batched_tokens - sum(lens):
        lens.append(rest)
    inputs = _scratch_inputs(runner, np.array(lens), config.row_blocks)
    rows = np.zeros(config.max_num_seqs, np.int64)
    runner.prefill(PrefillInputs(inputs, rows), use.all_hidden)


def largest_decode(runner: ModelRunner, use: ModelUse, config: ResolvedConfig) -> None:
    """Run a decode step of the most rows, with as many tokens of prefill as come beside them."""
    _run_decode(runner, _largest_decode_inputs(runner, use, config), use, config)


def _largest_decode_inputs(
    runner: ModelRunner, use: ModelUse, config: ResolvedConfig
) -> ModelInputs:
    """Make the inputs of `largest_decode`."""
    rows = config.max_num_seqs * use.forward_rows + _chunk_beside(use, config)
    return _scratch_inputs(runner, np.full(rows, max(use.widths)), config.row_blocks)


def _run_decode(
    runner: ModelRunner, inputs: ModelInputs, use: ModelUse, config: ResolvedConfig
) -> None:
    """Run a decode step, with logits for the tokens of all rows and of the chunk beside them."""
    yielding = config.max_num_seqs * max(use.widths) + _chunk_beside(use, config)
    runner.compute_logits(runner.hidden_states(inputs)[:yielding])


def _chunk_beside(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the most tokens of prefill that a decode step has beside its rows."""
    return config.chunk_tokens if max(use.widths) == 1 else 0
