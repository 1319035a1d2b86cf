"""One engine for several jobs: each job gets a port that looks like an engine used by it alone.
`run_jobs.py` makes it.

A job queues requests at its port. Only `SharedEngine.step` runs a step of the engine; it gives each
finished request to the port of its job, where the job takes it by `EnginePort.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import Begun, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image
from batchgen.inputs.model.job_engine import Engine
from batchgen.util.request_id import RequestId

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from batchgen.engine.memory.memory_plan import MemoryPlan


class DivisibleEngine(Engine, Protocol):
    """The methods of an engine that several jobs need to share it."""

    @property
    def running_ids(self) -> list[Any]:
        """The ids of the requests that run, in the order of `running_lengths`."""
        ...

    def abort(self, request_id: Any) -> bool:
        """Drop a request."""
        ...


class SharedEngine:
    """An engine that is built when the first job needs it. `step` runs one step for all jobs."""

    def __init__(self, build: Callable[[], DivisibleEngine]) -> None:
        self._build = build
        self._engine: DivisibleEngine | None = None
        self._ports: dict[str, EnginePort] = {}

    def port(self, name: str) -> EnginePort:
        """Make the port of the job with this name; build the engine if there is none yet."""
        if self._engine is None:
            self._engine = self._build()
            self._engine.measure_costs()
        self._ports[name] = EnginePort(name, self._engine, self._collect_costs)
        return self._ports[name]

    def _collect_costs(self, wait: bool) -> None:
        """Hand each job the costs of its requests."""
        assert self._engine is not None
        for request_id, seconds in self._engine.take_costs(wait=wait):
            assert isinstance(request_id, RequestId)
            self._ports[request_id.job].costs.append((request_id, seconds))

    @property
    def in_flight(self) -> int:
        """The number of requests in the engine."""
        return sum(len(port.waiting) for port in self._ports.values())

    def step(self) -> None:
        """Run one step, and give each output to the job that made the request."""
        assert self._engine is not None
        for output in self._engine.step():
            assert isinstance(output.request_id, RequestId)
            self._ports[output.request_id.job].receive(output)

    def close(self) -> None:
        """Stop the engine's background work."""
        if self._engine is not None:
            self._engine.close()


class EnginePort:
    """A shared engine as one job sees it: only with the requests and tokens of this job.

    Attributes:
        name: the job's name, which is part of the ids of its requests.
        waiting: the ids of the job's requests that are in the engine.
        costs: costs of the job's requests, until the job takes them.
    """

    def __init__(
        self, name: str, engine: DivisibleEngine, collect_costs: Callable[[bool], None]
    ) -> None:
        self.name, self._engine = name, engine
        self._collect_costs = collect_costs
        self.costs: list[tuple[Any, float]] = []
        self.waiting: set[RequestId] = set()
        self._finished: list[RequestOutput] = []
        self._tokens = 0
        self._begun: dict[RequestId, int] = {}  # tokens that requests had when they were added

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: list[int],
        params: RequestParams,
        answer: GivenAnswer | None = None,
        images: Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        """Queue a request; see the engine."""
        assert request_id.job == self.name
        request = prompt_token_ids, params, answer, images, begun
        continues = self._engine.add_request(request_id, *request)
        self.waiting.add(request_id)
        if begun is not None and continues:
            self._begun[request_id] = len(begun.token_ids)
        return continues

    def begun_lengths(self) -> dict[RequestId, int]:
        """The number of tokens that each of the job's requests has generated; see the engine."""
        lengths = self._engine.begun_lengths()
        return {id: lengths[id] for id in self.waiting & lengths.keys()}

    def begun(self, request_id: RequestId, start: int = 0) -> Begun | None:
        """What a request of the job has generated; see the engine."""
        return self._engine.begun(request_id, start)

    def receive(self, output: RequestOutput) -> None:
        """Keep a finished request until the job takes it."""
        self.waiting.remove(output.request_id)
        self._finished.append(output)
        self._tokens += len(output.token_ids) - self._begun.pop(output.request_id, 0)

    def step(self) -> list[RequestOutput]:
        """Return the outputs of requests that the engine has finished since the last call. No step
        is run here."""
        finished, self._finished = self._finished, []
        return finished

    def measure_costs(self) -> None:
        """Do nothing: the shared engine measures costs since it was built."""

    def take_costs(self, *, wait: bool = False) -> list[tuple[Any, float]]:
        """The costs of the job's requests since the last call; see the engine."""
        self._collect_costs(wait)
        costs, self.costs = self.costs, []
        return costs

    def close(self) -> None:
        """Remove the job's unfinished requests from the engine, which goes on for other jobs."""
        for request_id in self.waiting:
            self._engine.abort(request_id)
        self.waiting = set()

    @property
    def generated_tokens(self) -> int:
        """The tokens that the job's requests have generated, those of unfinished requests
        included."""
        before = (self._begun.get(id, 0) for id in self._running_ids)
        return self._tokens + int(self.running_lengths.sum()) - sum(before)

    @property
    def _running_ids(self) -> list[RequestId]:
        ids = self._engine.running_ids
        return [id for id in ids if isinstance(id, RequestId) and id.job == self.name]

    @property
    def num_running(self) -> int:
        """The number of the job's requests that run."""
        return len(self.running_lengths)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        """[R] The tokens that each running request of the job has generated so far."""
        ids = self._engine.running_ids
        is_of_job = [isinstance(id, RequestId) and id.job == self.name for id in ids]
        return self._engine.running_lengths[np.array(is_of_job, np.bool_)]

    @property
    def stats(self) -> DataclassInstance:
        """The counts of the engine over all jobs."""
        return self._engine.stats

    @property
    def max_num_seqs(self) -> int:
        """The most requests of all jobs together that run at the same time."""
        return self._engine.max_num_seqs

    @property
    def memory(self) -> MemoryPlan:
        """How the device's memory is divided."""
        return self._engine.memory

    @property
    def batch_dependence(self) -> str | None:
        """Why a token's bits depend on the other rows of its batch; None if they do not."""
        return self._engine.batch_dependence
