"""Counts of what an engine has done since it started: steps, tokens, rows, preemptions, images.

`LLMEngine` updates one `EngineStats` in every step. The summary at the end of a job and the Python
API show it.
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
    """Counts since the engine started. A mixed step counts both as a prefill step and as a decode
    step."""

    prefill_steps: int = 0  # the number of steps that read prompts
    # The number of tokens that prefills computed. Tokens that are computed again after a preemption
    # count again.
    prefill_tokens: int = 0
    # The number of prompt tokens that prefills skipped because the prefix cache held them.
    cached_tokens: int = 0
    decode_steps: int = 0  # the number of steps with decoding rows
    # The sum of the batch sizes of all decode steps; divided by `decode_steps`, it is the mean
    # batch size.
    decode_rows: int = 0
    generated_tokens: int = 0  # the number of tokens generated for finished and running requests
    # Maps the name of each of the strategy's counts to its sum over all rows.
    counts: dict[str, int] = field(default_factory=dict)
    # Further statistics of the strategy (`Strategy.stats`).
    strategy: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0  # how often a row lost its cache entries to other rows
    # The number of images that were encoded. An image counts again if a preemption makes the
    # engine encode it again.
    images: int = 0
    image_tokens: int = 0  # the number of tokens of these images
    # The device's seconds for encoding images. The newest images are missing until all requests
    # have ended, because their times are read late.
    image_seconds: float = 0.0
    peak_kv_usage: float = 0.0  # the largest share of the blocks that rows owned, from 0 to 1

    def count_batch(self, batch: ScheduledBatch, scheduler: Scheduler) -> None:
        """Add a scheduled batch to the counts."""
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
        """Copy the totals over all rows so far.

        Args:
            images: the encoder of images; None if the model reads none.
            are_last: whether no unfinished request is left. Then no image is being encoded, and the
                times of all images can be read without waiting.
        """
        self.generated_tokens = running.num_committed
        self.counts = dict(running.totals)
        if images is not None:
            if are_last:
                images.read_times()
            self.images, self.image_tokens = images.num_images, images.num_tokens
            self.image_seconds = images.seconds
