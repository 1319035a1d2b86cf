"""Folders of finished jobs with the columns that exports of tokens read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.support.jobs.finished_job import finished_job, row

K = 3
TOP = pa.list_(pa.list_(pa.float32(), K))
TOP_IDS = pa.list_(pa.list_(pa.int32(), K))
PROMPT = pa.field("prompt_token_ids", pa.list_(pa.int32()))
CHAT = {"kind": "chat", "user": "{{ question }}"}


def top_of(draws: np.random.Generator, tokens: int, largest: int = 150_000) -> dict[str, Any]:
    """Log-probabilities and ids of K tokens at each of some tokens, and what the rest has."""
    probs = draws.dirichlet(np.ones(K + 1), tokens).astype(np.float32)
    return {
        "top_logprobs": np.log(np.sort(probs[:, :K])[:, ::-1]).tolist(),
        "top_logprob_ids": draws.integers(0, largest, (tokens, K)).tolist(),
        "rest": probs[:, K].tolist(),
    }


def scored_job(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A job that scored answers of 5 and 1 tokens, and a row with an error between them."""
    draws, rows = np.random.default_rng(0), []
    for index, length in enumerate((5, 0, 1)):
        top = top_of(draws, length)
        rows.append(
            row(index, text="" if length else None)
            | {"token_ids": [], "logprobs": [], "prompt_token_ids": [1, 2, index]}
            | {"answer_token_ids": list(range(length)), "answer_logprobs": [-0.5] * length}
            | {f"answer_{name}": top[name] for name in ("top_logprobs", "top_logprob_ids")}
            | {"answer_rest_probs": top["rest"]}
        )
    fields = [
        PROMPT,
        pa.field("answer_token_ids", pa.list_(pa.int32())),
        pa.field("answer_logprobs", pa.list_(pa.float32())),
        pa.field("answer_top_logprobs", TOP),
        pa.field("answer_top_logprob_ids", TOP_IDS),
        pa.field("answer_rest_probs", pa.list_(pa.float32())),
    ]
    config = {"prompt": CHAT | {"answer": "It is {{ target }}."}}
    return finished_job(path, rows, fields, config=config), [rows[0], rows[2]]
