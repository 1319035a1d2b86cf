"""How the engine runs. Nothing here decides what a row's tokens are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_CHUNK_TOKENS = 256
_LARGE_MODEL = 3 * 10**9
"""Bytes of weights that an H100 reads in a millisecond. Smaller models gain less by a mixed step
than its preparation costs the host (measured with 0.6 and 8 billion parameters). On a CPU prompts
are bound by arithmetic, so nothing is gained."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Attributes:
        max_num_seqs: rows in flight at most.
        max_batched_tokens: tokens per prefill batch at most; None is 8192 on a GPU and 2048 on
            a CPU.
        chunk_tokens: prompt tokens that are read beside decoding rows in one step, at most; 0 reads
            prompts in steps of their own. None is 256 on a GPU for models whose weights take long
            to read, else 0.
        max_model_len: prompt and output tokens of a row at most; None is what the model was made
            for.
        block_size: tokens per KV block.
        prefix_caching: compute a prefix that rows share only once.
        kv_cache_gib: size of the KV cache in GiB; None chooses it from free memory.
        gpu_memory_utilization: share of the GPU's memory to use if kv_cache_gib is None.
        cuda_graph: replay decode steps as CUDA graphs; None is on a GPU only.
        overlap: launch a step before the one before it is read; None is on a GPU only, because a
            CPU computes within the launch.

    Raises:
        ValueError: a value is out of range; the message names it and says what is allowed.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int | None = None
    chunk_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    prefix_caching: bool = True
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graph: bool | None = None
    overlap: bool | None = None

    def __post_init__(self) -> None:
        checks = (
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
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
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            (
                "block_size",
                self.block_size in (1, 2, 4, 8, 16, 32, 64),
                "a power of 2 up to 64",
            ),
            ("kv_cache_gib", self.kv_cache_gib is None or self.kv_cache_gib > 0, "above 0"),
            (
                "gpu_memory_utilization",
                0 < self.gpu_memory_utilization <= 1,
                "above 0 and at most 1",
            ),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def resolve(self, device: torch.device, weight_bytes: int) -> EngineConfig:
        """With a value for everything that None leaves to the device and the size of the model, but
        max_model_len and kv_cache_gib.

        Raises:
            ValueError: CUDA graphs are asked for on a device that has none.
        """
        cuda = device.type == "cuda"
        if self.cuda_graph and not cuda:
            raise ValueError(f"cuda_graph is true, but the device is {device.type}: leave it null")
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is None:
            chunk_tokens = _CHUNK_TOKENS if cuda and weight_bytes >= _LARGE_MODEL else 0
        return replace(
            self,
            chunk_tokens=chunk_tokens,
            max_batched_tokens=self.max_batched_tokens or (8192 if cuda else 2048),
            cuda_graph=cuda if self.cuda_graph is None else self.cuda_graph,
            overlap=cuda if self.overlap is None else self.overlap,
        )

    def model_len(self, longest: int) -> int:
        """Prompt and output tokens of a row at most, for a model made for `longest` tokens.

        Raises:
            ValueError: more than that is asked for.
        """
        if self.max_model_len is not None and self.max_model_len > longest:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but the model has positions for "
                f"{longest} tokens: lower max_model_len"
            )
        return self.max_model_len or longest
