"""A lock on an output folder: the workers of a job share it, and a process that changes the job
holds it alone."""

import errno
import fcntl
import os
import socket
import struct
import time
from pathlib import Path
from typing import Self

from batchgen.storage.leases.patience import patiently
from batchgen.util.errors import ConfigError, FolderLost

_LOOK_SECONDS = 0.05  # between two attempts to take the lock


class FolderLock:
    """A lock on a file, which the system releases when the process ends in any way.

    The lock belongs to the open file (F_OFD_SETLK), so it also holds between threads. It changes
    from exclusive to shared in one step.

    Attributes:
        exclusive: whether no other process holds the lock.
    """

    def __init__(self, path: Path, *, join: bool = False, wait: float = 0.0) -> None:
        """Take the lock exclusively. With `join`, share it if it is already shared.

        Args:
            wait: seconds to wait for an exclusive holder, such as a process that opens or grades
                the job.

        Raises:
            ConfigError: another job holds the lock (the message names its process and host), or the
                file system has no such locks.
            OSError: the file cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o666)
        self._path = path
        self.exclusive = False
        until = time.monotonic() + wait
        try:
            while not self._take(join):
                if time.monotonic() >= until:
                    raise self.in_use()
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            os.close(self._fd)
            raise
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        text = f"pid {os.getpid()} on {socket.gethostname()}, since {started}\n"
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def in_use(self) -> ConfigError:
        """The error for a process that may not share the folder with the processes that hold it
        now."""
        owner = os.pread(self._fd, 1000, 0).decode(errors="replace").strip()
        return ConfigError(
            f"output.dir={self._path.parent} is in use by another job ({owner or 'unknown'}): wait "
            "for it or stop it, or choose another output.dir"
        )

    def confirm(self) -> None:
        """Check that the locked folder was not deleted or replaced.

        Raises:
            FolderLost: it was.
        """
        try:
            is_same = patiently(self._path.stat).st_ino == os.fstat(self._fd).st_ino
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # the next access to the folder reports the error
            is_same = False
        if not is_same:
            raise lost(str(self._path.parent))

    def share(self) -> None:
        """Allow other processes to share the lock."""
        if self.exclusive:
            assert self._lock(fcntl.F_RDLCK)
            self.exclusive = False

    def _take(self, join: bool) -> bool:
        self.exclusive = self._lock(fcntl.F_WRLCK)
        return self.exclusive or (join and self._lock(fcntl.F_RDLCK))

    def _lock(self, kind: int) -> bool:
        """Take the lock, or change its kind, without waiting; return whether that succeeded."""
        try:
            # struct flock: kind, SEEK_SET, first byte, length (0: up to the end), pid
            whole = struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, whole)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise ConfigError(
                f"output.dir={self._path.parent} cannot be locked ({error.strerror}): its file "
                "system does not support locks; choose a folder on another one"
            ) from None
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def lost(display_name: str) -> FolderLost:
    """The error for a folder, called `display_name`, that no longer belongs to this job."""
    return FolderLost(
        f"output.dir={display_name} was deleted or replaced while the job ran: this process has "
        "stopped and writes nothing there. The same command computes again what is missing"
    )
