"""Stores in memory, whose requests can fail, for tests of jobs in object stores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from batchgen.storage.leases.object_store import ObjectStore

_REQUESTS = ("pipe_file", "cat_file", "ls", "find", "info", "modified", "rm_file")
BEFORE, AFTER = "before", "after"


class FaultyFiles(MemoryFileSystem):  # type: ignore[misc]
    """Objects in memory. A request may fail before or after it has happened.

    Attributes:
        fault: says of each request how it fails; None if it does not.
        created: the paths of the objects that were made by create-if-absent.
        requests: how many came, by their names.
    """

    cachable = False  # two objects are two stores

    def __init__(self, fault: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}  # in older versions of fsspec, all would share one
        self.pseudo_dirs = [""]
        self.fault = fault
        self.created: list[str] = []
        self.requests: dict[str, int] = {}
        self._one = threading.RLock()
        self._inside = False
        for name in _REQUESTS:
            setattr(self, name, self._failing(name, getattr(self, name)))

    def _failing(self, name: str, request: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._one:
                if self._inside:  # a part of another request
                    return request(*args, **kwargs)
                self.requests[name] = self.requests.get(name, 0) + 1
                fault = self.fault()
                if fault == BEFORE:
                    raise OSError("503: slow down")
                self._inside = True
                try:
                    found = request(*args, **kwargs)
                finally:
                    self._inside = False
                if kwargs.get("mode") == "create":
                    self.created.append(args[0])
                if fault == AFTER:
                    raise TimeoutError("no answer")
                return found

        return call


def store_in(files: FaultyFiles, url: str = "memory://jobs") -> ObjectStore:
    """A store that repeats what fails at once."""
    return ObjectStore(files, url, sleep=lambda seconds: None)


def use(patch: pytest.MonkeyPatch, files: FaultyFiles) -> None:
    """Have the jobs of this test in these files, whatever the URL of their folder."""
    patch.setattr("batchgen.storage.stores.open_storage.connect", lambda url: store_in(files, url))


def at_random(seed: int, rate: float) -> Callable[[], str | None]:
    """Lets requests fail at random."""
    draw = Random(seed)
    return lambda: draw.choice((BEFORE, AFTER)) if draw.random() < rate else None
