"""Lets several iterators and threads share one engine. `LLM` runs all its requests through
`Streams`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from threading import RLock

from batchgen.api.python.call_prompts import TokenizedPrompt
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import RequestParams


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request to the engine: a sample of a prompt, or an answer to score.

    Attributes:
        prompt: the token ids and images, or the error that prevents them.
        answer: the token ids of the answer to score; None to generate.
    """

    prompt_index: int
    sample_index: int
    prompt: TokenizedPrompt | RequestError
    params: RequestParams
    answer: list[int] | None = None


Finished = tuple[StreamRequest, RequestOutput]
"""A request, and its output."""


class Streams:
    """Runs the requests of several streams in one engine.

    A stream that waits for its next output runs an engine step. Outputs that the step finishes for
    other streams are put into their queues. Each thread may have its own streams; only one thread
    at a time uses the engine.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = RLock()
        self._numbers = itertools.count()  # numbers streams, so that request ids are unique
        # Unfinished requests, by request id: each with the queue of its stream.
        self._waiting: dict[Hashable, tuple[StreamRequest, deque[Finished]]] = {}
        self.closed = False

    @property
    def engine(self) -> LLMEngine:
        """The engine. Raises ValueError if it was closed."""
        if self.closed:
            raise ValueError("this LLM is closed: make a new one")
        return self._engine

    def run(self, requests: Sequence[StreamRequest]) -> Generator[Finished]:
        """Start a stream: yield each request with its output, in the order in which they finish.

        Requests that cannot be served come first, with an error. If the iterator is abandoned, its
        unfinished requests are dropped.
        """
        number = next(self._numbers)
        mine: deque[Finished] = deque()
        ids: list[str] = []
        try:
            for request in requests:
                ids.append(f"{number}/{request.prompt_index}-{request.sample_index}")
                with self._lock:
                    self._add(ids[-1], request, mine)
            left = len(requests)
            while left:
                while not mine:
                    with self._lock:
                        if not mine:  # another thread's step may have added outputs
                            self._step()
                left -= 1
                yield mine.popleft()
        finally:
            with self._lock:
                for request_id in ids:
                    if self._waiting.pop(request_id, None) is not None and not self.closed:
                        self._engine.abort(request_id)

    def close(self) -> None:
        """Drop all unfinished requests, and close the engine."""
        with self._lock:
            if self.closed:
                return
            for request_id in self._waiting:
                self._engine.abort(request_id)
            self._waiting.clear()
            self._engine.close()
            self.closed = True
            del self._engine

    def _add(self, request_id: str, request: StreamRequest, mine: deque[Finished]) -> None:
        """Add a request to the engine. If it cannot be served, its error goes to `mine`, the queue
        of its stream."""
        self._waiting[request_id] = request, mine
        try:
            if isinstance(request.prompt, RequestError):
                raise request.prompt
            ids, images = request.prompt
            pixels = [row_image.image for row_image in images]
            self.engine.add_request(request_id, ids, request.params, request.answer, pixels)
        except RequestError as error:
            del self._waiting[request_id]
            ids = [] if isinstance(request.prompt, RequestError) else request.prompt[0]
            mine.append((request, RequestOutput(request_id, ids, [], "", "error", error=error)))

    def _step(self) -> None:
        """Run one engine step, and put the outputs into the queues of their streams."""
        for output in self.engine.step():
            request, stream = self._waiting.pop(output.request_id)
            stream.append((request, output))
