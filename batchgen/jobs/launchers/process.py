"""A worker as a child process, and how such a process ended."""

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
"""The files for a worker's stdout and stderr."""
Command = Callable[[Path, int], Sequence[str]]
"""Makes the arguments of a worker's Python interpreter, from the job's file and the worker's
index."""

_ROOT = Path(__file__).parents[3]
"""The folder that the package batchgen is in."""


@dataclass(frozen=True)
class End:
    """How a process of a worker ended: its exit code, or None if it was killed or lost with its
    machine; the words that follow the worker's name; and the host and number of the process, if
    known."""

    code: int | None
    how: str
    process: tuple[str, int] | None = None


class StartedWorker(Protocol):
    """A worker that was started, on any machine."""

    def has_begun(self) -> bool:
        """Whether it runs or has run. One that has not still waits for a machine."""
        ...

    def poll(self) -> End | None:
        """How it ended; None if it has not. ConfigError if it cannot run where it was put."""
        ...

    def stop(self, number: int) -> None:
        """Ask it to end in order, as if it got this signal. Called once."""
        ...


class WorkerProcess:
    """A worker as a child of this process, which it does not outlive, in a process group of its own
    so that Ctrl-C reaches it through this process only."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Output,
        environment: Mapping[str, str],
        new_session: bool = True,
    ) -> None:
        """Start it.

        Args:
            arguments: of the Python interpreter.
            output: what is in the file of stdout is overwritten; stderr is appended.
            environment: variables that it has besides those of this process.
            new_session: whether it is a process group of its own.
        """
        with output[0].open("wb") as out, output[1].open("ab") as err:
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
        """Wait for its end."""
        return self._end(self._child.wait())

    def _end(self, code: int) -> End:
        process = socket.gethostname(), self._child.pid
        if code < 0:
            return End(None, f"was killed (signal {-code})", process)
        return End(code, f"failed (exit {code})" if code else "ended", process)


def output_files(folder: Path, index: int) -> Output:
    """The files in a folder for the output of the worker with this index."""
    return folder / f"{index}.out", folder / f"{index}.err"


def worker_arguments(job: Path, index: int) -> list[str]:
    """The arguments with which the Python interpreter runs the worker with this index. `job` is a
    file with the text of `worker_job`; it is trusted as much as the job was."""
    # Python would look for batchgen in the working directory first, where it may well be another
    # one; where this one is there, nothing else may say where it is.
    safe = [] if Path.cwd() == _ROOT else ["-P"]
    return [*safe, "-m", "batchgen", str(job), f"workers.name={index}", "--trust", str(job)]


def worker_job(config: JobConfig, heartbeat: float) -> str:
    """The text of the job file that each worker runs, with at most `heartbeat` seconds between two
    heartbeats."""
    workers = replace(config.workers, heartbeat=min(config.workers.heartbeat, heartbeat))
    return job_file_text(replace(config, launcher=None, workers=workers))
