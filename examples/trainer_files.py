"""Readers of the files that `batchgen export --to kd-packed` and `--to rl` write.

They need only numpy and pyarrow, and are meant to be copied into a trainer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq


class TeacherRow(NamedTuple):
    """A prompt of P tokens, an answer of T tokens, and the K most likely tokens at each of the
    answer's positions."""

    prompt: np.ndarray  # [P] int32
    answer: np.ndarray  # [T] int32
    top_ids: np.ndarray  # [T, K] int32, the likeliest first
    top_logprobs: np.ndarray  # [T, K] float32
    rest_probs: np.ndarray  # [T] float32: the probability of all other tokens together


class Rollout(NamedTuple):
    """A prompt and an answer of N tokens together."""

    token_ids: np.ndarray  # [N] int32
    mask: np.ndarray  # [N] bool: whether the model wrote the token
    logprobs: np.ndarray  # [N] float32, 0 in the prompt
    temperatures: np.ndarray  # [N] float32
    reward: float | None
    # [N - 1, L, K]: the experts of each token but the last, which the model never read; None if
    # the job did not record them.
    routed_experts: np.ndarray | None


def read_teacher(path: str | Path) -> Iterator[TeacherRow]:
    """Read a file of `--to kd-packed`, some rows at a time."""
    for row in _rows(path):
        k = row["top_k"]
        yield TeacherRow(
            np.array(row["prompt_token_ids"], np.int32),
            np.array(row["token_ids"], np.int32),
            unpack(row["top_ids"], row["id_bits"], len(row["token_ids"]) * k).reshape(-1, k),
            np.frombuffer(row["top_logprobs"], "<f2").astype(np.float32).reshape(-1, k),
            np.frombuffer(row["rest_probs"], "<f2").astype(np.float32),
        )


def read_rollouts(path: str | Path) -> Iterator[Rollout]:
    """Read a file of `--to rl`, some rows at a time."""
    for row in _rows(path):
        experts = row.get("routed_experts")
        if experts is not None:
            experts = np.frombuffer(experts["data"], experts["dtype"]).reshape(experts["shape"])
        yield Rollout(
            np.array(row["token_ids"], np.int32),
            np.array(row["mask"], bool),
            np.array(row["logprobs"], np.float32),
            np.array(row["temperatures"], np.float32),
            row["reward"],
            experts,
        )


def unpack(data: bytes, bits: int, count: int) -> np.ndarray:
    """Unpack `count` token ids of `bits` bits each, the highest bit first: [count] int32."""
    each = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * count).reshape(count, bits)
    whole = np.zeros((count, 32), np.uint8)
    whole[:, 32 - bits :] = each
    return np.packbits(whole, axis=1).view(">u4").reshape(count).astype(np.int32)


def _rows(path: str | Path) -> Iterator[dict[str, Any]]:
    for batch in pq.ParquetFile(path).iter_batches(64):
        yield from batch.to_pylist()
