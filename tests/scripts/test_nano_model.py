"""The weights of nano_sdar that come with batchgen, and the score of its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plot_step_map
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import score_nano
import torch
from nano_batch import encode
from nano_diffusion import decode
from nano_exam import Tally
from nano_problems import JSON_REQUEST, SCHEMA, Form, Problem, final_number
from nano_sdar import NanoConfig, NanoSDAR
from nano_tokenizer import IM_END_ID
from real_job import run
from safetensors.torch import load_file
from score_nano import read_rows, score, total
from step_map_data import read_job
from train_nano_sdar import THRESHOLD

import batchgen
from batchgen import LLM, SamplingParams
from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.loading.tokenizer import load_tokenizer
from batchgen.strategies.dllm.strategy import DLLMStrategy

MODEL = "package://batchgen/data/nano_sdar"
FOLDER = Path(batchgen.__file__).parent / "data" / "nano_sdar"
EVAL = [json.loads(line) for line in (FOLDER / "eval.jsonl").read_text().splitlines()]
ROWS = 24
COMPARED = 4


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ready job, over the first rows."""
    folder = tmp_path_factory.mktemp("nano") / "out"
    options = ["engine.device=cpu", "engine.kv_cache_gib=0.05", f"output.dir={folder}"]
    run(["+experiment=nano_sdar", f"dataset.limit={ROWS}", *options])
    return folder


def test_it_answers_several_tokens_a_step(out: Path) -> None:
    tally = total(score(read_rows(out), "plain").values())
    assert tally.rows == ROWS
    assert tally.accuracy >= 0.9
    assert tally.tokens_per_step >= 1.5
    rows = pq.read_table(out / "data", partitioning=None).to_pylist()
    assert all(row["finish_reason"] == "stop" for row in rows)
    assert all(
        len(row["step_map"]) == len(row["logprobs"]) == len(row["token_ids"]) for row in rows
    )
    answers = [(row["token_ids"], row["num_forwards"]) for row in rows[:COMPARED]]
    assert answers == decoded_in_training("plain")
    # All steps brought a token of the answer, except where what they brought was behind its end.
    assert tally.tokens_per_step == pytest.approx(read_job(out).histogram().mean, rel=0.02)


def test_it_answers_in_json() -> None:
    config = EngineConfig(kv_cache_gib=0.05)
    llm = LLM(MODEL, device="cpu", strategy=DLLMStrategy(), config=config)
    prompts = [[{"role": "user", "content": row["question"] + JSON_REQUEST}] for row in EVAL[:ROWS]]
    params = SamplingParams(temperature=0.0, max_new_tokens=100)
    outputs = [output for (output,) in llm.generate(prompts, params)]
    tally = Tally()
    for output, row in zip(outputs, EVAL, strict=False):
        right = final_number(output.text, "json") == int(row["final"])
        tally.add(
            right,
            len(output.token_ids),
            output.counts["num_forwards"] - output.counts["num_commit_forwards"],
        )
    assert tally.accuracy >= 0.9
    assert tally.tokens_per_step >= 1.5
    answers = [
        (list(output.token_ids), output.counts["num_forwards"]) for output in outputs[:COMPARED]
    ]
    assert answers == decoded_in_training("json")


def decoded_in_training(form: Form) -> list[tuple[list[int], int]]:
    """Tokens and denoise steps by the plain decoder that training measured the model with.

    It computes every row from its beginning in each step, without a cache.
    """
    model = NanoSDAR(NanoConfig())
    weights = load_file(FOLDER / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    rows = [Problem(row["kind"], row["question"], "", int(row["final"])) for row in EVAL[:COMPARED]]
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer is not None
    with torch.inference_mode():
        decoded = decode(model, encode(rows, form, tokenizer), THRESHOLD)
    ended = [[*answer, IM_END_ID] for answer in decoded.answers]
    return list(zip(ended, decoded.steps, strict=True))


def test_its_folder_is_complete_and_small() -> None:
    assert (
        len(EVAL) == len({row["id"] for row in EVAL}) == len({r["question"] for r in EVAL}) == 500
    )
    assert json.loads((FOLDER / "answer_schema.json").read_text()) == SCHEMA
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12e6


def row(text: str | None, final: str, tokens: int, forwards: int, commits: int) -> dict[str, Any]:
    counts = (tokens, forwards, commits)
    names = (*score_nano.COLUMNS, score_nano.COMMITS)
    return dict(zip(names, ("add", final, text, *counts), strict=True))


def test_a_score_counts_errors_as_wrong_and_commits_as_no_steps() -> None:
    rows = [
        row("1+1=2. Answer: 2", "2", 10, 6, 2),
        row("1+1=2. Answer: 3", "2", 10, 4, 0),
        row(None, "2", 0, 2, 0),
    ]
    tally = score(rows, "plain")["add"]
    assert (tally.rows, tally.right, tally.tokens, tally.steps) == (3, 1, 20, 10)
    assert score(rows, "json")["add"].right == 0
    assert "add           1 of 3      33.3%           2.00" in score_nano.line("add", tally)


def test_both_scripts_run(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["score_nano.py", str(out)])
    score_nano.main()
    assert f"of {ROWS}" in capsys.readouterr().out.splitlines()[-1]
    picture = tmp_path / "p.png"
    monkeypatch.setattr(sys, "argv", ["plot_step_map.py", str(out), "--out", str(picture)])
    plot_step_map.main()
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, r"has no data/\*\.parquet: give a job's output\.dir"),
        ({"kind": ["add"]}, "has no column final: give a job with dataset=nano_eval"),
        ({name: [None] for name in score_nano.COLUMNS}, "no row of .* was run"),
    ],
)
def test_what_cannot_be_scored(
    columns: dict[str, list[Any]] | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if columns is not None:
        (tmp_path / "data").mkdir()
        pq.write_table(pa.table(columns), tmp_path / "data" / "part-00000.parquet")
    monkeypatch.setattr(sys, "argv", ["score_nano.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=message):
        score_nano.main()
