"""Files of which pyarrow reads ranges of bytes, such as objects of a store."""

from __future__ import annotations

from functools import cached_property
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from typing import Any

from batchgen.storage.leases.object_store import ObjectStore


class RangeFile(RawIOBase):
    """A file that can be read at any position. A subclass returns its length, and reads a range of
    it."""

    _at = 0

    def length(self) -> int:
        """The size of the file in bytes."""
        raise NotImplementedError

    def pread(self, start: int, length: int) -> bytes:
        """The `length` bytes of the file from `start` on; the range does not reach beyond its
        end."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        start = self.length() if whence == SEEK_END else self._at if whence == SEEK_CUR else 0
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length() - self._at)
        count = left if size is None or size < 0 else min(size, left)
        content = self.pread(self._at, count) if count else b""
        self._at += len(content)
        return content

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class ObjectFile(RangeFile):
    """An object as a file. Each read is one request. Its `str` is the object's URL."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name = store, name

    def __str__(self) -> str:
        return f"{self._store.url}/{self._name}"

    @cached_property
    def _size(self) -> int:
        return self._store.size(self._name)

    def length(self) -> int:
        return self._size

    def pread(self, start: int, length: int) -> bytes:
        return self._store.read_range(self._name, start, start + length)
