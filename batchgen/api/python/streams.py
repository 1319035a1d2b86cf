"""Lets several iterators and threads share one engine, for `LLM.stream`."""

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
    """One sample of one prompt, or one answer that is scored: the prompt's token ids with its
    images, or why it has none, and how it is sampled."""

    prompt_index: int
    sample_index: int
    prompt: TokenizedPrompt | RequestError
    params: RequestParams
    answer: list[int] | None = None


Finished = tuple[StreamRequest, RequestOutput]


class Streams:
    """Runs the requests of several streams in one engine.

    The stream that is asked for its next output lets the engine make a step, and keeps what others
    have finished in it for them. Threads may have streams of their own; the engine works for one
    thread at a time.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = RLock()
        self._numbers = itertools.count()
        self._waiting: dict[Hashable, tuple[StreamRequest, deque[Finished]]] = {}
        self.closed = False

    @property
    def engine(self) -> LLMEngine:
        """The engine. Raises ValueError if it was closed."""
        if self.closed:
            raise ValueError("this LLM is closed: make a new one")
        return self._engine

    def run(self, requests: Sequence[StreamRequest]) -> Generator[Finished]:
        """Yield the requests as they finish; those that cannot be served come first, with an error.
        When the iterator is abandoned, its unfinished requests are dropped."""
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
                        if not mine:  # another thread's step may have brought some
                            self._step()
                left -= 1
                yield mine.popleft()
        finally:
            with self._lock:
                for request_id in ids:
                    if self._waiting.pop(request_id, None) is not None and not self.closed:
                        self._engine.abort(request_id)

    def close(self) -> None:
        """Drop unfinished requests, and stop background work."""
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
        self._waiting[request_id] = request, mine
        try:
            if isinstance(request.prompt, RequestError):
                raise request.prompt
            ids, images = request.prompt
            pictures = [each.image for each in images]
            self.engine.add_request(request_id, ids, request.params, request.answer, pictures)
        except RequestError as error:
            del self._waiting[request_id]
            ids = [] if isinstance(request.prompt, RequestError) else request.prompt[0]
            mine.append((request, RequestOutput(request_id, ids, [], "", "error", error=error)))

    def _step(self) -> None:
        for output in self.engine.step():
            request, stream = self._waiting.pop(output.request_id)
            stream.append((request, output))
