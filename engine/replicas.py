"""Keeps the engines of several ranks equal: rank 0 sends the others every request and step.

All ranks run the same engine on the same requests. What an engine does follows from the requests,
from the tokens, which all ranks compute from the same logits, and from a few things that depend on
clocks, which rank 0 decides. So rank 0 sends what comes from outside, in order. With every step it
sends a digest of the tokens so far; a rank whose digest differs stops with an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from batchgen.engine.interface.outputs import Begun, HostOutput
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image

if TYPE_CHECKING:
    from batchgen.engine.parallel.rank_processes import RankProcesses


class Add(NamedTuple):
    """A request was added; the fields are the arguments of `LLMEngine.add_request`."""

    request_id: Hashable
    prompt_token_ids: list[int]
    params: RequestParams
    answer: GivenAnswer | None
    images: list[Image]
    begun: Begun | None


class Abort(NamedTuple):
    """A request was dropped."""

    request_id: Hashable


class StepBegins(NamedTuple):
    """A step begins."""

    # The requests whose constraints rank 0 has compiled since the last step, each with the error
    # that it ends with, or None.
    compiled: list[tuple[Hashable, str | None]]
    digest: int  # of all tokens that rank 0 has read so far


Command = Add | Abort | StepBegins


class Leader:
    """What the engine of rank 0 knows of the other ranks."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._posted: list[Command] = []
        self._interrupted = False

    def post(self, command: Command) -> None:
        """Let the other ranks do this before their next step."""
        self._posted.append(command)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch a step, which must end in time. Raises RuntimeError if a rank was lost before or in
        the step, or a step was interrupted before."""
        if self._interrupted:
            raise RuntimeError(
                "an earlier step of the engine was interrupted, so its ranks are out of step: "
                "make a new engine"
            )
        with self._processes.watched():
            try:
                yield
            except BaseException:
                self._interrupted = True
                raise

    def begin(self, compiled: Sequence[tuple[Hashable, str | None]], digest: int) -> None:
        """Let the other ranks begin the step that rank 0 begins."""
        self._posted.append(StepBegins(list(compiled), digest))
        posted, self._posted = self._posted, []
        self._processes.send(posted)

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost. Its GPU's neighbours may wait for it for ever."""
        return self._processes.is_lost

    def check(self) -> None:
        """Raise RuntimeError if a rank was lost, because then results may be wrong."""
        self._processes.check()

    def close(self) -> None:
        """End the other ranks. May be called again."""
        self._processes.close()


class Follower(Protocol):
    """The engine of a rank that does what rank 0 does."""

    def add_request(
        self,
        request_id: Hashable,
        prompt_token_ids: list[int],
        params: RequestParams,
        answer: GivenAnswer | None,
        images: Sequence[Image],
        begun: Begun | None,
    ) -> bool: ...

    def abort(self, request_id: Hashable) -> bool: ...

    def follow(self, step: StepBegins) -> None: ...


def follow_engine(engine: Follower, connection: Connection[Any, Any]) -> None:
    """Do what rank 0 does, until it closes the connection. Raises RuntimeError if this rank's
    tokens differ from those of rank 0."""
    while True:
        try:
            commands: list[Command] = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        for command in commands:
            match command:
                case Add():
                    engine.add_request(*command)
                case Abort(request_id):
                    engine.abort(request_id)
                case StepBegins():
                    engine.follow(command)


def tokens_digest(step: HostOutput, before: int) -> int:
    """Return a digest of the tokens of a step and of all before it, by which ranks see that they
    have the same."""
    width = step.token_ids.shape[1]
    valid = np.arange(width) < step.num_tokens[:, np.newaxis]
    return zlib.crc32(np.where(valid, step.token_ids, -1).tobytes(), before)
