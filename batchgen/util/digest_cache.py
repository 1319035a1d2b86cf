"""A cache of digests of large files in the user's cache folder, so that each file is hashed only
once. `fingerprint` uses it."""

from __future__ import annotations

import contextlib
import os
import time
from hashlib import blake2b
from pathlib import Path

from batchgen.util.paths import user_cache
from batchgen.util.temporary import temporary_name

_SETTLED_NS = 2 * 10**9
"""The age in nanoseconds below which a change makes a file unsafe to cache. The file could change
again within one tick of its file system's clock, and its times would not show it. The longest tick
is two seconds (FAT)."""


class DigestCache:
    """Stores digests by a file's path, inode, size and times of change.

    Each digest is a small file of its own, so concurrent jobs do not conflict. If an entry is
    damaged or the cache folder is unusable, files are hashed again.
    """

    def __init__(self) -> None:
        """Use the cache of this user, in $XDG_CACHE_HOME or ~/.cache."""
        self._folder = user_cache() / "digests"

    def get(self, file: Path, stat: os.stat_result) -> str | None:
        """Return the digest of the file in its current state; None if it is not cached."""
        key = _key(file, stat)
        try:
            entry = (self._folder / key).read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        digest, _, check = entry.partition(" ")
        return digest if check == _check(key, digest) else None

    def put(self, file: Path, stat: os.stat_result, digest: str) -> None:
        """Store the digest of a file, unless the file may have changed since the hashing began.

        Args:
            stat: the file's status from before the hashing.
        """
        key = _key(file, stat)
        temporary = temporary_name(self._folder / key)
        with contextlib.suppress(OSError):
            # ctime, not mtime: every change sets it to the present, and nobody can set it back.
            is_recent = time.time_ns() - stat.st_ctime_ns < _SETTLED_NS
            if is_recent or key != _key(file, file.stat()):
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(f"{digest} {_check(key, digest)}", encoding="ascii")
                temporary.replace(self._folder / key)
            finally:
                temporary.unlink(missing_ok=True)


def _key(file: Path, stat: os.stat_result) -> str:
    # The real path, so that all links to a file in the hub's cache share one entry.
    parts = (os.path.realpath(file), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return _hex(repr(parts))


def _check(key: str, digest: str) -> str:
    return _hex(f"{key} {digest}")


def _hex(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
