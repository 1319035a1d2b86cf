"""Starting rows in the order of what the prefix cache holds changes no byte of a job's shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.engine.scheduling import scheduler
from tests.support.jobs.real_job import VOCAB, contents, overrides, run, save_tokenizer

CASES = {
    "llama": ("engine.kv_cache_gib=0.0002",),
    "qwen3_5_moe": ("engine.kv_cache_gib=0.0002", "engine.state_checkpoints=6"),
}


@pytest.mark.parametrize("kind", CASES)
def test_shards_are_equal_to_the_byte_and_more_is_cached(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = tiny_model(kind, **VOCAB), tmp_path / "rows.jsonl"
    save_tokenizer(model)
    questions = [(document, question) for question in range(4) for document in range(8)]
    rows.write_text(
        "".join(
            json.dumps({"id": f"{d}-{q}", "q": f"{d} " * 80 + f"question {q}?"}) + "\n"
            for d, q in questions
        )
    )

    def job(name: str) -> tuple[dict[str, str], int]:
        more = ["engine.max_num_seqs=8", "sampling.n=1", "output.columns=[logprobs]", *CASES[kind]]
        run(overrides(model, rows, tmp_path / name, *more))
        attempt = json.loads((tmp_path / name / "metrics.json").read_text())["attempts"][-1]
        return contents(tmp_path / name / "data"), attempt["engine"]["cached_tokens"]

    by_cache, cached = job("by_cache")
    monkeypatch.setattr(scheduler, "cached_first", lambda waiting, is_cached, late: waiting)
    by_arrival, cached_then = job("by_arrival")
    assert len(by_cache) == 8 and by_cache == by_arrival
    assert cached > cached_then
