"""Measures what each request costs: the seconds of the device that its tokens took.

`LLMEngine` makes a `CostShares` if costs are asked for (`LLMEngine.measure_costs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.device.step_timing import StepTimer
from batchgen.engine.rows.scheduled_batch import DecodeBatch, MixedBatch, ScheduledBatch
from batchgen.engine.rows.sequence import Sequence

Accounts = npt.NDArray[np.int64]
"""Account numbers, [R] int64. A request has an account from its first step until its costs are
taken."""


class _Shares(NamedTuple):
    """The R rows of a step as account numbers, and the number of tokens that each row had in the
    step. `tokens` is None if all rows had equally many."""

    accounts: Accounts
    tokens: Accounts | None = None


class CostShares:
    """Divides the seconds of each step among the requests whose rows it computed.

    A step's seconds are divided by the number of tokens in its forward. A row that reads a chunk of
    its prompt has the tokens of the chunk. A row that decodes has the width of the step: 1 token,
    or the newest token and all drafts, or a block. So in a mixed step, tokens of prompts and of
    decoding rows cost the same. If the prefix cache held all tokens of a prefill, its rows pay
    equal parts.

    A row pays for everything that was computed for it: also for rejected drafts, for tokens
    computed again after a preemption, and for the step that was launched before the host knew that
    the row had ended. A step that encodes images has their seconds, also those of waiting rows'
    images. So the costs of all requests add up to the seconds of all steps. Pauses of the device
    between steps, and loading weights, are charged to nobody.

    Nothing here waits for the device: `share` is called only for steps whose results were read.
    """

    def __init__(self, timer: StepTimer, capacity: int) -> None:
        """Read the times of `timer`, which must have no other reader. `capacity` is the number of
        batch slots."""
        self._timer = timer
        self._steps: deque[_Shares] = deque()  # begun steps that were not shared yet
        self._shared = 0  # the number of shared steps
        self._accounts: dict[Hashable, int] = {}  # the account of each request that has not ended
        self._of_slot = np.zeros(capacity, np.int64)  # the account of the row in each batch slot
        self._seconds = np.zeros(capacity)  # the seconds charged to each account
        self._free = list(range(capacity))
        # Ended requests, each as (the number of steps to share before its costs are final, the
        # request's id, its account).
        self._ended: deque[tuple[int, Hashable, int]] = deque()

    def begin(self, batch: ScheduledBatch) -> None:
        """Record the rows of a step that is about to be launched."""
        if isinstance(batch, DecodeBatch):
            self._steps.append(_Shares(self._of_slot[batch.batch_slots]))
            return
        prefill = batch.prefill if isinstance(batch, MixedBatch) else batch
        accounts = np.array([self._account(seq) for seq in prefill.seqs], np.int64)
        tokens = np.array(prefill.lengths, np.int64)
        if isinstance(batch, MixedBatch):
            decoding = self._of_slot[batch.decode.batch_slots]
            accounts = np.append(accounts, decoding)
            tokens = np.append(tokens, np.full(len(decoding), batch.decode.width))
        self._steps.append(_Shares(accounts, tokens if tokens.any() else None))

    def share(self, leave: int) -> None:
        """Divide the seconds of all steps except the newest `leave`."""
        while len(self._steps) > leave:
            accounts, tokens = self._steps.popleft()
            seconds = self._timer.take().seconds
            if tokens is None:
                self._seconds[accounts] += seconds / len(accounts)
            else:
                self._seconds[accounts] += seconds * tokens / tokens.sum()
            self._shared += 1

    def end(self, request_id: Hashable) -> None:
        """Record that a request has left the engine."""
        account = self._accounts.pop(request_id, None)
        if account is not None:  # else no step has computed it
            self._ended.append((self._shared + len(self._steps), request_id, account))

    def take(self, *, running: bool = False) -> list[tuple[Any, float]]:
        """Return pairs of a request id and its seconds, and reset these accounts. The requests are
        those whose costs are final and, if `running`, also those that have not ended."""
        costs: list[tuple[Any, float]] = []
        while self._ended and self._ended[0][0] <= self._shared:
            _, request_id, account = self._ended.popleft()
            costs.append((request_id, float(self._seconds[account])))
            self._seconds[account] = 0.0
            self._free.append(account)
        if running:
            for request_id, account in self._accounts.items():
                costs.append((request_id, float(self._seconds[account])))
                self._seconds[account] = 0.0
        return costs

    def _account(self, seq: Sequence) -> int:
        """Return the account of a row in a prefill, opening one if needed, and record it for the
        row's batch slot."""
        account = self._accounts.get(seq.request_id)
        if account is None:
            if not self._free:
                size = len(self._seconds)
                self._free = list(range(size, 2 * size))
                self._seconds = np.append(self._seconds, np.zeros(size))
            account = self._accounts[seq.request_id] = self._free.pop()
        assert seq.batch_slot is not None
        self._of_slot[seq.batch_slot] = account
        return account
