"""Stores in memory, whose requests can fail, for tests of jobs in object stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

import pytest

from batchgen.storage.leases.object_store import ObjectStore

BEFORE, AFTER = "before", "after"
T = TypeVar("T")


class FaultyFiles:
    """Objects in memory by "BUCKET/NAME". A request may fail before or after it has happened.

    Attributes:
        store: the content of all objects.
        fault: says of each request how it fails; None if it does not.
        created: the objects that were made by create-if-absent.
        requests: how many came, by their names.
    """

    def __init__(self, fault: Callable[[], str | None] = lambda: None) -> None:
        self.store: dict[str, bytes] = {}
        self.written: dict[str, float] = {}
        self.fault = fault
        self.created: list[str] = []
        self.requests: dict[str, int] = {}
        self._one = threading.RLock()

    def put(self, path: str, content: bytes) -> None:
        """Put an object there, without a request."""
        self.store[path], self.written[path] = bytes(content), time.time()

    def request(self, kind: str, carry_out: Callable[[], T]) -> T:
        """Carry out a request as one step, which may fail."""
        with self._one:
            self.requests[kind] = self.requests.get(kind, 0) + 1
            fault = self.fault()
            if fault == BEFORE:
                raise OSError("503: slow down")
            found = carry_out()
            if fault == AFTER:
                raise TimeoutError("no answer")
            return found


class Below:
    """The objects below a URL; see `batchgen.storage.leases.object_store.Objects`."""

    def __init__(self, files: FaultyFiles, url: str) -> None:
        self._files = files
        self._root = f"{url.partition('://')[2]}/".lstrip("/")

    def create(self, name: str, content: bytes) -> None:
        def create() -> None:
            if self._root + name in self._files.store:
                raise FileExistsError(name)
            self._files.put(self._root + name, content)
            self._files.created.append(self._root + name)

        self._files.request("create", create)

    def overwrite(self, name: str, content: bytes) -> None:
        self._files.request("overwrite", lambda: self._files.put(self._root + name, content))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self._files.request("read", lambda: self._content(name)[start:end])

    def about(self, name: str) -> tuple[int, float]:
        return self._files.request(
            "about", lambda: (len(self._content(name)), self._files.written[self._root + name])
        )

    def names(self, folder: str) -> list[str]:
        start = len(f"{folder}/") if folder else 0
        found = self._files.request("names", lambda: self._below(folder))
        return sorted({name[start:].partition("/")[0] for name in found})

    def sizes(self, folder: str) -> dict[str, int]:
        return self._files.request("sizes", lambda: self._below(folder))

    def delete(self, name: str) -> None:
        self._files.request("delete", lambda: self._files.store.pop(self._root + name, None))

    def _below(self, folder: str) -> dict[str, int]:
        start = f"{self._root}{folder}/" if folder else self._root
        cut = len(self._root)
        return {p[cut:]: len(c) for p, c in self._files.store.items() if p.startswith(start)}

    def _content(self, name: str) -> bytes:
        try:
            return self._files.store[self._root + name]
        except KeyError:
            raise FileNotFoundError(name) from None


def store_in(files: FaultyFiles, url: str = "s3://jobs") -> ObjectStore:
    """A store that repeats what fails at once."""
    return ObjectStore(Below(files, url), url, sleep=lambda seconds: None)


def use(patch: pytest.MonkeyPatch, files: FaultyFiles) -> None:
    """Have the jobs of this test in these files, whatever the URL of their folder."""
    patch.setattr("batchgen.storage.stores.open_storage.connect", lambda url: store_in(files, url))


def at_random(seed: int, rate: float) -> Callable[[], str | None]:
    """Lets requests fail at random."""
    draw = Random(seed)
    return lambda: draw.choice((BEFORE, AFTER)) if draw.random() < rate else None
