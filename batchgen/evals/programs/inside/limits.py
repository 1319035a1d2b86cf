"""Sets the limits of a process in the sandbox, before any other code runs. It imports nothing of
batchgen."""

from __future__ import annotations

import json
import resource
import site
import sys
from typing import Any

_MOST_FILES_AND_THREADS = 64
"""The most files, and the most threads."""


def begin() -> dict[str, Any]:
    """Limit this process permanently by the JSON object in the first argument, and let it import
    packages.

    Returns:
        The object: memory_bytes, cpu_seconds, here (the folder of this code, from which the program
        cannot import) and verdict (a file descriptor for `testing_code.py`, or null).
    """
    options: dict[str, Any] = json.loads(sys.argv[1])
    sys.argv[1:] = []
    seconds = options["cpu_seconds"]
    limits = {
        resource.RLIMIT_AS: (options["memory_bytes"],) * 2,
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (_MOST_FILES_AND_THREADS,) * 2,
        resource.RLIMIT_NPROC: (_MOST_FILES_AND_THREADS,) * 2,
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for limit, values in limits.items():
        resource.setrlimit(limit, values)
    sys.path[:] = [path for path in sys.path if path != options["here"]] + ["/packages"]
    site.setquit()  # defines exit() and quit(), because the module `site` is not run here
    sys.set_int_max_str_digits(0)
    return options


def text_of(path: str) -> str:
    """The text of a file in the sandbox."""
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()
