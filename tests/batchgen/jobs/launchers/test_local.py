"""The local launcher: starts workers, starts them again, stops all, and has one exit code.

The workers here are small programs; with real ones tests/support/kills does the same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.launcher_config import Launched
from batchgen.engine.device.host_limits import usable_cores
from batchgen.jobs.launchers import supervisor
from batchgen.jobs.launchers.launch import launch
from batchgen.jobs.launchers.local import LocalLauncher, visible_devices
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeJob


def _launch(
    out: Path,
    program: str,
    count: int = 2,
    restarts: int = 2,
    devices: Sequence[str] = (),
    ranks: int = 1,
) -> Launched:
    """Run `program` with `place` and `log`, a file for what it does, in place of workers."""
    config = FakeJob(str(out)).config()
    config = replace(config, engine=replace(config.engine, tensor_parallel=ranks))
    out.mkdir(exist_ok=True)
    begin = f"import os, signal, sys, time; place = int(sys.argv[1]); log = {str(out / 'log')!r}\n"
    begin += "def note(text): open(log, 'a').write(text + '\\n')\n"

    def command(job: Path, place: int) -> list[str]:
        assert "launcher:\n  _target_: null" in job.read_text()
        return ["-S", "-c", begin + program, str(place)]

    return LocalLauncher(restarts=restarts).run(config, count, devices, command)


def _log(out: Path) -> list[str]:
    return sorted((out / "log").read_text().split())


def test_the_summary_is_that_of_who_completed_the_job(tmp_path: Path) -> None:
    program = "print(['the whole summary', 'The job is complete; …'][place]); sys.exit(3)"
    result = _launch(tmp_path, program)
    assert (result.exit_code, result.message) == (3, "the whole summary")


def test_a_killed_worker_is_started_again_so_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "note(str(place)); time.sleep(0.1)\nif place: os.kill(os.getpid(), signal.SIGKILL)\n"
    result = _launch(tmp_path, program + "time.sleep(1)\n", restarts=2)
    assert result.exit_code == 0 and _log(tmp_path) == ["0", "1", "1", "1"]
    errors = capsys.readouterr().err
    assert errors.count("worker 1 was killed (signal 9) and is started again") == 2
    assert errors.count("worker 1 was killed (signal 9)\n") == 1


def test_a_spent_budget_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started again, and what the user is told is what a worker says."""
    program = "note('x'); print('spent\\nstopped', file=sys.stderr); sys.exit(4)"
    result = _launch(tmp_path, program)
    assert (result.exit_code, result.message) == (4, "spent\nstopped")
    assert _log(tmp_path) == ["x", "x"] and "── worker" not in capsys.readouterr().err


@pytest.mark.parametrize(("code", "says"), [(2, 2), (1, 1)])
def test_workers_that_are_refused_or_fail_at_once(
    tmp_path: Path, code: int, says: int, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"note('x'); print('why it failed', file=sys.stderr); sys.exit({code})"
    result = _launch(tmp_path, program)
    assert result.exit_code == says and "No worker could complete the job" in result.message
    assert _log(tmp_path) == ["x", "x"]
    assert capsys.readouterr().err.count("why it failed") == 2


def test_why_a_worker_failed_is_said_though_the_job_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "if place: print('why', file=sys.stderr); sys.exit(2)\nprint('the summary')"
    result = _launch(tmp_path, program)
    assert (result.exit_code, result.message) == (0, "the summary")
    assert "── worker 1 failed (exit 2):\nwhy\n" in capsys.readouterr().err


def test_who_came_when_the_job_was_complete_has_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        f"metrics = {str(tmp_path / 'metrics.json')!r}\n"
        "if not place: open(metrics, 'w').write('{\"status\": \"complete\"}'); note('done')\n"
        "while not os.path.exists(log): time.sleep(0.01)\n"
        "if place: print('others have completed it', file=sys.stderr); sys.exit(1)\n"
        "time.sleep(0.5); print('the summary')"
    )
    assert _launch(tmp_path, program).message == "the summary"
    assert "have completed it" not in capsys.readouterr().err


def test_who_does_not_see_that_the_job_is_complete_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 0.1)
    program = (
        "def stop(number, frame): note(f'{place}:{number}'); sys.exit(143)\n"
        "if place: signal.signal(signal.SIGTERM, stop); note('up'); time.sleep(60)\n"
        "while not os.path.exists(log): time.sleep(0.01)\n"
    )
    assert _launch(tmp_path, program).exit_code == 0
    assert _log(tmp_path) == ["1:15", "up"]


def test_ctrl_c_stops_all(tmp_path: Path) -> None:
    program = (
        "def stop(number, frame): note(f'{place}:{number}'); sys.exit(128 + number)\n"
        "signal.signal(signal.SIGINT, stop); note(f'{place}:up')\ntime.sleep(60)\n"
    )

    def interrupt() -> None:
        while not (tmp_path / "log").exists() or len(_log(tmp_path)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    result = _launch(tmp_path, program)
    assert (result.exit_code, result.stopped_by) == (130, signal.SIGINT)
    assert _log(tmp_path) == ["0:2", "0:up", "1:2", "1:up"]


def test_each_worker_has_a_device_or_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "'CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'"
    program = f"note(''.join(os.environ.get(name, '') for name in ({names})))"
    _launch(tmp_path / "gpu", program, 3, devices=["4", "GPU-a"])
    assert _log(tmp_path / "gpu") == ["4", "4", "GPU-a"]
    _launch(tmp_path / "pairs", program, 3, devices=["0", "1", "2", "3", "4"], ranks=2)
    assert _log(tmp_path / "pairs") == ["0,1", "0,1", "2,3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _launch(tmp_path / "cpu", program, usable_cores())
    assert set(_log(tmp_path / "cpu")) == {"1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_devices() == ["2", "5"]


def test_what_cannot_be_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = {"output.dir": str(tmp_path), "launcher": "local"}
    with pytest.raises(ConfigError, match=r"launcher\.workers has no value, and there is no GPU"):
        launch(compose(job))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="tensor_parallel=2 needs as many GPUs for each worker"):
        launch(compose({**job, "engine.tensor_parallel": 2}))
    with pytest.raises(ConfigError, match="cannot read rows from standard input"):
        launch(compose({**job, "dataset.path": "-", "launcher.workers": 2}))
    bad = {"launcher.workers": 0, "launcher.restarts": -1, "workers.heartbeat": 0}
    for key, value in bad.items():
        with pytest.raises(ConfigError, match=key):
            compose({**job, key: value})
    with pytest.raises(ConfigError, match=r"workers\.stale_after=20.* at least twice"):
        compose({**job, "workers.stale_after": 20})
    with pytest.raises(ConfigError, match=r"launcher=local .*s3://bucket/x is in an object store"):
        compose({**job, "output.dir": "s3://bucket/x"})
