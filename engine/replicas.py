"""Keeps the engines of several ranks equal: rank 0 sends every request and step to the other ranks.

All ranks run the same engine on the same requests. What an engine does follows from three things:
the requests, the tokens (which all ranks compute from the same logits), and a few decisions that
depend on clocks, which rank 0 makes. So rank 0 sends requests and decisions in order (`Leader`),
and the other ranks execute them (`follow_engine`). Every step carries a digest of the tokens so
far; a rank whose digest differs stops with an error.
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
    """A request was aborted."""

    request_id: Hashable


class StepBegins(NamedTuple):
    """Rank 0 begins a step."""

    # Requests whose constraints rank 0 has compiled since the last step, each with the message of
    # its error, or None.
    compiled: list[tuple[Hashable, str | None]]
    digest: int  # of all tokens that rank 0 has read so far


Command = Add | Abort | StepBegins


class Leader:
    """The connection of rank 0's engine to the other ranks."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._posted: list[Command] = []
        self._interrupted = False

    def post(self, command: Command) -> None:
        """Queue a command that the other ranks execute before their next step."""
        self._posted.append(command)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch a step, which must end in time. Raises RuntimeError if a rank was lost before or
        during the step, or if an earlier step was interrupted."""
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
        """Send the queued commands to the other ranks, and let them begin the step that rank 0
        begins."""
        self._posted.append(StepBegins(list(compiled), digest))
        posted, self._posted = self._posted, []
        self._processes.send(posted)

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost. Ranks that wait for it on the device may then wait for ever."""
        return self._processes.is_lost

    def check(self) -> None:
        """Raise RuntimeError if a rank was lost, because then results may be wrong."""
        self._processes.check()

    def close(self) -> None:
        """End the other ranks. May be called again."""
        self._processes.close()


class Follower(Protocol):
    """The part of `LLMEngine` that a rank other than 0 uses to do what rank 0 does."""

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
    """Execute the commands of rank 0 until it closes the connection. Raises RuntimeError if this
    rank's tokens differ from those of rank 0."""
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
    """Extend the digest `before` by the tokens of a step. Ranks compare digests to see that they
    have the same tokens."""
    width = step.token_ids.shape[1]
    valid = np.arange(width) < step.num_tokens[:, np.newaxis]
    return zlib.crc32(np.where(valid, step.token_ids, -1).tobytes(), before)
