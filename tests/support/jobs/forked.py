"""Programs in forks of a process that has imported everything: a start takes no time.

That process is a fork of the one that runs the tests, from before the first of them.

A process of its own takes seconds to import torch, transformers and datasets. Tests of what a
program says and does start it here; that it starts from nothing, and says nothing while it
imports, is for a few tests with real processes.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

import batchgen.api.python.llm
import batchgen.jobs.run.run_job  # noqa: F401  (the imports are what the forks need)


def fork_server() -> ForkServerContext:
    """The context whose processes are forks of one that has imported this module."""
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _fork(executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start the server as a fork too; the last argument is what it runs."""
    if process := os.fork():
        return process
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in descriptors:
                with suppress(OSError):
                    os.close(descriptor)  # the server ends when all others have closed one of them
        exec(arguments[-1], {})
    finally:
        os._exit(0)


class Forked:
    """A module that runs as a program, with the part of the interface of `subprocess.Popen` that
    tests need.

    Args:
        module: its name, as after `python -m`.
        arguments: its command line.
        folder: where it runs.
    """

    def __init__(self, module: str, arguments: Sequence[str], folder: Path | None = None) -> None:
        self._output = Path(tempfile.mkdtemp())
        self._process = fork_server().Process(
            target=_run, args=(module, list(arguments), folder or Path.cwd(), self._output)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def errors(self) -> str:
        """What it has written to stderr so far."""
        path = self._output / "stderr"
        return path.read_text() if path.exists() else ""

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; returns what it wrote to stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: it still ran after so many seconds, and was killed.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        written = (self._output / "stdout").read_text(), self.errors()
        shutil.rmtree(self._output)
        return written


def run_forked(
    module: str, arguments: Sequence[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a module as a program to its end."""
    process = Forked(module, arguments, folder)
    written = process.communicate(timeout=300)
    assert process.returncode is not None
    return subprocess.CompletedProcess([module, *arguments], process.returncode, *written)


def _run(module: str, arguments: list[str], folder: Path, output: Path) -> None:
    os.chdir(folder)
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with (output / name).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
