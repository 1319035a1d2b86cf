"""`Engine`, the interface of the engine that jobs use. `LLMEngine` implements it, and so does a
job's port to an engine that several jobs share (`jobs/run/shared_engine.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import Begun, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image
from batchgen.util.request_id import RequestId

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from batchgen.engine.memory.memory_plan import MemoryPlan


class Engine(Protocol):
    """The engine of a job, as its rows and its metrics use it."""

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: list[int],
        params: RequestParams,
        answer: GivenAnswer | None = None,
        images: Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        """Queue a request.

        Args:
            answer: the answer to score; None lets the request generate one.
            images: the images of the prompt.
            begun: what another engine generated for this request, to continue from.

        Returns:
            Whether it continues from `begun`; if not, it starts from the prompt.

        Raises:
            RequestError: it can never be served.
        """
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that it finished."""
        ...

    def begun_lengths(self) -> dict[Any, int]:
        """Return the number of generated tokens of each unfinished request that has any."""
        ...

    def begun(self, request_id: Any, start: int = 0) -> Begun | None:
        """Return the output of an unfinished request from the token `start` on; None if part of it
        is not available yet."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens that were generated so far, with those of unfinished requests."""
        ...

    @property
    def num_running(self) -> int:
        """The number of requests that run; the others wait for their turn."""
        ...

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens that each running request has generated so far,
        [num_running]."""
        ...

    @property
    def stats(self) -> DataclassInstance:
        """The counts of the engine since it started, for metrics.json."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """The most requests that run at the same time."""
        ...

    @property
    def memory(self) -> MemoryPlan:
        """How the device's memory is divided."""
        ...

    @property
    def batch_dependence(self) -> str | None:
        """Why a token's bits depend on the other rows of its batch; None if they do not."""
        ...

    def measure_costs(self) -> None:
        """Begin to measure the device time of requests; see `take_costs`."""
        ...

    def take_costs(self, *, wait: bool = False) -> list[tuple[Any, float]]:
        """Return (request id, device seconds) of the requests that have finished since the last
        call; with `wait`, of all requests. Each request is returned once."""
        ...

    def close(self) -> None:
        """Stop background work without waiting for it."""
        ...
