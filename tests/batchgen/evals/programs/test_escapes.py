"""Programs that try to get out of the sandbox, to take what is not theirs, or to forge a verdict.

The comments of ESCAPES are the table of docs/security.md.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchgen.evals.programs.interpreter import interpreter
from batchgen.evals.programs.run_program import ProgramResult, run_tests, run_with_input
from batchgen.evals.programs.sandbox import Sandbox
from tests.support.sandboxes import need_sandbox

MIB = 1 << 20
LIBC = "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
ESCAPES = {
    "read a file of the machine": ("open('/etc/passwd')", "crash", "FileNotFoundError"),
    "read a file of the user": ("open({secret!r})", "crash", "FileNotFoundError"),
    "write over Python": ("import os; open(os.__file__, 'a')", "crash", "Read-only"),
    "write over the harness": (
        "import os; open('/harness/batchgen/evals/programs/inside/copied_values.py', 'a')",
        "crash",
        "Read-only",
    ),
    "reach a file by a link": (
        "import os; os.symlink({secret!r}, '/tmp/x'); open('/tmp/x')",
        "crash",
        "Read-only",
    ),
    "see processes": ("import os; os.listdir('/proc')", "crash", "FileNotFoundError"),
    "see the environment": (
        "import os; assert set(os.environ) - {{'HOME', 'LANG', 'PWD', 'LC_CTYPE', "
        "'PYTHONHASHSEED', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'}}",
        "crash",
        "AssertionError",
    ),
    "open a socket": ("import socket; socket.socket()", "forbidden", ""),
    "resolve a name": ("import socket; socket.getaddrinfo('x.org', 80)", "forbidden", ""),
    "fork": ("import os; os.fork()", "forbidden", ""),
    "start a shell": ("import os; os.system('ls')", "forbidden", ""),
    "start a process": (
        "import subprocess, sys; subprocess.run([sys.executable])",
        "forbidden",
        "",
    ),
    "become another program": ("import os; os.execv('/bin/sh', ['sh'])", "crash", "No such file"),
    "signal its parent": ("import os; os.kill(os.getppid(), 9)", "forbidden", ""),
    "signal all processes": ("import os; os.kill(-1, 9)", "forbidden", ""),
    "signal a thread of others": (LIBC + "print(c.tgkill(1, 1, 9))", "crash", "ended by itself"),
    "trace a process": (LIBC + "c.ptrace(16, 1, 0, 0)", "forbidden", ""),
    "read memory of others": (LIBC + "c.process_vm_readv(1, 0, 0, 0, 0, 0)", "forbidden", ""),
    "mount": (LIBC + "c.mount(0, b'/tmp', b'tmpfs', 0, 0)", "forbidden", ""),
    "make a namespace": (LIBC + "c.unshare(0x10000000)", "forbidden", ""),
    "keep memory in a file": ("import os; os.memfd_create('x')", "forbidden", ""),
    "keep memory in the system": (LIBC + "c.shmget(0, 4096, 0o1600)", "forbidden", ""),
    "take memory": ("x = 'a' * (1 << 30)", "crash", "MemoryError"),
    "take memory by threads": (
        # Not threading.Thread: its start waits for ever for a thread without memory to begin.
        "import os, time, _thread\nheld = []\n"
        "def f():\n try: held.append(bytearray(100 << 20))\n except MemoryError: pass\n"
        "for _ in range(8):\n try: _thread.start_new_thread(f, ())\n except RuntimeError: pass\n"
        " time.sleep(0.02)\n"
        "time.sleep(0.3)\nos._exit(7 if len(held) < 5 else 8)",
        "crash",
        "code 7",
    ),
    "fill the disk": (
        "import os\nfor i in range(99): os.mknod(f'/tmp/{{i}}')",
        "crash",
        "Read-only",
    ),
    "write a file anywhere": (
        "import os\nfor path, names, _ in os.walk('/'):\n"
        " try: open(path + '/x', 'w')\n except OSError: continue\n"
        " print(path)",
        "crash",
        "ended by itself ",
    ),
    "keep memory in its input": (
        "import os\nwhile True: os.write(0, bytes(1 << 20))",
        "crash",
        "File too large",
    ),
    "write without end": ("while True: print('x' * 1000)", "crash", "bytes of output"),
    "complain without end": (
        "import sys\nfor i in range(3000): sys.stderr.write('x' * 1000)\nos",
        "crash",
        "NameError",
    ),
    "never end": ("while True: pass", "timeout", "1 seconds"),
    "ignore the signals": (
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass",
        "timeout",
        "1 seconds",
    ),
    "raise its limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "crash",
        "limit",
    ),
    "end with the code of a success": ("import os; os._exit(0)", "crash", "ended by itself"),
}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    need_sandbox()
    return Sandbox(interpreter(None, ()), 512 * MIB, 1.0, 60.0)


@pytest.mark.parametrize("what", ESCAPES)
def test_no_program_gets_out(sandbox: Sandbox, tmp_path: Path, what: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    program, outcome, says = ESCAPES[what]
    program = program.format(secret=str(secret)) if "{" in program else program
    output, failure = run_with_input(sandbox, program, "", MIB)
    found = failure or ProgramResult("crash", f"ended by itself {output}")
    assert what != "write a file anywhere" or output == ""
    assert found.outcome == outcome
    assert any(part in (found.detail or "") for part in says.split("|"))


FORGED = {
    "_exit": "import os; os._exit(0)",
    "_exit in a call": "def f(x):\n import os; os._exit(0)",
    "exit": "raise SystemExit(0)",
    "equality": "class E:\n def __eq__(s, o): return True\ndef f(x): return E()",
    "equality of a number": "class E(int):\n __eq__ = lambda s, o: True\ndef f(x): return E(0)",
    "a list of such": "class E(list):\n __eq__ = lambda s, o: True\ndef f(x): return E()",
    "assertions off": "import sys\ndef f(x):\n sys.flags\n raise SystemExit",
    "builtins": "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x): return 0",
    "a name of the tests": "def abs(x): return 0\ndef isinstance(*x): return 1\ndef f(x): return 0",
    "the channel": (
        "import os\ndef f(x):\n for fd in range(64):\n  for data in (b'[\"passed\"]', bytes(8)):\n"
        "   try: os.write(fd, data)\n   except OSError: pass\n return 0"
    ),
    "the answers": (
        "import os, json\ndata = json.dumps(['ok', 2]).encode()\n"
        "for fd in range(3, 64):\n try: os.write(fd, len(data).to_bytes(8, 'big') + data)\n"
        " except OSError: pass\ndef f(x): return 0"
    ),
    "a huge answer": "def f(x): return [[0]] * 50_000_000",
    "a deep answer": "def f(x):\n r = []\n for _ in range(100_000): r = [r]\n return r",
    "frames": "import sys, gc\ndef f(x):\n for o in gc.get_objects(): str(type(o))\n return 0",
}


@pytest.mark.parametrize("what", FORGED)
def test_no_verdict_is_forged(sandbox: Sandbox, what: str) -> None:
    found = run_tests(sandbox, FORGED[what], "assert abs(f(1) - 2) == 0\nassert f(1) == 2")
    assert found.outcome in ("wrong", "crash", "timeout")


def test_a_program_does_not_outlive_the_grader(sandbox: Sandbox) -> None:
    """A worker that is killed takes the sandbox with it."""
    code = (
        "from batchgen.evals.programs.run_program import *\n"
        "from batchgen.evals.programs.interpreter import interpreter\n"
        "s = Sandbox(interpreter(None, ()), 1 << 29, 50.0, 60.0)\n"
        "run_with_input(s, 'print(5, flush=True)\\nwhile True: pass', '', 99)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while not (below := _below(worker.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert below
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    while any(map(_lives, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_lives, below))


def _below(pid: int) -> list[int]:
    """The processes that bubblewrap has begun for a process, once there are two of them."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        inner = [c for o in own for c in Path(f"/proc/{o}/task/{o}/children").read_text().split()]
    except OSError:
        return []
    return [*map(int, own), *map(int, inner)] if inner else []


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_descriptors_do_not_leak(sandbox: Sandbox) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(2):
        run_with_input(sandbox, "1 / 0", "", MIB)
        run_tests(sandbox, "def f(x): return x", "assert f(1) == 1")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
