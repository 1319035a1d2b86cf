"""The operations that the workers' protocol needs of a store, as values that a driver carries out.

A function of the protocol (`lease_protocol.py`) is a generator: it yields operations and is sent
their answers. So it works with any store, and a test can stop, kill or delay a worker between any
two operations. A store may leave an operation `Unanswered`: after a request that timed out nobody
knows whether it was carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Payload = bytes | Path
"""The content for an object: bytes, or a file that nobody changes any more."""


class Unanswered(Exception):
    """Thrown into a generator if nobody knows whether the operation that it yielded was carried
    out."""


@dataclass(frozen=True)
class Create:
    """Make an object whole, if there is none of that name. Answered by whether it was made."""

    name: str
    payload: Payload


@dataclass(frozen=True)
class Overwrite:
    """Make an object whole, over the one that may be there."""

    name: str
    payload: Payload


@dataclass(frozen=True)
class Read:
    """Answered by the content of an object, None if there is none."""

    name: str


@dataclass(frozen=True)
class Same:
    """Answered by whether an object has this content; False if there is none."""

    name: str
    payload: Payload


@dataclass(frozen=True)
class Names:
    """Answered by the names of the objects in a folder, without the folder."""

    folder: str


Operation = Create | Overwrite | Read | Same | Names
Steps = Generator[Operation, Any, T]
"""A function of the protocol that ends with a T."""


def ask(operation: Operation) -> Steps[Any]:
    """Repeat an operation until it is answered; return the answer."""
    while True:
        try:
            return (yield operation)
        except Unanswered:
            continue


def create(name: str, payload: Payload) -> Steps[bool]:
    """Make an object unless there is one; returns whether this call made it.

    An attempt that was not answered may have made it all the same. The content then shows whose it
    is, so it must be unique to this worker, or equal for all workers.
    """
    unsure = False
    while True:
        try:
            if (yield Create(name, payload)):
                return True
        except Unanswered:
            unsure = True
            continue
        return bool(unsure and (yield from ask(Same(name, payload))))


def carry_out(steps: Steps[T], do: Callable[[Operation], Any]) -> T:
    """Run a function of the protocol; `do` carries out one operation or raises `Unanswered`."""
    try:
        operation = next(steps)
        while True:
            try:
                answer = do(operation)
            except Unanswered as error:
                operation = steps.throw(error)
            else:
                operation = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
