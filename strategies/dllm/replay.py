"""Rows that replay a trajectory (the tokens of an answer and the denoise step that wrote each): the
trajectory determines which tokens a step unmasks.

Everything else is as if the tokens were drawn: the same blocks, forwards and steps. So the
log-probability of a token is given the tokens that were unmasked before its step, and has the bits
that it had when the token was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.interface.trajectory import Trajectory
from batchgen.engine.rows.sequence import Sequence

_LAST = torch.iinfo(torch.int32).max
"""A number above that of every step."""


@dataclass(frozen=True)
class Replays:
    """The trajectories of B rows, from the first position of the row's first block on. Some rows
    may have none. T is the length of the longest, in whole blocks."""

    token_ids: Tensor  # [B, T] int64
    steps: Tensor  # [B, T] int64, the step that unmasks each position; 0 if none does
    replaying: npt.NDArray[np.bool_]  # [B] on the host, the rows that have a trajectory

    @classmethod
    def of(
        cls, seqs: Rows[Sequence], length: int, mask_token_id: int, device: torch.device
    ) -> Replays:
        """Upload the trajectories of rows with blocks of `length` positions."""
        replaying = np.array([seq.trajectory is not None for seq in seqs])
        lines = [_line(seq, length, mask_token_id) for seq in seqs]
        longest = max(line.shape[1] for line in lines)
        table = np.zeros((2, len(seqs), longest), np.int64)
        for row, line in enumerate(lines):
            table[:, row, : line.shape[1]] = line
        token_ids, steps = upload(table, torch.int64, device)
        return cls(token_ids, steps, replaying)

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Replays:
        """Return an object for rows without trajectories."""
        empty = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        return cls(empty, empty, np.zeros(rows, np.bool_))

    @property
    def rows(self) -> Tensor:
        """The rows that have a trajectory, [B] bool on the device."""
        return upload(self.replaying, torch.bool, self.steps.device)

    def index_select(self, keep: npt.NDArray[np.int64]) -> Replays:
        """Return the trajectories of the rows at these indices."""
        index = upload(keep, torch.int64, self.steps.device)
        return Replays(self.token_ids[index], self.steps[index], self.replaying[keep])

    def concat(self, others: Replays) -> Replays:
        """Append the trajectories of other rows."""
        width = max(self.steps.shape[1], others.steps.shape[1])

        def joined(first: Tensor, second: Tensor) -> Tensor:
            return torch.cat((_padded(first, width), _padded(second, width)))

        return Replays(
            joined(self.token_ids, others.token_ids),
            joined(self.steps, others.steps),
            np.append(self.replaying, others.replaying),
        )

    def at(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token ids and the steps, [B, L] int64 each, at positions [B, L] int64 relative
        to the table's start. After the end of a row they are undefined."""
        index = offsets.clamp(max=self.steps.shape[1] - 1)
        return self.token_ids.gather(1, index), self.steps.gather(1, index)


def next_step(masked: Tensor, steps: Tensor) -> Tensor:
    """Return the masked positions of blocks that the next of their `steps` [B, L] unmasks, [B, L]
    bool."""
    first = steps.masked_fill(~masked, _LAST).amin(1, keepdim=True)
    return masked & (steps == first)


def is_exact(trajectory: Trajectory, num_prompt_tokens: int, length: int) -> bool:
    """Return whether each step of a replay reads what was read when its tokens were drawn. It does
    not if the tokens after the answer in its last block are unknown.

    Raises:
        RequestError: `bad_step_map`, if no row with blocks of `length` positions can have had these
            steps.
    """
    steps, tail = trajectory.all_steps, trajectory.tail_token_ids
    ids = trajectory.all_token_ids
    if len(steps) != len(ids) or len(trajectory.steps) != len(trajectory):
        raise _bad(f"{len(ids)} tokens have {len(steps)} steps")
    if min(steps) < 1:
        raise _bad(f"step {min(steps)} is below 1")
    end = num_prompt_tokens + len(trajectory)
    rest = -end % length
    if tail is not None and len(tail) > rest:
        raise _bad(f"the tail has {len(tail)} tokens, and its block has {rest} after the answer")
    # The answer's tokens in its first block, which may begin with prompt tokens.
    first = length - num_prompt_tokens % length
    last = 0  # the last step of the block before
    for start in (0, *range(first, len(steps), length)):
        block = steps[start : first if start == 0 else start + length]
        if min(block) <= last:
            raise _bad(
                f"token {start + block.index(min(block))} has step {min(block)}, and the block "
                f"before its own has step {last}: block_length is {length}"
            )
        last = max(block)
    return tail is not None or not rest


def _bad(what: str) -> RequestError:
    """Make the error of steps that cannot be replayed."""
    return RequestError(
        "bad_step_map",
        f"the steps of the answer are not those of a row that was generated with these options: "
        f"{what}",
    )


def _line(seq: Sequence, length: int, mask_token_id: int) -> npt.NDArray[np.int64]:
    """Return the token ids and the steps of a row, [2, T] int64. Unknown tokens of its last block
    are unmasked in the last step, so no denoise step reads them; they are mask tokens for the
    commit forward."""
    if seq.trajectory is None:
        return np.zeros((2, length), np.int64)
    before = seq.num_prompt_tokens % length
    known = before + len(seq.trajectory.all_steps)
    line = np.zeros((2, -(-known // length) * length), np.int64)
    line[:, before:known] = seq.trajectory.all_token_ids, seq.trajectory.all_steps
    line[0, known:], line[1, known:] = mask_token_id, max(seq.trajectory.all_steps)
    return line


def _padded(table: Tensor, width: int) -> Tensor:
    """Append zeros to the lines of a table [B, T]: [B, width]."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
