"""The Slurm launcher: what it submits, and how tasks are requeued, cancelled and read.

Slurm itself is played by fake_slurm.py; submitit is the real one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("submitit")

from batchgen.config.groups.launcher_config import Launched
from batchgen.jobs.launchers.slurm import SlurmLauncher
from batchgen.util.errors import ConfigError
from tests.support.jobs import fake_slurm
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.launched_job import beats, data, when_rows_are_done, worker_of


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the commands of Slurm, which is in PATH."""
    folder = tmp_path / "slurm"
    fake_slurm.install(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("SUBMITIT_EXECUTOR", "SLURM_JOB_ID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def _launch(out: Path, program: str, workers: int = 2, **keys: Any) -> Launched:
    """Run `program` with `place` and `note(text)` in place of workers."""
    given = {"gpus_per_worker": 0, "cpus_per_worker": 1, **keys}
    config = FakeJob(str(out)).config()
    begin = f"import os, signal, sys, time; place = int(sys.argv[1]); log = {str(out) + '.log'!r}\n"
    begin += "def note(text): open(log, 'a').write(text + '\\n')\n"

    def command(job: Path, place: int) -> list[str]:
        assert "launcher:\n  _target_: null" in job.read_text()
        return ["-S", "-c", begin + program, str(place)]

    return SlurmLauncher(workers=workers, **given).launch(config, command)


def _log(out: Path) -> list[str]:
    path = Path(f"{out}.log")
    return sorted(path.read_text().split()) if path.exists() else []


def _later(out: Path, line: str, do: Callable[[], None]) -> None:
    """Do something in a thread once this line is in the log."""

    def wait() -> None:
        while line not in _log(out):
            time.sleep(0.02)
        do()

    threading.Thread(target=wait, daemon=True).start()


def test_the_script_has_what_was_asked_for(slurm: Path, tmp_path: Path) -> None:
    (slurm / "closed").touch()
    out = tmp_path / "out"
    result = _launch(
        out, "", workers=3, wait=False, partition="gpu", account="lab", qos="low", minutes=720,
        gpus_per_worker=2, cpus_per_worker=8, mem="64G", constraint="h100&ib", stop_seconds=120,
        setup=("module load cuda", "export A='b c'"),
        parameters={"mail-user": "me@there", "exclusive": True, "nodelist": "n[1-4]"},
    )  # fmt: skip
    script = (slurm / "script").read_text().splitlines()
    for option in (
        "array=0-2%3", "partition=gpu", "account=lab", "qos=low", "time=720", "gpus-per-node=2",
        "cpus-per-task=8", "mem=64G", "constraint='h100&ib'", "signal=USR2@120", "requeue",
        "ntasks-per-node=1", "nodes=1", "mail-user=me@there", "exclusive", "nodelist='n[1-4]'",
        "open-mode=append", "job-name=batchgen",
    ):  # fmt: skip
        assert f"#SBATCH --{option}" in script, option
    srun = next(line for line in script if line.startswith("srun"))
    assert " --cpus-per-task 8 " in srun and "-m submitit.core._submit" in srun
    begin = script.index("module load cuda")
    assert script[begin + 1] == "export A='b c'" and begin < script.index(srun)
    assert (result.exit_code, result.stopped_by) == (0, None)
    assert "Slurm job 77 has 3 workers; `batchgen status" in result.message
    assert "scancel 77 stops it" in result.message
    assert list((out / "logs").glob("slurm-*/job.yaml"))


def test_a_preempted_worker_ends_in_order_and_is_requeued(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: the summary is that of who completed the job, and its logs are not kept."""
    out = tmp_path / "out"
    program = (
        "def stop(number, frame): note(f'{place}:{number}'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "again = os.path.exists(f'{log}.{place}'); open(f'{log}.{place}', 'w').close()\n"
        "note(f'{place}:{again}')\n"
        "if place and not again: time.sleep(60)\n"
        "while '1:True' not in open(log).read(): time.sleep(0.02)\n"
        "print(['The job is complete; …', 'the whole summary'][place])\n"
    )
    _later(out, "1:False", lambda: os.kill(fake_slurm.task_process(slurm, "77_1"), signal.SIGUSR2))
    result = _launch(out, program)
    assert (result.exit_code, result.message) == (0, "the whole summary")
    assert _log(out) == ["0:False", "1:15", "1:False", "1:True"]
    assert "Slurm job 77: 2 workers in the queue" in capsys.readouterr().err
    assert not (out / "logs").exists()


def test_ctrl_c_cancels_all(slurm: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "def stop(number, frame): note(f'{place}:{number}'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop); note(f'{place}:up')\ntime.sleep(60)\n"
    )
    _later(out, "1:up", lambda: _later(out, "0:up", lambda: os.kill(os.getpid(), signal.SIGINT)))
    result = _launch(out, program)
    assert (result.exit_code, result.stopped_by) == (130, signal.SIGINT)
    assert _log(out) == ["0:15", "0:up", "1:15", "1:up"]
    assert (slurm / "77_0.state").read_text().startswith("CANCELLED")


def test_workers_that_fail(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    program = "print('why it failed', file=sys.stderr); sys.exit(2)"
    result = _launch(out, program)
    assert result.exit_code == 2 and "No worker could complete the job" in result.message
    assert capsys.readouterr().err.count("why it failed") == 2
    assert len(list((out / "logs").glob("slurm-*/[01].err"))) == 2


def test_what_slurm_refuses(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    (slurm / "refusal").write_text("sbatch: error: invalid partition specified: gpus")
    with pytest.raises(ConfigError, match=r"(?s)sbatch refuses .*invalid partition.*gpus"):
        _launch(out, "", partition="gpus")
    assert not (out / "logs").exists()
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(ConfigError, match=r"no sbatch here.* login node"):
        _launch(out, "")
    with pytest.raises(ConfigError, match="cluster=local is for CPUs"):
        _launch(out, "", cluster="local", gpus_per_worker=1)
    bad = {"workers": 0, "minutes": 0, "cpus_per_worker": 0, "requeues": -1, "stop_seconds": 60**2}
    for key, value in bad.items():
        with pytest.raises(ConfigError, match=rf"launcher\.{key}"):
            _launch(out, "", **{"minutes": 60, key: value})
    with pytest.raises(ConfigError, match="wait must be true"):
        _launch(out, "", cluster="debug", wait=False)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_the_data_are_those_of_one_worker(
    slurm: Path, tmp_path: Path, cluster: Literal["slurm", "local"]
) -> None:
    """One worker is preempted, and another one is killed: nothing is lost, nothing is twice."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    FakeJob(str(whole), rows=120, rows_per_shard=8).run()
    job = FakeJob(str(out), rows=120, rows_per_shard=8, step_s=0.1)

    def disturb() -> None:
        first, second = (beat["pid"] for beat in beats(out)[:2])
        os.kill(_parent(first), signal.SIGUSR2)
        os.kill(second, signal.SIGKILL)

    disturbed = when_rows_are_done(out, 20, 2, disturb)
    launcher = SlurmLauncher(workers=2, cluster=cluster, gpus_per_worker=0, cpus_per_worker=1)
    result = launcher.launch(job.config(), worker_of(job))
    assert not disturbed.is_alive()
    assert result.exit_code == 3 and "rows           " in result.message
    assert data(out) == data(whole)


def _parent(pid: int) -> int:
    """The process that has started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
