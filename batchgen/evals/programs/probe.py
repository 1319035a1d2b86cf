"""Checks before a job whether the sandbox works on this machine: test programs try to get out of
it."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache

from batchgen.evals.programs.interpreter import Interpreter
from batchgen.evals.programs.run_program import run_with_input
from batchgen.evals.programs.sandbox import Sandbox, SandboxError
from batchgen.util.errors import ConfigError

_MEMORY = 512 << 20  # bytes
_CPU_SECONDS, _WALL_SECONDS = 10.0, 60.0
# A program that prints the files that it could read or write, and then "end".
_FILES = """\
import os
got = []
own = [{home!r} + name for name in ("/.ssh", "/.bashrc", "/.cache", "/.config")]
for path in ({secret!r}, "/etc/passwd", "/proc/1/environ", "/sys/kernel", *own):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        got.append(path)
    except OSError:
        pass
for path in ("/x", "/tmp/x", "/harness/x", "/packages/x", {library!r} + "/x"):
    try:
        open(path, "w")
        got.append("write " + path)
    except OSError:
        pass
print(*got, "end")
"""
# What a program may not do, and a program that does it.
_CALLS = {
    "make a process": "import os; os.fork()",
    "open a socket": "import socket; socket.socket()",
    "signal a process": "import os; os.kill(1, 9)",
}


@lru_cache
def check_sandbox(interpreter: Interpreter) -> None:
    """Run programs that try to read and write files, to make processes, sockets and signals, and to
    use too much memory.

    Raises:
        ConfigError: there is no sandbox here, or a program succeeded.
    """
    sandbox = Sandbox(interpreter, _MEMORY, _CPU_SECONDS, _WALL_SECONDS)
    with tempfile.NamedTemporaryFile() as secret:
        home = os.path.expanduser("~")  # which may hold the interpreter, and nothing else
        tries = _FILES.format(secret=secret.name, home=home, library=interpreter.library)
        output, failure = _tried(sandbox, tries)
    if failure is not None or output != "end\n":
        raise _refusal(f"a program could {output or failure}")
    for what, program in _CALLS.items():
        _, failure = _tried(sandbox, program)
        if failure != "forbidden":
            raise _refusal(f"a program could {what} ({failure})")
    _, failure = _tried(sandbox, "x = bytearray(1 << 30)")
    if failure != "crash":
        raise _refusal(f"a program could have more memory than it may ({failure})")


def _tried(sandbox: Sandbox, program: str) -> tuple[str, str | None]:
    """The output of a program, and its outcome (`ProgramResult`) if it failed, or None."""
    try:
        output, failure = run_with_input(sandbox, program, "", 1 << 16)
    except SandboxError as error:
        raise ConfigError(
            f"RunTests: bubblewrap cannot make a sandbox here ({error}): it must be of version "
            "0.8 or newer, and this user must be allowed to make namespaces (in a container, run "
            "it with --security-opt seccomp=unconfined; on Ubuntu, sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0). There is no way to run programs "
            "without it"
        ) from None
    return output, None if failure is None else failure.outcome


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"RunTests: the sandbox does not hold on this machine: {what}. Nothing was run: grade on "
        "another machine (batchgen grade), whose kernel has seccomp and user namespaces"
    )
