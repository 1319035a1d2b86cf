"""A trajectory: the order in which a diffusion model unmasked the tokens of an answer.

A job records trajectories in the column `step_map`. The engine can *replay* a trajectory, to score
each token given what was known when it was unmasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An answer of N tokens and the denoise steps in which they were unmasked. A replay scores each
    token given the tokens that were unmasked before its step.

    A row usually ends inside a block. The M tokens of that block after the row's last token were
    unmasked together with the others; they are called the tail.
    """

    token_ids: Sequence[int]  # [N]
    steps: Sequence[int]  # [N], the column `step_map`
    # [M] each, the token ids and steps of the tail, which may be empty; None if unknown.
    tail_token_ids: Sequence[int] | None = None
    tail_steps: Sequence[int] | None = None
    # Whether the tokens were drawn from the distribution that the replay's parameters describe, and
    # not from that distribution restricted by a constraint.
    same_distribution: bool = True

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """The tokens of the answer and of the tail, [N + M]."""
        return [*self.token_ids, *(self.tail_token_ids or ())]

    @property
    def all_steps(self) -> list[int]:
        """The steps of the answer and of the tail, [N + M]."""
        return [*self.steps, *(self.tail_steps or ())]


GivenAnswer = Sequence[int] | Trajectory
"""An answer to score: token ids, each scored given those before it; or a trajectory to replay."""


def answer_ids(answer: GivenAnswer) -> list[int]:
    """Return the token ids of an answer."""
    return list(answer.token_ids if isinstance(answer, Trajectory) else answer)
