"""A lock that keeps a second job out of an output folder."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Self

from batchgen.errors import ConfigError


class FolderLock:
    """A lock on a file (flock), which the system drops when the process ends in any way."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: another job holds it (the message names its process and host), or the file
                system has no such locks.
            OSError: the file cannot be opened.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._fd, 1000).decode(errors="replace").strip()
            os.close(self._fd)
            raise ConfigError(
                f"output.dir={path.parent} is in use by another job ({owner or 'unknown'}): wait "
                "for it or stop it, or choose another output.dir"
            ) from None
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"output.dir={path.parent} cannot be locked ({error.strerror}): its file system "
                "does not support flock; choose a folder on another one"
            ) from None
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        os.truncate(self._fd, 0)
        os.pwrite(
            self._fd, f"pid {os.getpid()} on {socket.gethostname()}, since {started}\n".encode(), 0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
