"""Fingerprints of files and texts: digests that are equal in all runs and on all machines. They
identify models, data sets and rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from batchgen.util.digest_cache import DigestCache

CHUNK = 1 << 20
"""The bytes that are read at a time."""
PART = 64 << 20
"""The bytes of a huge file that one thread hashes at a time. Fingerprints depend on this value."""
HUGE = 256 << 20
"""Files with more bytes are hashed in parts, so that several threads share the work. Fingerprints
depend on this value."""
CACHED = 64 << 20
"""The digests of files of at least this many bytes are cached on disk."""
_MAX_THREADS = 16  # with more, the disk is the bottleneck


def fingerprint_text(*parts: str) -> str:
    """Return a digest of a sequence of strings (32 hex digits). It depends on the boundaries
    between them."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def fingerprint_files(paths: Iterable[Path | str]) -> str:
    """Return a digest of the names and contents of files (32 hex digits), independent of their
    location.

    A file is named by its file name. A folder stands for all visible files below it, named by their
    relative paths. The order of `paths` and modification times do not matter. Threads share the
    work, and the digests of large files are cached on disk (`DigestCache`).

    Raises:
        OSError: a path does not exist or cannot be read.
    """
    named: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
            named += [(name.as_posix(), file) for name, file in below if not _hidden(name)]
        else:
            named.append((path.name, path))
    digests = _file_digests([file for _, file in named])
    entries = sorted((name, digest) for (name, _), digest in zip(named, digests, strict=True))
    return fingerprint_text(*(part for entry in entries for part in entry))


def content_digests(files: Sequence[Path]) -> list[str]:
    """Return a digest of each file's content (32 hex digits), independent of its name and
    location."""
    return _file_digests(files)


def _hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _file_digests(files: Sequence[Path]) -> list[str]:
    """Return a digest of each file's content, from the cache if possible."""
    cache = DigestCache()
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "fingerprint")
    try:
        waiting = [_digest(file, cache, pool) for file in files]
        return [digest() for digest in waiting]
    finally:  # after an error or Ctrl-C, threads begin no further part
        pool.shutdown(cancel_futures=True)


def _digest(file: Path, cache: DigestCache, pool: ThreadPoolExecutor) -> Callable[[], str]:
    """Let threads hash the file. Returns a function that waits for them and returns the digest."""
    stat = file.stat()
    size = stat.st_size
    if size >= CACHED and (cached := cache.get(file, stat)) is not None:
        return lambda: cached
    step = PART if size > HUGE else max(size, 1)
    parts: list[Future[str]] = [
        pool.submit(_part_digest, file, start, min(start + step, size), size)
        for start in range(0, max(size, 1), step)
    ]

    def digest() -> str:
        digests = [part.result() for part in parts]
        result = digests[0] if len(digests) == 1 else fingerprint_text(*digests)
        if size >= CACHED:
            cache.put(file, stat, result)
        return result

    return digest


def _part_digest(file: Path, start: int, stop: int, size: int) -> str:
    """Return a digest of the size of a file and of its bytes from `start` up to `stop`."""
    digest = blake2b(size.to_bytes(8, "little"), digest_size=16)
    buffer = memoryview(bytearray(CHUNK))
    with file.open("rb", buffering=0) as data:
        data.seek(start)
        while count := data.readinto(buffer[: min(CHUNK, stop - start)]):
            digest.update(buffer[:count])
            start += count
    return digest.hexdigest()
