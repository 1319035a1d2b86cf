"""Jobs with strategy=dllm: step_map in Parquet, and every mistake named before weights load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

DLLM = ("strategy=dllm", "strategy.block_length=4")


@pytest.fixture(scope="session")
def sdar(tiny_model: Callable[..., Path]) -> Path:
    folder = tiny_model("sdar", **VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    texts = ["abc abc", None, *("Say: " + "ab" * i for i in range(1, 6))]
    path.write_text(
        "".join(json.dumps({"id": f"r{i}", "q": q}) + "\n" for i, q in enumerate(texts))
    )
    return path


def test_step_map_reaches_parquet(sdar: Path, rows: Path, tmp_path: Path) -> None:
    columns = "output.columns=[logprobs,step_map]"
    options = (*DLLM, "strategy.confidence_threshold=0.1", "sampling.max_new_tokens=18", columns)
    out = tmp_path / "out"
    result = run(overrides(sdar, rows, out, *options))
    table = pq.read_table(out / "data", partitioning=None).to_pylist()
    done = [row for row in table if row["error"] is None]
    assert len(table) == 14 and len(done) == 12
    for row in done:
        steps = row["step_map"]
        assert len(steps) == len(row["token_ids"]) == len(row["logprobs"])
        assert min(steps) == 1 and row["num_forwards"] >= max(steps)
    # Several tokens of a block in one step, or a later one before an earlier: not plain decoding.
    assert any(row["step_map"] != list(range(1, 1 + len(row["step_map"]))) for row in done)
    check_totals(out, done, result.message)


def check_totals(out: Path, done: list[dict[str, Any]], message: str) -> None:
    """What metrics.json and the summary say is the sum of the rows."""
    denoise = sum(row["num_forwards"] for row in done)
    assert not any(row["num_commit_forwards"] for row in done)
    assert f"{denoise:,} to denoise, 0 to commit" in message
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["counts"] == {"num_forwards": denoise, "num_commit_forwards": 0}
    steps_of_blocks = metrics["attempts"][0]["engine"]["strategy"]["steps_per_block"]
    assert sum(int(i) * count for i, count in steps_of_blocks.items()) == denoise
    blocks = sum(steps_of_blocks.values())
    for steps, count in steps_of_blocks.items():
        assert f"{steps}: {count / blocks:.1%}" in message


@pytest.mark.thorough
def test_commits_by_themselves(sdar: Path, rows: Path, tmp_path: Path) -> None:
    options = (*DLLM, "sampling.max_new_tokens=18", "sampling.ignore_eos=true")
    for name, fused in (("fused", "true"), ("alone", "false")):
        run(overrides(sdar, rows, tmp_path / name, *options, f"strategy.fused_commit={fused}"))
    fused_rows, alone = (
        pq.read_table(tmp_path / name / "data", partitioning=None).to_pylist()
        for name in ("fused", "alone")
    )
    assert [row["token_ids"] for row in fused_rows] == [row["token_ids"] for row in alone]
    commits = [row["num_commit_forwards"] for row in alone if row["error"] is None]
    assert commits and set(commits) <= {4, 5}  # 18 tokens in blocks of 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("strategy=ar",), "use strategy=dllm"),
        (("strategy=dllm",), "block_length is null, and the model does not say"),
        ((*DLLM, "sampling.repetition_penalty=1.2"), "penalties count the tokens before"),
        ((*DLLM, "strategy.unmasking=random"), "strategy.unmasking"),
        ((*DLLM, "output.columns=[draft_accepted]"), "it comes with strategy=ar_spec"),
    ],
    ids=str,
)
def test_mistakes(
    sdar: Path, rows: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(overrides(sdar, rows, tmp_path / "out", *options))


def test_a_model_of_next_tokens_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strategy dllm needs a diffusion model"):
        run(overrides(model, rows, tmp_path / "out", *DLLM))
    with pytest.raises(ConfigError, match="strategy=canvas, strategy=dllm; choose among"):
        run(overrides(model, rows, tmp_path / "out", "output.columns=[step_map]"))


@pytest.mark.thorough
def test_an_answer_that_whole_blocks_leave_no_room_for_is_refused(
    sdar: Path, rows: Path, tmp_path: Path
) -> None:
    """60 of 63 positions can be used with blocks of 4, for the engine and for the job."""
    with pytest.raises(ConfigError, match=r"engine: max_batched_tokens is 3, .* multiples of 4"):
        run(overrides(sdar, rows, tmp_path / "c", *DLLM, "engine.max_batched_tokens=3"))
    assert not (tmp_path / "c").exists()
    short = (*DLLM, "engine.max_model_len=63")
    with pytest.raises(ConfigError, match="both together have at most 60 tokens"):
        run(overrides(sdar, rows, tmp_path / "a", *short, "sampling.max_new_tokens=60"))
    result = run(overrides(sdar, rows, tmp_path / "b", *short, "sampling.max_new_tokens=18"))
    table = pq.read_table(tmp_path / "b" / "data", partitioning=None).to_pylist()
    lengths = {row["num_generated_tokens"] for row in table if row["finish_reason"] == "length"}
    assert result.error_rows and lengths == {18}
