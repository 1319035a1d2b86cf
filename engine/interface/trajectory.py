"""A trajectory: the order in which a diffusion model unmasked the tokens of an answer.

A job records it in the column `step_map`. Given to the engine again, it is *replayed*, to score
each token with what was known when it was unmasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An answer of N tokens and the denoise steps in which they were unmasked, for a replay: each
    token is scored given what was unmasked before its step.

    A row mostly ends inside a block, and what stood behind its last token in that block was
    unmasked beside the others. This is the tail, of M tokens.
    """

    token_ids: Sequence[int]  # [N]
    steps: Sequence[int]  # [N], the column `step_map`
    # [M] each, the same of the tail, which may be empty; None if it is not known.
    tail_token_ids: Sequence[int] | None = None
    tail_steps: Sequence[int] | None = None
    # Whether the tokens were drawn from the distribution that the parameters of the replay
    # describe, and not from what a constraint has left of it.
    same_distribution: bool = True

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """[N + M], the tokens with those of the tail."""
        return [*self.token_ids, *(self.tail_token_ids or ())]

    @property
    def all_steps(self) -> list[int]:
        """[N + M], the steps with those of the tail."""
        return [*self.steps, *(self.tail_steps or ())]


GivenAnswer = Sequence[int] | Trajectory
"""An answer that is scored: token ids, each given those before it, or what is replayed."""


def answer_ids(answer: GivenAnswer) -> list[int]:
    """The token ids of an answer."""
    return list(answer.token_ids if isinstance(answer, Trajectory) else answer)
