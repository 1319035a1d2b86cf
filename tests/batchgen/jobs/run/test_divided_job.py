"""Jobs of the command line whose weights are divided between processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.jobs.job_comparison import finished_rows
from tests.support.jobs.real_job import ROWS, VOCAB, overrides, run, save_tokenizer

SECONDS = 300
LONG = ("sampling.max_new_tokens=120", "sampling.ignore_eos=true", "engine.max_num_seqs=2")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    folder = tiny_model("qwen3", **VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def command(model: Path, rows: Path, out: Path, *more: str) -> list[str]:
    arguments = overrides(model, rows, out, "engine.tensor_parallel=2", *more)
    return [sys.executable, "-m", "batchgen", *arguments]


@contextmanager
def started(model: Path, rows: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that is long enough to be disturbed, once it has finished some rows."""
    process = subprocess.Popen(
        command(model, rows, out, *LONG),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until(lambda: process.poll() is not None or finished_rows(out) > 0)
        yield process
    finally:
        process.kill()
        process.wait()


def children(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that a process has started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answers(out: Path) -> list[tuple[str, int, list[int]]]:
    found = JobFolderReader(out).rows(["row_id", "sample_index", "token_ids"])
    return sorted((row["row_id"], row["sample_index"], row["token_ids"]) for row in found)


@pytest.mark.slow
def test_a_divided_job_writes_the_same_rows(model: Path, rows: Path, tmp_path: Path) -> None:
    assert run(overrides(model, rows, tmp_path / "whole")).exit_code == 0
    done = subprocess.run(command(model, rows, tmp_path / "two"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "two") == answers(tmp_path / "whole")


@pytest.mark.slow
def test_a_divided_job_survives_the_loss_of_a_rank(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(model, rows, out) as process:
        (rank,) = children(process)
        os.kill(rank, signal.SIGKILL)
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "tensor parallel: rank 1 was ended by signal 9" in said
    done = finished_rows(out)
    assert done
    again = subprocess.run(command(model, rows, out, *LONG), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    attempts = json.loads((out / "metrics.json").read_text())["attempts"]
    assert attempts[-1]["rows_resumed"] == done
    run(overrides(model, rows, tmp_path / "whole", *LONG))
    assert answers(out) == answers(tmp_path / "whole")


@pytest.mark.slow
def test_ranks_end_with_a_killed_job(model: Path, rows: Path, tmp_path: Path) -> None:
    with started(model, rows, tmp_path / "out") as process:
        (rank,) = children(process)
        process.kill()
    until(lambda: not is_running(rank))


@pytest.mark.slow
def test_a_signal_stops_a_divided_job_cleanly(model: Path, rows: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches the ranks, too, which leave the decision to rank 0."""
    with started(model, rows, tmp_path / "out") as process:
        (rank,) = children(process)
        os.kill(rank, signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 130, said
    until(lambda: not is_running(rank))


def test_a_model_that_cannot_be_divided_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    """Before any weight is read, and without a process."""
    with pytest.raises(
        ConfigError, match=r"engine: tensor_parallel=3 does not divide .* 4: choose"
    ):
        run(overrides(model, rows, tmp_path / "out", "engine.tensor_parallel=3"))
