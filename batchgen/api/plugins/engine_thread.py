"""Runs one engine in a thread for many callers, each of which waits for a future.

The provider for inspect_ai uses `EngineThread`, because its requests come from many asynchronous
tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from batchgen.api.python.call_prompts import Prompt, PromptIds, ReadPrompt
from batchgen.api.python.output import Output
from batchgen.api.python.params import SamplingParams
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.request_params import sample_params

if TYPE_CHECKING:
    from batchgen.api.python.llm import LLM

Outputs = Future[list[Output]]
"""The future of a prompt's outputs, in the order of their sample numbers."""


@dataclass(slots=True)
class _Submitted:
    """A submitted prompt, and those of its `n` outputs that have finished."""

    prompt: Prompt
    future: Outputs
    n: int
    outputs: list[Output] = field(default_factory=list)


class EngineThread:
    """Runs requests of many callers at once. The LLM must be used by nobody else.

    A sample's seed is derived from the seed of its parameters, the token ids of its prompt, and how
    often the same prompt was submitted before. So the order in which different prompts arrive does
    not change the tokens.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._calls = SimpleQueue[Callable[[], None] | None]()
        # The requests in the engine: request id → its prompt, and its sample number.
        self._live: dict[Hashable, tuple[_Submitted, int]] = {}
        # How often each prompt was submitted, by its token ids.
        self._times = Counter[tuple[int, ...]]()
        self._ended = False
        self._thread = Thread(target=self._work, name="batchgen engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Outputs:
        """Submit a prompt, and return the future of its outputs.

        Cancelling the future drops its requests from the engine. If the prompt cannot be served,
        the future raises RequestError.

        Args:
            template_kwargs: options of the chat template.
        """
        future = Outputs()
        request = _Submitted(prompt, future, params.n)
        self._calls.put(partial(self._add, request, params, template_kwargs or {}))
        future.add_done_callback(
            lambda completed: (
                self._calls.put(partial(self._drop, request)) if completed.cancelled() else None
            )
        )
        return future

    def close(self) -> None:
        """Drop unfinished requests, end the thread, and free the device's memory."""
        self._calls.put(None)
        self._thread.join()
        self._llm.close()

    def _work(self) -> None:
        """Run the engine until the queue yields None. If the engine fails, all unfinished futures
        raise an error.

        Calls from the queue run between engine steps. While no request is running, the thread waits
        for a call.
        """
        try:
            while True:
                try:
                    call = self._calls.get(block=not self._live)
                except Empty:
                    self._step()
                    continue
                if call is None:
                    break
                call()
        finally:
            self._ended = True
            for request, _ in list(self._live.values()):
                _fulfil(request.future, RuntimeError("the engine has stopped"))
            while not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call()

    def _add(
        self, request: _Submitted, params: SamplingParams, template_kwargs: Mapping[str, Any]
    ) -> None:
        """Add the samples of a submitted prompt to the engine."""
        if request.future.done():
            return
        try:
            if self._ended:
                raise RequestError("closed", "the engine has stopped")
            converter = PromptIds(self._llm.tokenizer, template_kwargs)
            read = ReadPrompt.of(request.prompt)
            converter.check([read])
            ids, _ = converter.of(read)  # harnesses send no images
            number = self._times[tuple(ids)]
            self._times[tuple(ids)] += 1
            for sample in range(params.n):
                sample_request = sample_params(params.request, f"{ids}/{number}", sample)
                request_id = f"{id(request)}-{sample}"
                self._llm.engine.add_request(request_id, ids, sample_request)
                self._live[request_id] = request, sample
        except (RequestError, ValueError) as error:
            _fulfil(request.future, error)

    def _drop(self, request: _Submitted) -> None:
        """Remove the unfinished samples of a prompt from the engine."""
        for request_id in [key for key, (live, _) in self._live.items() if live is request]:
            del self._live[request_id]
            self._llm.engine.abort(request_id)

    def _step(self) -> None:
        """Run one step of the engine, and fulfil the futures whose last sample has finished."""
        for output in self._llm.engine.step():
            request, sample = self._live.pop(output.request_id)
            request.outputs.append(Output.of(output, request.prompt, 0, sample))
            if len(request.outputs) == request.n:
                _fulfil(
                    request.future, sorted(request.outputs, key=lambda output: output.sample_index)
                )


def _fulfil(future: Outputs, result: list[Output] | Exception) -> None:
    """Set the result of a future, unless it was cancelled meanwhile."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
