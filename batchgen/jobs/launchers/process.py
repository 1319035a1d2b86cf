"""A worker as a child process of a launcher, and how such a process ended.

`LocalLauncher` and the actors of Ray start `WorkerProcess`; `Supervisor` sees any `StartedWorker`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from batchgen.config.compose.load_config import job_file_text
from batchgen.config.groups.job_config import JobConfig
from batchgen.storage.leases.heartbeat import LAUNCHER

Output = tuple[Path, Path]
"""The files of a worker's stdout and stderr."""
Command = Callable[[Path, int], Sequence[str]]
"""Makes the arguments of a worker's Python interpreter, from the job's file and the worker's
index."""

_ROOT = Path(__file__).parents[3]
"""The folder that the package batchgen is in."""


@dataclass(frozen=True)
class End:
    """How a process of a worker ended.

    Attributes:
        code: the exit code; None if the process was killed or lost with its machine.
        how: what happened, as words that follow the worker's name.
        process: its host and process id, if they are known.
    """

    code: int | None
    how: str
    process: tuple[str, int] | None = None


class StartedWorker(Protocol):
    """A worker that was started, on any machine."""

    def has_begun(self) -> bool:
        """Whether the worker runs or has run. A worker that has not begun still waits for a
        machine."""
        ...

    def poll(self) -> End | None:
        """How the worker ended; None if it still runs.

        Raises:
            ConfigError: the worker cannot run on the machine that it was given.
        """
        ...

    def stop(self, number: int) -> None:
        """Ask the worker to end in order, as if it got this signal. Called once."""
        ...


class WorkerProcess:
    """A worker as a child of this process, which it does not outlive.

    It is in another process group, so that Ctrl-C reaches it through this process only.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: Output,
        environment: Mapping[str, str],
        new_session: bool = True,
    ) -> None:
        """Start the worker.

        Args:
            arguments: those of the Python interpreter.
            output: the file of stdout is overwritten; stderr is appended to its file.
            environment: variables that the worker has besides those of this process.
            new_session: whether the worker gets another process group.
        """
        stdout, stderr = output
        with stdout.open("wb") as out, stderr.open("ab") as err:
            self._child = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment, LAUNCHER: str(os.getpid())},
                start_new_session=new_session,
            )

    def has_begun(self) -> bool:
        return True

    def poll(self) -> End | None:
        code = self._child.poll()
        return None if code is None else self._end(code)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._child.send_signal(number)

    def wait(self) -> End:
        """Wait for the end of the worker."""
        return self._end(self._child.wait())

    def _end(self, code: int) -> End:
        process = socket.gethostname(), self._child.pid
        if code < 0:
            return End(None, f"was killed (signal {-code})", process)
        return End(code, f"failed (exit {code})" if code else "ended", process)


def output_files(folder: Path, index: int) -> Output:
    """The files in a folder for the output of the worker `index`."""
    return folder / f"{index}.out", folder / f"{index}.err"


def worker_arguments(job: Path, index: int) -> list[str]:
    """The arguments with which the Python interpreter runs the worker `index`.

    `job` is a file with the text of `worker_job`. The worker trusts it as much as the job was
    trusted.
    """
    # Without -P Python looks for batchgen in the working directory first, where another version may
    # be. But if this package is in the working directory, Python may find it only there.
    safe = [] if Path.cwd() == _ROOT else ["-P"]
    return [*safe, "-m", "batchgen", str(job), f"workers.name={index}", "--trust", str(job)]


def worker_job(config: JobConfig, heartbeat: float) -> str:
    """The text of the job file that each worker runs. `heartbeat` is the most seconds between two
    heartbeats."""
    workers = replace(config.workers, heartbeat=min(config.workers.heartbeat, heartbeat))
    return job_file_text(replace(config, launcher=None, workers=workers))
