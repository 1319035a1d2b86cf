"""Slurm on one machine, for tests: `sbatch`, `srun`, `sacct`, `scancel` and `scontrol requeue`.

`install` puts the commands into a folder for PATH. They keep what they know in files of that
folder: `script` is what was submitted last, and `77_0.state`, `77_0.pid` are of task 0 of job 77.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_KILL_SECONDS = 2.0
"""How long after SIGTERM a cancelled task is killed."""


def install(folder: Path) -> None:
    """Make the commands in a folder."""
    folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel", "scontrol"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {folder} {name} "$@"\n')
        command.chmod(0o755)


def task_process(folder: Path, task: str) -> int:
    """The process of a task that has begun."""
    while not (path := folder / f"{task}.pid").exists():
        time.sleep(0.02)
    return int(path.read_text())


def sbatch(folder: Path, arguments: Sequence[str]) -> None:
    if (folder / "refusal").exists():
        sys.exit((folder / "refusal").read_text())
    text = Path(arguments[-1]).read_text()
    (folder / "script").write_text(text)
    array = re.search(r"--array=0-(\d+)", text)
    print("Submitted batch job 77", flush=True)
    for number in range(int(array[1]) + 1 if array else 1):
        task = f"77_{number}" if array else "77"
        (folder / f"{task}.state").write_text("PENDING")
        if not (folder / "closed").exists() and os.fork() == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            node(folder, task)
            os._exit(0)


def node(folder: Path, task: str) -> None:
    """Run a task as often as it is requeued."""
    job, _, number = task.partition("_")
    array = {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": number} if number else {}
    state = folder / f"{task}.state"
    requeued = True
    while requeued:
        state.write_text("RUNNING")
        environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_TASK": task, **array}
        code = subprocess.run(["bash", folder / "script"], env=environment).returncode
        requeued = state.read_text() == "REQUEUED"
    if state.read_text() == "RUNNING":
        state.write_text("FAILED" if code else "COMPLETED")


def srun(folder: Path, arguments: Sequence[str]) -> None:
    command = arguments[arguments.index(sys.executable) :]
    (folder / f"{os.environ['SLURM_TASK']}.pid").write_text(str(os.getpid()))
    for stream, option in ((1, "--output"), (2, "--error")):
        path = arguments[arguments.index(option) + 1]
        job, _, number = os.environ["SLURM_TASK"].partition("_")
        path = path.replace("%A", job).replace("%a", number).replace("%j", job).replace("%t", "0")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.execv(command[0], list(command))


def sacct(folder: Path, arguments: Sequence[str]) -> None:
    print("JobID|State|NodeList")
    for path in sorted(folder.glob("*.state")):
        print(f"{path.stem}|{path.read_text()}|here")


def scancel(folder: Path, arguments: Sequence[str]) -> None:
    task = arguments[-1]
    (folder / f"{task}.state").write_text("CANCELLED by 0")
    pid = folder / f"{task}.pid"
    if pid.exists() and os.fork() == 0:
        try:
            os.kill(int(pid.read_text()), signal.SIGTERM)
            time.sleep(_KILL_SECONDS)
            os.kill(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass


def scontrol(folder: Path, arguments: Sequence[str]) -> None:
    assert arguments[0] == "requeue"
    (folder / f"{arguments[1]}.state").write_text("REQUEUED")


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:])
