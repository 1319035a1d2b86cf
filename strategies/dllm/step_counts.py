"""Counts how many forwards rows take, and how many denoise steps their blocks, for the columns of
the output and the summary of a job."""

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
"""Both counts are those of a row for which commits always find room beside denoise steps, if they
may be there at all. So they depend on the row alone."""

DENOISED = "denoised"
"""The name in `StepOutput.observed` of how many denoise steps the block of each row has had."""
ALONE = "alone"
"""The name there of which rows' blocks committed in a forward of their own."""
LACKING = "lacking"
"""The name there of which rows' blocks a step completed without making their KV final."""
_COMMITS_ALONE = "commits_alone"
"""The name in `stats` of how often that happened."""
_STEPS_PER_BLOCK = "steps_per_block"
"""The name in `stats` of how often a block took each number of denoise steps."""


class BlockSteps:
    """Counts the denoise steps of the blocks that an engine completes."""

    def __init__(self) -> None:
        self._steps_per_block: Counter[int] = Counter()
        self._commits_alone = 0

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Count the blocks that a step has completed of the rows in `current` [B] bool."""
        yielding = step.num_tokens > 0
        self._steps_per_block.update(step.observed[DENOISED][yielding & current].tolist())
        self._commits_alone += int((step.observed[ALONE] & current).sum())

    def stats(self) -> Mapping[str, Any]:
        """`steps_per_block`: the number of denoise steps → how many blocks took that many.
        `commits_alone`: how many blocks committed in a forward of their own."""
        return {
            _STEPS_PER_BLOCK: dict(sorted(self._steps_per_block.items())),
            _COMMITS_ALONE: self._commits_alone,
        }


def summary_lines(
    counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
) -> list[tuple[str, str]]:
    """What the table at the end of a job says of its forwards: names and values."""
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
    """Count the forwards of the blocks that a step yields, and of those in which rows have ended.

    A block's denoise steps count once it is there, so that those which a preemption undid do not.

    Args:
        blocks: those that the step has read.
        yielded: [B] bool, the rows whose block in `outcome` is yielded.
        ended: [B] bool, the rows that end in the step.
        guided: [B] bool, the rows with a constraint; None if there are none.
        fused: whether commits may find room beside denoise steps.
        late: whether blocks are yielded by the forward that makes their KV final.
    """
    forwards = torch.where(yielded, outcome.denoised, 0)
    forwards += torch.where(ended, blocks.denoised + 1, 0)
    if late:
        # Its last block is final in the first denoise step of the next, or alone.
        first, last = (outcome.starts == each for each in (blocks.first_starts, blocks.last_starts))
        alone = torch.ones_like(yielded) if not fused else guided
        extra, commits = yielded & first, yielded & last
        if alone is not None:
            extra, commits = (torch.where(alone, yielded, each) for each in (extra, commits))
    elif fused:
        extra = commits = torch.zeros_like(yielded)
    else:
        # Its last block needs no final keys and values.
        extra = commits = (yielded | ended) & (blocks.starts > blocks.first_starts)
    return {
        NUM_FORWARDS.name: forwards.int() + extra,
        NUM_COMMIT_FORWARDS.name: commits.int(),
    }


def _shares(numbers: Mapping[int, int]) -> str:
    """Write how often each number occurred as shares of all, such as "1: 25.0%, 2: 75.0%"."""
    total = sum(numbers.values())
    return ", ".join(f"{n}: {count / total:.1%}" for n, count in numbers.items()) or "none"
