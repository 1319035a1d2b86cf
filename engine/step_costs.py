"""What each request costs: the seconds of the device that its tokens took."""

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
"""Numbers of accounts, [R] int64. A request has one from its first step until it is taken."""


class _Shares(NamedTuple):
    """The rows of a step, by their accounts, and what each has of the step's tokens [R]; None if
    all have alike."""

    accounts: Accounts
    tokens: Accounts | None = None


class CostShares:
    """Shares the seconds of each step among the requests whose rows it computed.

    A step's seconds are divided by the tokens of its forward. A row that reads a chunk of its
    prompt has the tokens of the chunk; a row that decodes has the width of the step: 1 token, or
    the newest and all drafts, or a block. So a token of a prefill costs what prefills take, a token
    of a decode step what such steps take, and in a step that does both all tokens cost alike. If
    the prefix cache had all tokens of a prefill, its rows pay alike.

    A row pays for all that was computed for it: for drafts that were rejected, for tokens that were
    computed again after a preemption, and for the step that was launched before the host knew that
    the row had ended. So the costs of all requests add up to the seconds of all steps. The device's
    waits between steps and the loading of weights are no step's seconds.

    Nothing here waits for the device: `share` is called for steps whose results were read.
    """

    def __init__(self, timer: StepTimer, capacity: int) -> None:
        """Use the times of `timer`, which nobody else takes; `capacity` is the number of batch
        slots."""
        self._timer = timer
        self._steps: deque[_Shares] = deque()  # those that were begun and not shared
        self._shared = 0  # the number of steps that were
        self._accounts: dict[Hashable, int] = {}  # of requests that have not ended
        self._of_slot = np.zeros(capacity, np.int64)
        self._seconds = np.zeros(capacity)  # by account
        self._free = list(range(capacity))
        # Requests that have ended: how many steps must be shared before the costs are final.
        self._ended: deque[tuple[int, Hashable, int]] = deque()

    def begin(self, batch: ScheduledBatch) -> None:
        """Note the rows of a step that is launched next."""
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
        """Share the seconds of all steps but the newest `leave`."""
        while len(self._steps) > leave:
            accounts, tokens = self._steps.popleft()
            seconds = self._timer.take().seconds
            if tokens is None:
                self._seconds[accounts] += seconds / len(accounts)
            else:
                self._seconds[accounts] += seconds * tokens / tokens.sum()
            self._shared += 1

    def end(self, request_id: Hashable) -> None:
        """Note that a request has left the engine."""
        account = self._accounts.pop(request_id, None)
        if account is not None:  # else no step has computed it
            self._ended.append((self._shared + len(self._steps), request_id, account))

    def take(self, *, running: bool = False) -> list[tuple[Any, float]]:
        """Return costs in seconds by request, and forget them: those that are final, and with
        `running` what requests took so far that have not ended."""
        costs: list[tuple[Any, float]] = []
        while self._ended and self._ended[0][0] <= self._shared:
            _, request_id, account = self._ended.popleft()
            costs.append((request_id, float(self._seconds[account])))
            self._seconds[account] = 0.0
            self._free.append(account)
        for request_id, account in self._accounts.items() if running else ():
            costs.append((request_id, float(self._seconds[account])))
            self._seconds[account] = 0.0
        return costs

    def _account(self, seq: Sequence) -> int:
        """Return the account of a row that a prefill reads, and note its batch slot."""
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
