"""A sandbox for a program of a stranger: bubblewrap, limits and a filter of system calls.

The program sees the libraries of the system and Python's own, all read-only. It has no home, no
place to write, no network, no /proc, no variables of the environment, and sees no process but its
own. It is one process, which cannot make others, and so its memory is bounded by its address space:
files in memory would not be, as nothing limits how many empty ones there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from batchgen.evals.programs.interpreter import Interpreter
from batchgen.evals.programs.seccomp import seccomp_filter
from batchgen.util.errors import ConfigError

_INSIDE = Path(__file__).with_name("inside")
# The folder in the sandbox with the code of `inside`.
_HARNESS = "/harness"
_PACKAGE = "batchgen.evals.programs.inside"
# The program of a process; %s is the name of a module of `inside`.
_START = f"import sys; sys.path.insert(0, {_HARNESS!r}); from {_PACKAGE}.%s import main; main()"
_END_SECONDS = 5.0
"""The most seconds that a process may take to end after its work."""
# The devices that programs can open, and all variables of their environment.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_ENVIRONMENT = {
    "HOME": "/",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
FORBIDDEN = 128 + signal.SIGSYS
"""The exit code of a sandbox whose program made a forbidden system call."""
OVER_TIME = (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
"""The exit codes of a sandbox whose program ran out of time."""


class SandboxError(Exception):
    """A sandbox could not be made, which says nothing about the program."""


def bubblewrap() -> str:
    """The path of bubblewrap's command.

    Raises:
        ConfigError: it is not installed.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise ConfigError(
            "RunTests runs programs that a model wrote in a sandbox of bubblewrap, which is not "
            "installed here: apt-get install bubblewrap (or dnf, pacman, apk add; version 0.8 or "
            "newer). There is no way to run them without it"
        )
    return path


@dataclass(frozen=True)
class SandboxProcess:
    """A sandbox that was started.

    Attributes:
        process: the process of bubblewrap.
        status: the descriptor of the file into which bubblewrap writes how the sandbox ended.
    """

    process: subprocess.Popen[bytes]
    status: int

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code.

        Raises:
            TimeoutExpired: it does not end by itself.
            SandboxError: the sandbox could not be made, so nothing has run in it.
        """
        code = self.process.wait(_END_SECONDS)
        if code and b"exit-code" not in os.pread(self.status, 4096, 0):
            raise SandboxError(f"bubblewrap ended with {code} before the program")
        return code


@dataclass(frozen=True)
class Sandbox:
    """The interpreter and the limits with which programs run.

    Attributes:
        interpreter: the interpreter.
        memory_bytes: the address space of a process.
        seconds: the CPU time of a process.
        wall_seconds: the time from the start of a process to its end, waiting included.
    """

    interpreter: Interpreter
    memory_bytes: int
    seconds: float
    wall_seconds: float

    @contextlib.contextmanager
    def process(
        self,
        script: str,
        files: Mapping[str, str],
        *,
        stdin: int,
        stdout: int,
        stderr: int = subprocess.DEVNULL,
        verdict: int | None = None,
    ) -> Iterator[SandboxProcess]:
        """Start a script of `inside`, with texts as files, within the context; at its end all its
        processes are killed.

        Args:
            files: path in the sandbox → text.
            verdict: one more file descriptor that the process inherits.
        """
        options = {
            "memory_bytes": self.memory_bytes,
            "cpu_seconds": max(1, round(self.seconds)),
            "here": _HARNESS,
            "verdict": verdict,
        }
        with contextlib.ExitStack() as stack:
            fds = {path: stack.enter_context(readable(text)) for path, text in files.items()}
            filter_fd = stack.enter_context(readable(seccomp_filter(platform.machine())))
            status = stack.enter_context(readable(b""))
            command = [*self.arguments(fds, filter_fd, status), self.interpreter.python]
            command += ["-I", "-S", "-B", "-X", "utf8", "-c", _START % script, json.dumps(options)]
            passed = [*fds.values(), filter_fd, status, *([] if verdict is None else [verdict])]
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=passed
            )
            try:
                yield SandboxProcess(process, status)
            finally:
                # When bubblewrap dies, the first process of the sandbox does, and with it all
                # others.
                process.kill()
                process.wait()

    def arguments(self, files: Mapping[str, int], filter_fd: int, status: int) -> list[str]:
        """The command of bubblewrap up to the interpreter.

        Args:
            files: path in the sandbox → descriptor of the content.
            filter_fd: the descriptor of the filter of system calls.
            status: the descriptor to which bubblewrap writes how the sandbox ended.
        """
        command = [bubblewrap(), "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += [f"--unshare-{kind}" for kind in ("user", "ipc", "pid", "net", "uts", "cgroup")]
        command += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--clearenv"]
        for name, value in _ENVIRONMENT.items():
            command += ["--setenv", name, value]
        command += self._mounts
        command += ["--dir", "/tmp", "--chdir", "/"]
        for path, fd in files.items():
            command += ["--ro-bind-data", str(fd), path]
        command += ["--seccomp", str(filter_fd), "--json-status-fd", str(status)]
        return [*command, "--remount-ro", "/", "--"]

    @cached_property
    def _mounts(self) -> Sequence[str]:
        """The arguments for the files of this machine that programs can read."""
        python, options = self.interpreter, []
        for folder in _library_folders():
            if folder.is_symlink():
                options += ["--symlink", os.readlink(folder), str(folder)]
            else:
                options += ["--ro-bind", str(folder), str(folder)]
        single = [python.python, python.shared, "/etc/ld.so.cache"]
        for path in (python.library, *single):
            if path is not None and os.path.exists(path):
                options += ["--ro-bind", path, path]
        for name in ("site-packages", "dist-packages"):  # packages are there by name alone
            if os.path.isdir(hidden := os.path.join(python.library, name)):
                options += ["--size", "4096", "--tmpfs", hidden, "--remount-ro", hidden]
        for name, path in python.packages:
            options += ["--ro-bind", path, f"/packages/{name}"]
        options += ["--ro-bind", str(_INSIDE), f"{_HARNESS}/{_PACKAGE.replace('.', '/')}"]
        for device in _DEVICES:
            options += ["--dev-bind", device, device]
        return options


def _library_folders() -> list[Path]:
    """The folders of the system's libraries, without programs."""
    kind = f"{platform.machine()}-linux-gnu"
    if not Path("/usr/lib", kind).is_dir():
        kind = ""  # not of the Debian family
    folders = [Path("/usr/lib", kind), Path("/usr/lib64"), Path("/lib64")]
    lib = Path("/lib")
    folders.append(lib if lib.is_symlink() else lib / kind)
    return [folder for folder in folders if folder.is_dir()]


@contextlib.contextmanager
def readable(content: str | bytes) -> Iterator[int]:
    """A file descriptor from which this content can be read."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    fd = os.memfd_create("sandbox")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
