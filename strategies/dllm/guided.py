"""Denoise steps of constrained rows: their positions are unmasked from left to right.

Text that the constraint forces is taken at once, whatever was drawn there. The first masked
position that it does not reach draws a token under the mask of what is allowed. Those behind drew
theirs without knowing what stands before: they are taken as long as confidence permits and the
constraint allows them, with what is forced between them.

What is known of a token is of the distribution that it was drawn from: behind the first position
that is the one without the constraint. A forced token has probability 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.constraint.guide import Guide, MaskBuilder
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.execution.transfer import Download, upload
from batchgen.engine.sampling.sampler import Drawn
from batchgen.kernels.sampling.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step takes of B blocks of L positions; other rows than `rows` follow their own rule.

    Attributes:
        rows: [B] bool, those that are constrained and did not end.
        places: [B, L] bool, the positions of theirs that are known from now on.
        conflicts: [B] bool, rows in which nothing was allowed at a position that had to be drawn.
    """

    rows: npt.NDArray[np.bool_]
    places: npt.NDArray[np.bool_]
    conflicts: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Run:
    """What a row takes from its first masked position on.

    Attributes:
        row: of the batch.
        start: the position.
        room: positions from there to the block's end.
        token_ids: those taken so far.
        forced: the places in token_ids of those that had to come.
    """

    row: int
    matcher: Matcher
    start: int
    room: int
    token_ids: list[int]
    forced: list[int]

    def force(self) -> None:
        """Take what must come next."""
        count = len(self.token_ids)
        if count < self.room and (token_ids := self.matcher.forced(self.room - count)):
            self.token_ids += token_ids
            self.forced += range(count, len(self.token_ids))

    def extend(self, drawn: list[int], permitted: list[int]) -> None:
        """Take what was drawn, the next token under a mask. Both are from `start` on."""
        place = masked = len(self.token_ids)
        while place < self.room:
            if self.matcher.terminated:
                self.token_ids += drawn[place:]  # behind a stop nothing is read
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
    """One step. Waits for what the device draws, unless all is forced.

    The matchers are left behind what was taken, tentatively: a block is committed as a whole.

    Args:
        masked: [B, L].
        logits: [B · L, V].
        draw: a token for each of them, under a mask.
        permit: [B, L] bool, the positions that may be taken behind the first one.

    Returns:
        The tokens that were drawn, those that had to come in their places, and what is taken.
    """
    rows, length = masked.shape
    taken = Taken(np.zeros(rows, np.bool_), np.zeros_like(masked), np.zeros(rows, np.bool_))
    runs = []
    for row, matcher in guide.matchers:
        taken.rows[row] = True
        if masked[row].any():
            start = int(masked[row].argmax())
            runs.append(_Run(row, matcher, start, length - start, [], []))
            # Behind tokens that an earlier step took, what is forced was taken as well.
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
    """Take of what was drawn; permitted: [B, L]."""
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
    """With the tokens that had to come, and with all that is asked for of them."""
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
