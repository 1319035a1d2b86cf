"""Jobs that replay what another job has generated: the same bits, and what differs is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import run

FIRST = (
    *("model=nano_sdar", "strategy=dllm", "strategy.block_length=4", "sampling.temperature=0.7"),
    *("engine.device=cpu", "engine.kv_cache_gib=0.02", "output.report=false"),
)
REPLAY = (
    *("dataset=job", "prompt.user='{{ q }}'", "prompt.answer_ids_column=token_ids"),
    *("prompt.answer_step_map_column=step_map", "sampling.max_new_tokens=0"),
)
COLUMNS = "output.columns=[logprobs,step_map,tail_token_ids,tail_step_map]"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with rows that are cut inside a block."""
    folder = tmp_path_factory.mktemp("first")
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"q": f"What is {i} + {i}?"}) for i in range(3)))
    data = ("dataset=files", f"dataset.path={rows}", "prompt.user='{{ q }}'")
    more = ("sampling.max_new_tokens=6", "sampling.n=2", COLUMNS, f"output.dir={folder / 'out'}")
    assert run([*FIRST, *data, *more]).exit_code == 0
    return folder / "out"


def test_old_log_probabilities_come_back_to_the_bit(first: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay"
    assert run([*FIRST, *REPLAY, f"dataset.path={first}", f"output.dir={out}"]).exit_code == 0
    made, found = (pq.read_table(each / "data").to_pylist() for each in (first, out))
    assert len(made) == len(found) == 6
    assert any(row["tail_token_ids"] for row in made)
    for row, again in zip(made, found, strict=True):
        assert again["answer_token_ids"] == row["token_ids"] and again["token_ids"] == []
        assert (again["finish_reason"], again["replay_exact"]) == ("scored", True)
        np.testing.assert_array_equal(again["answer_logprobs"], row["logprobs"])


def test_a_row_without_its_tail_says_so(first: Path, tmp_path: Path) -> None:
    """As where the first job did not keep it, or its rows came another way."""
    table = pq.read_table(first / "data").select(["q", "token_ids", "step_map"])
    pq.write_table(table, tmp_path / "rows.parquet")
    out = tmp_path / "replay"
    data = ("dataset=files", f"dataset.path={tmp_path / 'rows.parquet'}", "dataset.columns=[q]")
    assert run([*FIRST, *REPLAY, *data, f"output.dir={out}"]).exit_code == 0
    exact = [row["replay_exact"] for row in pq.read_table(out / "data").to_pylist()]
    tails = [bool(row["tail_token_ids"]) for row in pq.read_table(first / "data").to_pylist()]
    assert exact == [not tail for tail in tails]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sampling.temperature=1", "sampling.temperature is 1.0 here and 0.7 in"),
        ("strategy.block_length=8", "strategy.block_length is 8 here and 4 in"),
        ("output.logprobs_mode=processed", "output.logprobs_mode is processed here and raw"),
        (
            "prompt.answer_ids_column=null",
            "answer_ids_column was unmasked, but that key is not set",
        ),
        ("prompt.answer_step_map_column=null", "prompt.answer_step_map_column"),
        ("sampling.n=2", "sampling.n=2 asks for several samples of"),
        ("output.columns=[step_map]", "column step_map describes generated tokens"),
    ],
)
def test_what_differs_is_refused(more: str, said: str, first: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run([*FIRST, *REPLAY, f"dataset.path={first}", f"output.dir={tmp_path / 'out'}", more])
