"""Counts forwards per row and denoise steps per block, for the output's columns and the job's
summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.interface.outputs import HostOutput, RowCount
from batchgen.strategies.counts import NUM_FORWARDS, tokens_per_forward
from batchgen.strategies.dllm.block_rows import BlockRows, KnownBlocks

NUM_COMMIT_FORWARDS = RowCount(
    "num_commit_forwards", "of those forwards, how many only made KV final"
)
"""Both counts assume that a commit always finds room in a forward with denoise steps, where that is
allowed. So they depend only on the row."""

DENOISED = "denoised"
"""The name in `StepOutput.observed` of the number of denoise steps of each row's block."""
ALONE = "alone"
"""The name in `StepOutput.observed` of the rows whose blocks committed in a separate forward."""
LACKING = "lacking"
"""The name in `StepOutput.observed` of the rows whose blocks a step completed without making their
KV final."""
_COMMITS_ALONE = "commits_alone"
"""The name in `stats` of how many blocks committed in a separate forward."""
_STEPS_PER_BLOCK = "steps_per_block"
"""The name in `stats` of how often a block took each number of denoise steps."""


class BlockSteps:
    """Counts the denoise steps of the blocks that an engine completes."""

    def __init__(self) -> None:
        self._steps_per_block: Counter[int] = Counter()
        self._commits_alone = 0

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Count the blocks that a step has completed in the rows `current` [B] bool."""
        yielding = step.num_tokens > 0
        self._steps_per_block.update(step.observed[DENOISED][yielding & current].tolist())
        self._commits_alone += int((step.observed[ALONE] & current).sum())

    def stats(self) -> Mapping[str, Any]:
        """Return `steps_per_block`, which maps a number of denoise steps to the number of blocks
        that took as many, and `commits_alone`, how many blocks committed in a separate forward."""
        return {
            _STEPS_PER_BLOCK: dict(sorted(self._steps_per_block.items())),
            _COMMITS_ALONE: self._commits_alone,
        }


def summary_lines(
    counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
) -> list[tuple[str, str]]:
    """Return lines (name, value) about forwards for the table at the end of a job."""
    commits = counts[NUM_COMMIT_FORWARDS.name]
    denoising = counts[NUM_FORWARDS.name] - commits
    lines = tokens_per_forward(counts, num_tokens)
    lines.append(("forwards", f"{denoising:,} to denoise, {commits:,} to commit"))
    if stats:
        lines.append(("steps per block", _shares(stats[_STEPS_PER_BLOCK])))
    return lines


def count_forwards(
    blocks: BlockRows,
    outcome: KnownBlocks,
    yielded: Tensor,
    ended: Tensor,
    guided: Tensor | None,
    *,
    fused: bool,
    late: bool,
) -> dict[str, Tensor]:
    """Return the counts of forwards, [B] each by name, of the blocks that a step yields and of rows
    that end.

    A block's denoise steps are counted when the block is complete, so that steps undone by a
    preemption do not count.

    Args:
        blocks: the blocks that the step has read.
        yielded: [B] bool, the rows whose block in `outcome` is yielded.
        ended: [B] bool, the rows that end in the step.
        guided: [B] bool, the rows with a constraint; None if no row has one.
        fused: whether commits may share a forward with denoise steps.
        late: whether blocks are yielded by the forward that makes their KV final.
    """
    forwards = torch.where(yielded, outcome.denoised, 0)
    forwards += torch.where(ended, blocks.denoised + 1, 0)
    # `extra`: whether a row had a forward besides the denoise steps; `commits`: whether a forward
    # only made its KV final.
    if late:
        # A row's block becomes final in the first denoise step of the next block, or in a separate
        # forward.
        first, last = (outcome.starts == each for each in (blocks.first_starts, blocks.last_starts))
        alone = torch.ones_like(yielded) if not fused else guided
        extra, commits = yielded & first, yielded & last
        if alone is not None:
            extra, commits = (torch.where(alone, yielded, each) for each in (extra, commits))
    elif fused:
        extra = commits = torch.zeros_like(yielded)
    else:
        # A row's last block needs no final keys and values.
        extra = commits = (yielded | ended) & (blocks.starts > blocks.first_starts)
    return {
        NUM_FORWARDS.name: forwards.int() + extra,
        NUM_COMMIT_FORWARDS.name: commits.int(),
    }


def _shares(numbers: Mapping[int, int]) -> str:
    """Format how often each number occurred as shares, such as "1: 25.0%, 2: 75.0%"."""
    total = sum(numbers.values())
    return ", ".join(f"{n}: {count / total:.1%}" for n, count in numbers.items()) or "none"
