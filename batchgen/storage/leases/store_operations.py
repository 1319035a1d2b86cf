"""The operations that the workers' protocol needs of a store, as values that a driver carries out.

A function of the protocol (`lease_protocol.py`) is a generator: it yields operations and is sent
their answers. So it works with any store, and a test can stop, kill or delay a worker between any
two operations. A store may leave an operation `Unanswered`: after a request that timed out it is
unknown whether it was carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Payload = bytes | Path
"""The content for an object: bytes, or a file that is not changed any more."""


class Unanswered(Exception):
    """Thrown into a generator if it is unknown whether the operation that it yielded was carried
    out."""


@dataclass(frozen=True)
class Create:
    """Make a whole object, unless there is one of that name. The answer is whether it was made."""

    name: str
    payload: Payload


@dataclass(frozen=True)
class Overwrite:
    """Make a whole object, in place of any older one."""

    name: str
    payload: Payload


@dataclass(frozen=True)
class Read:
    """Read an object. The answer is its content; None if it does not exist."""

    name: str


@dataclass(frozen=True)
class Same:
    """Compare an object. The answer is whether it has this content; False if it does not exist."""

    name: str
    payload: Payload


@dataclass(frozen=True)
class Names:
    """List a folder. The answer is the names of its objects, without the folder."""

    folder: str


Operation = Create | Overwrite | Read | Same | Names
Steps = Generator[Operation, Any, T]
"""A function of the protocol whose result is a T."""


def ask(operation: Operation) -> Steps[Any]:
    """Repeat an operation until it is answered; return the answer."""
    while True:
        try:
            return (yield operation)
        except Unanswered:
            continue


def create(name: str, payload: Payload) -> Steps[bool]:
    """Make an object unless it exists; return whether this call made it.

    An unanswered attempt may still have made it. The content then shows which worker did, so it
    must be unique to this worker, or equal for all workers.
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
    """Run a function of the protocol and return its result. `do` carries out one operation or
    raises `Unanswered`."""
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
