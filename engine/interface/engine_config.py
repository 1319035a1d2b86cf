"""The settings of an engine: batch sizes, memory and speed.

`EngineConfig` holds what a user chose; None means a default. `EngineConfig.resolve` fills in the
defaults, which depend on the model and the device, and returns the `ResolvedConfig` that the parts
of an engine read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from batchgen.kernels.rules import BY_BATCH, BY_ROW, FOLDED, BitRules

if TYPE_CHECKING:
    import torch  # Importing it takes seconds, and only annotations need it.

_CHUNK_TOKENS = 256
"""The default number of prompt tokens that a large model reads in a mixed step."""
_LARGE_MODEL = 3 * 10**9
"""The bytes of weights from which a model counts as large; an H100 reads this many in a
millisecond.

A smaller model gains less from a mixed step than the host needs to prepare it (measured with 0.6
and 8 billion parameters). On a CPU no model gains, because prefill is bound by arithmetic there.
"""
_SPARSE = 4
"""A model counts as sparse if it has this many times the weights that a token uses.

Reading the weights dominates its decode steps however many rows there are, so more rows at once are
faster: with 30 billion parameters, of which a token uses 3, on an H200, 1,024 tokens of 512 rows
took 28.0 s at once, and 44.4 s as 256 at a time. Larger prefills also fill the experts' tiles
better.
"""

_MOST_ROWS = 65_536
"""The largest `max_num_seqs`: tables in memory have an entry for each row in flight."""
_MOST_IMAGE_TOKENS = 1_048_576
"""The largest `image_tokens`: as many as an image of 32,768 pixels each way has."""
_MOST_GIB = 1_000_000
"""The largest `kv_cache_gib`, more than any device has."""


class Sizes(NamedTuple):
    """What the defaults depend on, besides the kind of device."""

    weights: int  # the bytes of the model's weights
    weights_per_token: int  # the bytes of the weights that one token uses
    memory: int  # the bytes of the GPU's memory; 0 on a CPU
    width: int  # the most tokens of a row in a decode forward
    row_states: int = 0  # the bytes of the states and records of one row in flight
    cache_room: int = 0  # a rough guess of the bytes that the caches may take

    @property
    def is_sparse(self) -> bool:
        """Whether the model is sparse and its weights leave half of the GPU's memory free. With
        less free memory, the caches need it more than larger batches do."""
        return _SPARSE * self.weights_per_token <= self.weights <= self.memory // 2

    def fitting_rows(self, rows: int) -> int:
        """Return how many of `rows` rows can be in flight if their recurrent states take at most
        five eighths of the memory for caches; at least 1."""
        if not self.row_states:
            return rows
        return max(1, min(rows, self.cache_room * 5 // 8 // self.row_states))


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The settings of an engine for one model on one device, with every default filled in."""

    max_num_seqs: int  # the most rows in flight
    max_batched_tokens: int  # the most tokens in one prefill batch
    # The most prompt tokens that are read in one forward with decoding rows, as long as few rows
    # can start; 0 reads prompts only in separate steps.
    chunk_tokens: int
    max_model_len: int  # the most prompt and output tokens of a row together
    is_len_asked_for: bool  # whether the user set `max_model_len`: then one such row must fit
    block_size: int  # the number of tokens in one block of the paged cache
    prefix_caching: bool  # compute a prefix that several rows share only once
    kv_cache_gib: float | None  # the size of the paged cache in GiB; None: all remaining memory
    # The number of snapshots of states for prefix reuse, in models with recurrent layers; None
    # derives it from the free memory.
    state_checkpoints: int | None
    # The share of the GPU's memory that the engine may use, from 0 to 1.
    gpu_memory_utilization: float
    cuda_graph: bool  # replay forwards as CUDA graphs
    overlap: bool  # launch a step before the results of the previous step are read
    image_tokens: int  # the most tokens of the images that are encoded in one step
    rules: BitRules  # what the bits of a row may depend on
    fold: int  # the records that a recurrent layer's decode step folds at once, see `StateCache`

    @property
    def row_blocks(self) -> int:
        """The number of blocks that a row of `max_model_len` tokens takes."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine that a user can choose. Raises ValueError, naming the setting and
    its range, if a value is out of range."""

    # The most rows in flight. None means 256, or 512 for a strategy of one token per row and step
    # if the model is a mixture of experts whose weights leave half of the GPU's memory free. In
    # both cases, the states of recurrent layers may take at most five eighths of the caches'
    # memory.
    max_num_seqs: int | None = None
    # The most tokens in one prefill batch. None means 2048 on a CPU and 8192 on a GPU. For the
    # mixtures of experts above it means 32768, or 16384 with recurrent layers.
    max_batched_tokens: int | None = None
    # The most prompt tokens that are read in one forward with decoding rows, as long as few rows
    # can start; 0 reads prompts only in separate steps. None means 256 on a GPU for models of at
    # least 3 GB of weights, else 0.
    chunk_tokens: int | None = None
    # The most tokens of the images that are encoded in one step, and of one image.
    image_tokens: int = 4096
    # The most prompt and output tokens of a row together; None means as many as the model was made
    # for.
    max_model_len: int | None = None
    block_size: int = 16  # the number of tokens in one block of the paged cache
    prefix_caching: bool = True  # compute a prefix that several rows share only once
    # The size of the paged cache in GiB; None: all remaining memory.
    kv_cache_gib: float | None = None
    # The number of snapshots of states for prefix reuse, in models with recurrent layers; None
    # takes up to a tenth of the caches' memory. Other models have no snapshots.
    state_checkpoints: int | None = None
    # The share of the GPU's memory that the engine may use, from 0 to 1.
    gpu_memory_utilization: float = 0.9
    cuda_graph: bool | None = None  # replay forwards as CUDA graphs; None means on a GPU only
    # Launch a step before the results of the previous step are read; None means on a GPU only,
    # because a CPU computes the step while it is launched.
    overlap: bool | None = None
    # Compute a row to the same bits in any batch, on a GPU as well.
    deterministic: bool = False
    # The number of GPUs (or processes on a CPU) that divide each layer's weights. The caller of the
    # engine starts them.
    tensor_parallel: int = 1
    # How many adapters are on the device at once, in slots of equal size; None: all of them. The
    # others stay in the host's memory until rows need them.
    lora_slots: int | None = None

    def __post_init__(self) -> None:
        checks = (
            (
                "max_num_seqs",
                self.max_num_seqs is None or 1 <= self.max_num_seqs <= _MOST_ROWS,
                f"1 to {_MOST_ROWS:,}",
            ),
            (
                "max_batched_tokens",
                self.max_batched_tokens is None or self.max_batched_tokens >= 1,
                "at least 1",
            ),
            (
                "chunk_tokens",
                self.chunk_tokens is None or self.chunk_tokens >= 0,
                "at least 0",
            ),
            (
                "image_tokens",
                1 <= self.image_tokens <= _MOST_IMAGE_TOKENS,
                f"1 to {_MOST_IMAGE_TOKENS:,}",
            ),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            (
                "block_size",
                self.block_size in (1, 2, 4, 8, 16, 32, 64),
                "a power of 2 up to 64",
            ),
            (
                "kv_cache_gib",
                self.kv_cache_gib is None or 0 < self.kv_cache_gib <= _MOST_GIB,
                f"above 0 and at most {_MOST_GIB:,}",
            ),
            (
                "state_checkpoints",
                self.state_checkpoints is None or self.state_checkpoints >= 0,
                "at least 0",
            ),
            ("lora_slots", self.lora_slots is None or self.lora_slots >= 1, "at least 1"),
            ("tensor_parallel", 1 <= self.tensor_parallel <= 64, "1 to 64"),
            (
                "gpu_memory_utilization",
                0 < self.gpu_memory_utilization <= 1,
                "above 0 and at most 1",
            ),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def resolve(self, device: torch.device, sizes: Sizes, max_model_len: int) -> ResolvedConfig:
        """Fill in the defaults that depend on the device and on the size of the model.

        Args:
            sizes: the sizes of the model, the device and the forwards.
            max_model_len: the most prompt and output tokens of a row together: the result of
                `model_len`, or less if the strategy needs that.

        Raises:
            ValueError: CUDA graphs are on, but the device has none.
        """
        cuda = device.type == "cuda"
        if self.cuda_graph and not cuda:
            raise ValueError(f"cuda_graph is true, but the device is {device.type}: leave it null")
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is None:
            chunk_tokens = _CHUNK_TOKENS if cuda and sizes.weights >= _LARGE_MODEL else 0
        sparse = cuda and sizes.is_sparse
        prefill_tokens = 8192
        if sparse:
            prefill_tokens = 16384 if sizes.row_states else 32768
        rows = sizes.fitting_rows(512 if sparse and sizes.width == 1 else 256)
        return ResolvedConfig(
            max_num_seqs=self.max_num_seqs or rows,
            max_batched_tokens=self.max_batched_tokens or (prefill_tokens if cuda else 2048),
            chunk_tokens=chunk_tokens,
            max_model_len=max_model_len,
            is_len_asked_for=self.max_model_len is not None,
            block_size=self.block_size,
            prefix_caching=self.prefix_caching,
            kv_cache_gib=self.kv_cache_gib,
            state_checkpoints=self.state_checkpoints,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cuda_graph=cuda if self.cuda_graph is None else self.cuda_graph,
            overlap=cuda if self.overlap is None else self.overlap,
            image_tokens=self.image_tokens,
            rules=bit_rules(self.deterministic, device),
            fold=folded_at_once(device),
        )

    def model_len(self, longest: int) -> int:
        """Return the most prompt and output tokens of a row together. `longest` is the model's
        limit. Raises ValueError if `max_model_len` exceeds it."""
        if self.max_model_len is not None and self.max_model_len > longest:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but the model has positions for "
                f"{longest} tokens: lower max_model_len"
            )
        return self.max_model_len or longest


def bit_rules(deterministic: bool, device: torch.device) -> BitRules:
    """Return what the bits of a row may depend on. The rules are for GPUs; a CPU keeps them in
    another way."""
    return BY_ROW if deterministic and device.type == "cuda" else BY_BATCH


def folded_at_once(device: torch.device) -> int:
    """Return how many records a decode step folds at once into the state that it writes back.

    On a GPU a step is bound by memory traffic, so it folds several (`rules.FOLDED`). On a CPU it is
    cheaper to fold each record once.
    """
    return FOLDED if device.type == "cuda" else 1
