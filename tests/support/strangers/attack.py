"""What an attack is, and what attacks share: the command in a process, and a finished job."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

COMMAND = Path(sys.executable).with_name("batchgen")
_MEMORY_BYTES = 8 << 30
"""The address space that the command may have in an attack."""
MODEL = "model=nano_hybrid"
"""The model of the jobs: it comes with batchgen, and answers in seconds."""


@dataclass(frozen=True)
class Run:
    """How the command ended.

    Attributes:
        code: its exit code; 124 if it was killed because it took too long.
        out: its standard output.
        err: its standard error.
        seconds: how long it ran.
    """

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.out + self.err

    def refused(self, *words: str, code: int = 2) -> str | None:
        """What is wrong if this is no clear refusal; None if it is one.

        Args:
            words: what the message must say.
            code: the exit code of such a refusal.
        """
        if self.code == 124:
            return f"no end after {self.seconds:.0f} s"
        if "Traceback" in self.err:
            return f"a traceback: {self.err.strip().splitlines()[-1]}"
        if self.code != code:
            return f"exit code {self.code} and not {code}: {self.text.strip()[-200:]!r}"
        if lacks := [word for word in words if word not in self.text]:
            return f"the message does not say {lacks}: {self.text.strip()[-300:]!r}"
        return None


@dataclass(frozen=True)
class Work:
    """Where an attack works.

    Attributes:
        path: an empty folder of its own.
        shared: of all attacks, for what is made once.
    """

    path: Path
    shared: Path

    def batchgen(
        self,
        *arguments: str | Path,
        seconds: float = 60.0,
        environment: Mapping[str, str] | None = None,
        input: str | None = None,
        command: tuple[str, ...] = (str(COMMAND),),
        memory_bytes: int = _MEMORY_BYTES,
    ) -> Run:
        """Run the command in this folder; it and its children are killed when the time is over.

        Args:
            environment: variables that it has besides those of this process.
            input: what it reads from its standard input.
            command: how it is called.
            memory_bytes: the address space that it may have.
        """
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=self.path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes)),
        )
        try:
            out, err = process.communicate(input, timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = 124
        return Run(code, out, err, time.monotonic() - began)

    def finished_job(self, name: str = "out") -> Path:
        """A copy of the folder of a small finished job: two rows, `a` and `b`, with grades."""
        made = self.shared / "finished"
        if not made.exists():
            rows = self.shared / "rows.jsonl"
            rows.write_text(
                '{"id":"a","q":"one","target":"1"}\n{"id":"b","q":"two","target":"2"}\n'
            )
            run = self.batchgen(
                *(MODEL, f"dataset.path={rows}", "dataset.id_column=id", "prompt.user={{ q }}"),
                *("sampling.max_new_tokens=8", f"output.dir={made}"),
                "post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]},"
                " {_target_: batchgen.grading.grade.Grade, method: exact}]",
                seconds=300,
            )
            assert run.code == 0, run.text
        return Path(shutil.copytree(made, self.path / name))

    def rows(self, text: str, name: str = "rows.jsonl") -> Path:
        """A file with this text, for a data set."""
        path = self.path / name
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return path

    def job(self, path: Path, *arguments: str | Path, seconds: float = 120.0) -> Run:
        """Run a small job over the rows of a file, into the folder `out`.

        Args:
            arguments: further ones, which go before those of this job.
        """
        small = (MODEL, f"dataset.path={path}", "sampling.max_new_tokens=8", "output.dir=out")
        return self.batchgen(*small, *arguments, seconds=seconds)


Attack = Callable[[Work], str | None]
"""Does what a stranger would, and returns what got through; None if nothing did. The first line of
its docstring is its name."""
