"""The jobs of the models that come with batchgen: they grade themselves, and answer right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.__main__ import run_command
from tests.support.jobs.real_job import run

ROWS = 12
SMALL = [f"dataset.limit={ROWS}", "engine.device=cpu", "engine.kv_cache_gib=0.05"]
IN_JSON = ['prompt.user="{{ question }} Answer in JSON."', "sampling.max_new_tokens=100"]
LEAST_PER_FORWARD = {"nano_sdar": 1.5, "nano_hybrid": 2.4}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "data", partitioning=None).to_pylist()
    return rows


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`out(name)` → the folder of a ready job, over the first rows."""
    folder = tmp_path_factory.mktemp("nano")

    @functools.cache
    def ready(name: str) -> Path:
        run([f"+experiment={name}", *SMALL, f"output.dir={folder / name}"])
        return folder / name

    return ready


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LEAST_PER_FORWARD)
def test_a_job_answers_right_and_says_so(
    out: Callable[[str], Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(out(name))
    assert [row["finish_reason"] for row in rows] == ["stop"] * ROWS
    steps = sum(row["num_forwards"] - row.get("num_commit_forwards", 0) for row in rows)
    tokens = sum(len(row["token_ids"]) for row in rows)
    assert tokens / steps >= LEAST_PER_FORWARD[name]
    assert all(
        len(row["step_map"]) == len(row["logprobs"]) == len(row["token_ids"]) for row in rows
    )
    capsys.readouterr()
    assert run_command(["score", str(out(name)), "score.subset=kind"]) == 0
    said = capsys.readouterr().out
    assert "100.0%" in said and "a+b-c" in said  # of all, and by kind


@pytest.mark.thorough
@pytest.mark.parametrize("name", LEAST_PER_FORWARD)
def test_answers_in_json_are_graded_by_the_same_steps(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([f"+experiment={name}", *SMALL, *IN_JSON, f"output.dir={tmp_path / 'out'}"])
    assert all(row["text"].startswith('{"working":') for row in rows_of(tmp_path / "out"))
    capsys.readouterr()
    assert run_command(["score", str(tmp_path / "out")]) == 0
    assert "100.0%" in capsys.readouterr().out


@pytest.mark.thorough
def test_rows_with_drafts_are_those_without_and_can_be_compared(
    out: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, drafted = tmp_path / "plain", out("nano_hybrid")
    plain = [
        "strategy=ar", "model=nano_hybrid", "dataset=nano_eval", "prompt=chat", "sampling=greedy",
        "prompt.user='{{ question }}'", "sampling.max_new_tokens=80",
        "output.columns=[logprobs,routed_experts]",
        "post=[{_target_: batchgen.grading.extract.Extract, methods: [last_number]},"
        "{_target_: batchgen.grading.grade.Grade, method: integer, target: final}]",
    ]  # fmt: skip
    run([*plain, *SMALL, f"output.dir={folder}"])
    for one, other in zip(rows_of(drafted), rows_of(folder), strict=True):
        for name in ("id", "text", "token_ids", "logprobs", "routed_experts", "finish_reason"):
            assert one[name] == other[name], name
    capsys.readouterr()
    assert run_command(["compare", str(drafted), str(folder), "--anyway"]) == 0
    assert "100.0%" in capsys.readouterr().out


@pytest.mark.thorough
def test_nano_vl_reads_pictures_and_its_report_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(["+experiment=nano_vl", *SMALL, f"output.dir={out}"])
    rows = rows_of(out)
    assert [row["finish_reason"] for row in rows] == ["stop"] * 12
    taken = {"add": 0, "sum": 2, "larger": 2, "read": 1, "colour": 1}
    assert [len(row["prompt_images"]) for row in rows] == [taken[row["kind"]] for row in rows]
    right = sum(row["text"].endswith(f"Answer: {row['final']}") for row in rows)
    assert right >= 7  # 76% of the 500 are
    capsys.readouterr()
    assert run_command(["score", str(out), "score.subset=kind"]) == 0
    assert "read" in capsys.readouterr().out
    assert (out / "report.html").read_text().count("data:image/jpeg;base64,") >= 8
