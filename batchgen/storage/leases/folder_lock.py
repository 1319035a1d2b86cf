"""A lock on an output folder: shared by the workers of a job, and held alone to change the job."""

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

_LOOK_SECONDS = 0.05


class FolderLock:
    """A lock on a file, which the system drops when the process ends in any way.

    The lock belongs to the open file (F_OFD_SETLK), so it also holds between threads. Going from an
    exclusive to a shared lock is one step. `exclusive` says whether nobody else holds it.
    """

    def __init__(self, path: Path, *, join: bool = False, wait: float = 0.0) -> None:
        """Take the lock exclusively, or share it with `join` if it is shared already.

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
        """Make the error for a process that may not share the folder with its present holders."""
        owner = os.pread(self._fd, 1000, 0).decode(errors="replace").strip()
        return ConfigError(
            f"output.dir={self._path.parent} is in use by another job ({owner or 'unknown'}): wait "
            "for it or stop it, or choose another output.dir"
        )

    def confirm(self) -> None:
        """Make sure that the locked folder was not deleted or replaced, or raise `FolderLost`."""
        try:
            is_same = patiently(self._path.stat).st_ino == os.fstat(self._fd).st_ino
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # whoever needs the folder will say so
            is_same = False
        if not is_same:
            raise lost(str(self._path.parent))

    def share(self) -> None:
        """Let others share the lock."""
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
    """Make the error for a folder, called `display_name`, that no longer belongs to this job."""
    return FolderLost(
        f"output.dir={display_name} was deleted or replaced while the job ran: this process has "
        "stopped and writes nothing there. The same command computes again what is missing"
    )
