"""The command line: exit codes, messages without tracebacks, signals, sweeps."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.forked import Forked, run_forked
from tests.support.jobs.job_comparison import attempts, compare_outputs, finished_rows

ROOT = Path(__file__).parents[2]


def _fake(job: FakeJob) -> Forked:
    return Forked("tests.support.jobs.fake_job", [json.dumps(asdict(job))])


def _batchgen(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_forked("batchgen", arguments, folder)


def _new_process(folder: Path, *program: str) -> "subprocess.CompletedProcess[str]":
    """Slower: with all imports, as a user's command."""
    return subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def _wait_for_rows(out: Path, rows: int) -> None:
    deadline = time.monotonic() + 60
    while finished_rows(out) < rows and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly(tmp_path: Path, number: int, code: int) -> None:
    job = FakeJob(str(tmp_path / "out"), rows=200, step_s=0.05, log=str(tmp_path / "log"))
    process = _fake(job)
    _wait_for_rows(tmp_path / "out", 20)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    done = finished_rows(tmp_path / "out")
    assert f"Stopped with {done} answers done." in errors  # its engine keeps nothing that is begun
    assert f"in {tmp_path / 'out'}; run the same command to resume" in errors
    assert "Traceback" not in errors
    assert attempts(tmp_path / "out")[0]["status"] == "stopped"
    assert FakeJob(str(tmp_path / "out"), rows=200, log=job.log).run().exit_code == 3
    computed = (tmp_path / "log").read_text().split()
    assert len(computed) == len(set(computed))
    FakeJob(str(tmp_path / "whole"), rows=200).run()
    compare_outputs(tmp_path / "whole", tmp_path / "out")


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    # A step that takes so long that the first signal cannot be heeded meanwhile.
    process = _fake(FakeJob(str(tmp_path / "out"), step_s=60))
    deadline = time.monotonic() + 60
    while "memory:" not in process.errors() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    # Signals that come within a third of a second count as one; on a busy machine any two may.
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 143 and "stopped at once" in errors


def test_failures_of_a_job(tmp_path: Path) -> None:
    failed = _fake(FakeJob(str(tmp_path / "a"), fail_at_step=9))
    _, errors = failed.communicate(timeout=60)
    assert failed.returncode == 1
    assert "RuntimeError: the device fell off the bus" in errors
    assert "run the same command to resume" in errors
    FakeJob(str(tmp_path / "a")).run()
    shard = tmp_path / "a/data/part-00001.parquet"
    shard.write_bytes(b"PAR1")
    damaged = _fake(FakeJob(str(tmp_path / "a")))
    _, errors = damaged.communicate(timeout=60)
    assert damaged.returncode == 1
    assert errors.startswith(f"batchgen: the published shard {shard} is damaged")
    assert "Traceback" not in errors


@pytest.mark.thorough
def test_what_a_user_sees_without_a_terminal(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path / "out"), bad=False, rows=3)
    found = _new_process(tmp_path, "-m", "tests.support.jobs.fake_job", json.dumps(asdict(job)))
    assert found.returncode == 0
    assert re.fullmatch(r"memory: weights .* GiB, KV cache .* GiB \(.* tokens\)\n", found.stderr)
    assert re.search(r"^answers +3 questions, 6 answers$", found.stdout, re.MULTILINE)
    assert re.search(rf"^output +{re.escape(str(tmp_path))}/out$", found.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sampling.temperatur=1"], "temperatur"),
        (["nonsense"], "nonsense"),
        (["dataset=none_such"], "none_such"),
        (["sampling.temperature=-1"], "batchgen: sampling.temperature must be"),
        (["dataset=files", "dataset.path=missing.jsonl"], "batchgen: dataset.path"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    found = _batchgen(tmp_path, *arguments)
    assert message in found.stderr and "Traceback" not in found.stderr
    assert found.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_help_and_config_run_nothing(tmp_path: Path) -> None:
    for argument in ("--help", "--cfg=job"):
        found = _batchgen(tmp_path, argument)
        assert found.returncode == 0 and "sampling" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_config_of_an_output_is_a_job(tmp_path: Path) -> None:
    FakeJob(str(tmp_path / "out"), rows=1, bad=False).run()
    for file in ([str(tmp_path / "out/config.yaml")], ["--config-path", str(tmp_path / "out")]):
        found = _batchgen(tmp_path, *file, "sampling.n=0")
        assert found.stderr == "batchgen: sampling.n must be at least 1, got 0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


DUMMY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.thorough
def test_the_command_of_the_card_gives_the_same_shards(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DUMMY_MODEL))
    (tmp_path / "rows.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [3]}\n')
    first = _batchgen(
        tmp_path,
        *("model=dummy", "model.path=./model"),
        *("dataset=files", "dataset.path=rows.jsonl"),
        *("prompt=tokens", "prompt.token_ids_column=ids", "sampling.max_new_tokens=4"),
        *("model.name='a \\${name}'", "output.dir=out"),
    )
    assert first.returncode == 0, first.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "If you did not write `config.yaml` yourself, do not run it as it is: read it" in card
    command = re.search(r"^batchgen (/path/of.*)$", card, re.MULTILINE)
    assert command is not None
    again = _batchgen(
        tmp_path, *command[1].replace("/path/of/this/folder", str(tmp_path / "out")).split()
    )
    assert again.returncode == 0, again.stderr
    shards = [tmp_path / name / "data" / "part-00000.parquet" for name in ("out", "again")]
    assert shards[0].read_bytes() == shards[1].read_bytes()
    # Every card has a mark and times of its own.
    mark = re.compile(r"batchgen \([0-9a-f]{16}\)|\n- Time of the device: .*")
    other = (tmp_path / "again" / "README.md").read_text().replace('"again', '"out')
    assert mark.sub("", other.replace("'again", "'out")) == mark.sub("", card)


def test_a_sweep_runs_all_jobs_and_hides_no_failure(tmp_path: Path) -> None:
    found = _batchgen(tmp_path, "--multirun", "sampling.temperature=-1,-2")
    assert found.stderr.count("batchgen: sampling.temperature must be") == 2
    assert "Traceback" not in found.stderr
    assert found.returncode == 2
