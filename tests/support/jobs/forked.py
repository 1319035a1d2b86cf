"""Programs in forks of a process that has imported everything: a start takes no time.

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
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import batchgen.api.python.llm
import batchgen.jobs.run.run_job  # noqa: F401  (the imports are what the forks need)


def fork_server() -> ForkServerContext:
    """The context whose processes are forks of one that has imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


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
