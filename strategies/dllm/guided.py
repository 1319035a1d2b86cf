"""Denoise steps of constrained rows, whose positions are unmasked from left to right.

A constraint can only tell what may follow when all tokens before are known. So a step takes tokens
of a row in this order, and stops where it must not go on:

- Tokens that the constraint forces at the first masked position are taken at once, whatever was
  drawn there.
- The first position behind them draws its token under the mask of what the constraint allows.
- The positions after it drew their tokens without the constraint. They are taken as long as the
  unmasking rule permits and the constraint allows them, and so is what is forced between them.

The log-probabilities of a token are of the distribution that it was drawn from. Behind the position
that draws under the mask, that is the distribution without the constraint. A forced token has
probability 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.device.transfer import Download, upload
from batchgen.engine.rows.guide import Guide, MaskBuilder
from batchgen.engine.sampling.sampler import Drawn
from batchgen.kernels.sampling.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step takes of the constrained rows among B rows with a block of L positions each."""

    # [B] bool, the rows that have a constraint and have not ended. The other rows follow the
    # ordinary unmasking rule.
    rows: npt.NDArray[np.bool_]
    places: npt.NDArray[np.bool_]  # [B, L] bool, the positions of these rows that the step unmasks
    # [B] bool, the rows in which no token was left at the position that had to draw one under the
    # mask.
    conflicts: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Run:
    """The tokens that a step takes of one row, from its first masked position on."""

    row: int  # the row's index in the batch
    matcher: Matcher  # the row's matcher, which stands behind the row's last taken token
    start: int  # the index in the block of the first masked position
    room: int  # how many positions there are from there to the end of the block
    token_ids: list[int]  # the tokens taken so far
    forced: list[int]  # the indices in `token_ids` of the tokens that the constraint forced

    def force(self) -> None:
        """Take the tokens that the constraint forces next, as far as the block reaches."""
        count = len(self.token_ids)
        if count < self.room and (token_ids := self.matcher.forced(self.room - count)):
            self.token_ids += token_ids
            self.forced += range(count, len(self.token_ids))

    def extend(self, drawn: list[int], permitted: list[int]) -> None:
        """Take drawn tokens, and the forced ones between them, as long as both the unmasking rule
        and the constraint allow.

        Args:
            drawn: the token that was drawn at each position from `start` on. The first one that is
                not taken yet was drawn under the mask.
            permitted: for each of these positions, whether the unmasking rule lets it be taken.
        """
        place = masked = len(self.token_ids)
        while place < self.room:
            if self.matcher.terminated:
                self.token_ids += drawn[place:]  # the row ends before them, so they may be anything
                return
            if place > masked and not permitted[place]:
                return
            if not self.matcher.walk(drawn[place : place + 1]):
                assert place > masked, "its mask allowed another"
                return
            self.token_ids.append(drawn[place])
            self.force()
            place = len(self.token_ids)


def denoise(
    guide: Guide,
    masked: npt.NDArray[np.bool_],
    logits: Tensor,
    draw: Callable[[TokenMask | None], Drawn],
    permit: Callable[[Drawn], Tensor],
) -> tuple[Drawn, Taken]:
    """Decide what a denoise step takes of the constrained rows. Waits for the tokens that the
    device draws, unless everything is forced.

    The matchers take the tokens only tentatively, because a block is committed as a whole. Returns
    the drawn tokens of all B · L positions, with the forced ones in their places, and what is
    taken.

    Args:
        masked: [B, L] bool, the positions of each row's block that are still masked.
        logits: [B · L, V], the logits of all positions.
        draw: draws a token for each position under a mask, or freely if that is None.
        permit: says, given the draw, which positions [B, L] the unmasking rule lets be taken after
            the first one.
    """
    rows, length = masked.shape
    taken = Taken(np.zeros(rows, np.bool_), np.zeros_like(masked), np.zeros(rows, np.bool_))
    runs = []
    for row, matcher in guide.matchers:
        taken.rows[row] = True
        if masked[row].any():
            start = int(masked[row].argmax())
            runs.append(_Run(row, matcher, start, length - start, [], []))
            # If an earlier step took tokens of this block, it took what they force as well.
            if matcher.num_tokens == matcher.num_committed:
                runs[-1].force()
    drawing = [run for run in runs if len(run.token_ids) < run.room]
    masks = MaskBuilder(logits)
    masks.allow(
        [run.row * length + run.start + len(run.token_ids) for run in drawing],
        [run.matcher for run in drawing],
    )
    drawn = draw(masks.build() if drawing else None)
    if drawing:
        _take_drawn(drawn, permit(drawn), drawing, taken)
    for run in runs:
        taken.places[run.row, run.start : run.start + len(run.token_ids)] = True
    return _with_forced(drawn, runs, length, masks, draw), taken


def _take_drawn(drawn: Drawn, permitted: Tensor, runs: list[_Run], taken: Taken) -> None:
    """Wait for the drawn tokens and let each row take of them, unless its logits are broken or its
    constraint conflicts. `permitted` is [B, L] bool, the positions that the unmasking rule lets be
    taken."""
    assert drawn.conflict is not None
    shape = taken.places.shape
    flags = (permitted.flatten(), drawn.failed, drawn.conflict)
    sent = Download(torch.stack((drawn.token_ids, *flags)))  # one copy, for one wait
    token_ids, allowed, failed, conflict = sent.wait().reshape(4, *shape)
    for run in runs:
        row, place = run.row, run.start + len(run.token_ids)
        taken.conflicts[row] = conflict[row, place]
        if not (failed[row, place] or conflict[row, place]):
            run.extend(token_ids[row, run.start :].tolist(), allowed[row, run.start :].tolist())


def _with_forced(
    drawn: Drawn,
    runs: list[_Run],
    length: int,
    masks: MaskBuilder,
    draw: Callable[[TokenMask], Drawn],
) -> Drawn:
    """Put the forced tokens into the draw. If any row asks for output columns, draw again with only
    the forced token allowed in each of their positions, so that the columns are those of the forced
    tokens. The arguments are those of `denoise` and what it made."""
    forced = {
        run.row * length + run.start + place: run.token_ids[place]
        for run in runs
        for place in run.forced
    }
    if not forced:
        return drawn
    if drawn.columns:
        masks.allow_only(forced)
        drawn = draw(masks.build())
    device = drawn.token_ids.device
    index = upload(list(forced), torch.int64, device)
    values = upload(list(forced.values()), torch.int64, device)
    return drawn._replace(token_ids=drawn.token_ids.index_copy(0, index, values))
