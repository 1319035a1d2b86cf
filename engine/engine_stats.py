"""Counts of what an engine has done since it started: steps, tokens, rows, preemptions, images.

`LLMEngine` keeps them up to date; the summary at the end of a job and the Python API show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.scheduling.image_store import ImageStore
from batchgen.engine.scheduling.scheduler import Scheduler


@dataclass
class EngineStats:
    """Counts since the engine started. A mixed step counts as a prefill and as a decode step."""

    prefill_steps: int = 0  # the number of steps that read prompts
    # The number of tokens that prefills computed, including recomputed ones.
    prefill_tokens: int = 0
    # The number of tokens that prefills did not compute, because the prefix cache had them.
    cached_tokens: int = 0
    decode_steps: int = 0  # the number of steps with decoding rows
    # The sum of the numbers of rows over all decode steps; divided by `decode_steps` it is the mean
    # batch size.
    decode_rows: int = 0
    generated_tokens: int = 0  # the number of tokens generated for finished and running requests
    # Maps the name of each of the strategy's counts to its sum over all rows.
    counts: dict[str, int] = field(default_factory=dict)
    # What the strategy reports besides (`Strategy.stats`).
    strategy: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0  # how often a row lost its cache entries to other rows
    images: int = 0  # the number of images that were encoded, again after a preemption
    image_tokens: int = 0  # the number of their tokens
    # The seconds of the device for them, of the last few only once no request is left.
    image_seconds: float = 0.0
    peak_kv_usage: float = 0.0  # the largest share of the blocks that rows owned, from 0 to 1

    def count_batch(self, batch: ScheduledBatch, scheduler: Scheduler) -> None:
        """Add a scheduled batch."""
        self.preemptions = scheduler.num_preemptions
        self.cached_tokens = scheduler.num_cached_tokens
        self.peak_kv_usage = max(self.peak_kv_usage, scheduler.block_manager.usage)
        if not isinstance(batch, PrefillBatch):
            self.decode_steps += 1
            self.decode_rows += (batch.decode if isinstance(batch, MixedBatch) else batch).num_rows
        if not isinstance(batch, DecodeBatch):
            prefill = batch.prefill if isinstance(batch, MixedBatch) else batch
            self.prefill_steps += 1
            self.prefill_tokens += sum(prefill.lengths)

    def count_rows(
        self, running: RunningBatch, images: ImageStore | None, *, are_last: bool
    ) -> None:
        """Take over the counts of all rows so far. Once rows that ended are the last ones, nothing
        is encoded any more, and the times of all images are known."""
        self.generated_tokens = running.num_committed
        self.counts = dict(running.totals)
        if images is not None:
            if are_last:
                images.read_times()
            self.images, self.image_tokens = images.num_images, images.num_tokens
            self.image_seconds = images.seconds
