"""How the engine runs. Nothing here decides what a row's tokens are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Attributes:
        max_num_seqs: rows in flight at most.
        max_batched_tokens: tokens per prefill batch at most.
        max_model_len: prompt and output tokens of a row at most; None is what the model was made
            for.
        block_size: tokens per KV block.
        prefix_caching: compute a prefix that rows share only once.
        kv_cache_gib: size of the KV cache in GiB; None chooses it from free memory.
        gpu_memory_utilization: share of the GPU's memory to use if kv_cache_gib is None.

    Raises:
        ValueError: a value is out of range; the message names it and says what is allowed.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_model_len: int | None = None
    block_size: int = 16
    prefix_caching: bool = True
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        checks = (
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_batched_tokens", self.max_batched_tokens >= 1, "at least 1"),
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
