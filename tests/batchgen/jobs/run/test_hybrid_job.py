"""Jobs with a hybrid model whose checkpoint has a vision tower: rows of text, and an image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer


@pytest.fixture(scope="module")
def hybrid(tiny_model: Callable[..., Path]) -> Path:
    folder = tiny_model("qwen3_5_moe", **VOCAB)
    save_tokenizer(folder)
    return folder


def message(content: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}]})


def test_rows_of_text_run_and_images_are_refused(
    hybrid: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {}}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{message('How are you?')}\n{message('And you?' * 9)}\n")
    images = tmp_path / "images.jsonl"
    images.write_text(f"{message(image)}\n")
    asked = ("prompt=messages", "output.columns=[routed_experts,prompt_token_ids]")
    for file in (rows, images):
        chosen = [
            item
            for item in overrides(hybrid, file, tmp_path / f"out_{file.stem}", *asked)
            if not item.startswith(("dataset.id_column", "prompt.user"))
        ]
        if file == images:  # its vocabulary has no image token
            with pytest.raises(ConfigError, match="reads no images"):
                run(chosen)
            continue
        result = run(chosen)
        assert "row states" in result.message and "snapshots of prefixes" in result.message
    said = capfd.readouterr().err
    assert "model: not loaded, as this job does not use it: the vision tower\n" in said
    assert "row states 0.00 GiB" in said

    table = pq.read_table(tmp_path / "out_rows" / "data", partitioning=None)
    assert table.schema.field("routed_experts").type == pa.list_(
        pa.list_(pa.list_(pa.uint8(), 3), 3)
    )
    for row in table.to_pylist():
        assert row["error"] is None and row["token_ids"]
        tokens = len(row["prompt_token_ids"]) + len(row["token_ids"])
        assert len(row["routed_experts"]) == tokens - 1
    memory = json.loads((tmp_path / "out_rows" / "metrics.json").read_text())["attempts"][-1][
        "memory"
    ]
    assert memory["row_states"] > 0 and memory["checkpoints"] > 0


def test_chunks_that_do_not_hold_64_tokens_are_refused_before_weights_load(
    hybrid: Path, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"max_batched_tokens is 32, .* multiples of 64"):
        run(overrides(hybrid, rows, tmp_path / "out", "engine.max_batched_tokens=32"))
    assert not (tmp_path / "out").exists()
