"""One engine for many callers: a thread runs it and fulfils the futures of their requests.

The provider for inspect_ai uses it, whose requests come from many asynchronous tasks.
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


@dataclass(slots=True)
class _Asked:
    """A prompt whose samples are in the engine, and those that have finished."""

    prompt: Prompt
    future: Outputs
    n: int
    outputs: list[Output] = field(default_factory=list)


class EngineThread:
    """Runs requests of many callers at once. The LLM belongs to the thread.

    A sample's seed comes from the seed of its parameters, the tokens of its prompt and how often
    they have been asked before, so that the order in which callers come changes nothing.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._live: dict[Hashable, tuple[_Asked, int]] = {}
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
        """Ask for the outputs of a prompt, and return their future. A cancelled future drops what
        it waits for. A prompt that cannot be served raises RequestError there."""
        future = Outputs()
        request = _Asked(prompt, future, params.n)
        self._calls.put(partial(self._add, request, params, template_kwargs or {}))
        future.add_done_callback(
            lambda done: self._calls.put(partial(self._drop, request)) if done.cancelled() else None
        )
        return future

    def close(self) -> None:
        """End the thread and give the device's memory back; what runs is dropped."""
        self._calls.put(None)
        self._thread.join()
        self._llm.close()

    def _work(self) -> None:
        """Run the engine until the queue yields None. If the engine fails, all waiting futures get
        its error."""
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
        self, request: _Asked, params: SamplingParams, template_kwargs: Mapping[str, Any]
    ) -> None:
        if request.future.done():
            return
        try:
            if self._ended:
                raise RequestError("closed", "the engine has stopped")
            maker, read = (
                PromptIds(self._llm.tokenizer, template_kwargs),
                ReadPrompt.of(request.prompt),
            )
            maker.check([read])
            ids, _ = maker.of(read)  # the engine of harnesses is given no images
            number = self._times[tuple(ids)]
            self._times[tuple(ids)] += 1
            for sample in range(params.n):
                sample_request = sample_params(params.request, f"{ids}/{number}", sample)
                request_id = f"{id(request)}-{sample}"
                self._llm.engine.add_request(request_id, ids, sample_request)
                self._live[request_id] = request, sample
        except (RequestError, ValueError) as error:
            _fulfil(request.future, error)

    def _drop(self, request: _Asked) -> None:
        for request_id in [key for key, (one, _) in self._live.items() if one is request]:
            del self._live[request_id]
            self._llm.engine.abort(request_id)

    def _step(self) -> None:
        for output in self._llm.engine.step():
            request, sample = self._live.pop(output.request_id)
            request.outputs.append(Output.of(output, request.prompt, 0, sample))
            if len(request.outputs) == request.n:
                _fulfil(request.future, sorted(request.outputs, key=lambda one: one.sample_index))


def _fulfil(future: Outputs, result: list[Output] | Exception) -> None:
    """Set the result of a future, unless it was cancelled meanwhile."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
