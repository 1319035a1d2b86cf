"""Denoise steps of constrained rows: their positions are unmasked from left to right.

The first masked position draws a token that the constraint allows. Those behind it drew theirs
without knowing what stands before; they are taken as long as they are permitted by confidence and
allowed by the constraint. Where only one token is allowed, it is taken whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.guide import Guide, MaskBuilder
from batchgen.engine.matcher import Matcher
from batchgen.engine.sampler import Drawn
from batchgen.engine.transfer import Download
from batchgen.kernels.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step takes of B blocks of L positions; other rows than `rows` follow their own rule.

    Attributes:
        rows: [B] bool, those that are constrained and did not end.
        places: [B, L] bool, the positions of theirs that are known from now on.
        conflicts: [B] bool, rows in which nothing was allowed at the first masked position.
    """

    rows: npt.NDArray[np.bool_]
    places: npt.NDArray[np.bool_]
    conflicts: npt.NDArray[np.bool_]


def denoise(
    guide: Guide,
    masked: npt.NDArray[np.bool_],
    logits: Tensor,
    draw: Callable[[TokenMask], Drawn],
    permit: Callable[[Drawn], Tensor],
) -> tuple[Drawn, Taken]:
    """One step. Waits for the device: what comes next depends on what it drew.

    The matchers are left behind what was taken, tentatively: a block is committed as a whole.

    Args:
        masked: [B, L].
        logits: [B · L, V].
        draw: a token for each of them under a mask.
        permit: [B, L] bool, the positions that may be taken behind the first one.

    Returns:
        The tokens that were drawn, those that had to come in their places, and what is taken.
    """
    length = masked.shape[1]
    matchers = {row: matcher for row, matcher in guide.matchers if masked[row].any()}
    firsts = {row: int(masked[row].argmax()) for row in matchers}
    taken = Taken(
        np.zeros(len(masked), np.bool_), np.zeros_like(masked), np.zeros(len(masked), np.bool_)
    )
    taken.rows[[row for row, _ in guide.matchers]] = True
    masks = MaskBuilder(logits, max(len(matchers), 1) * length)
    masks.allow([row * length + first for row, first in firsts.items()], list(matchers.values()))
    drawn = draw(masks.build())
    assert drawn.conflict is not None
    sent = [Download(t) for t in (drawn.token_ids, permit(drawn), drawn.failed | drawn.conflict)]
    token_ids, permitted, broken = (values.wait().reshape(masked.shape) for values in sent)
    conflict = Download(drawn.conflict).wait().reshape(masked.shape)
    forced = 0
    for row, matcher in matchers.items():
        first = firsts[row]
        if broken[row, first]:
            taken.conflicts[row] = conflict[row, first]
            continue
        run = _run(matcher, token_ids[row, first:].tolist(), permitted[row, first:].tolist())
        taken.places[row, first : first + len(run)] = True
        for place, token_id in enumerate(run, first):
            if token_id != token_ids[row, place]:
                masks.allow_only(row * length + place, token_id)
                forced += 1
    # Once more, so that all that is known of a token is of the one that is taken.
    return (draw(masks.build()) if forced else drawn), taken


def _run(matcher: Matcher, drawn: list[int], permitted: list[bool]) -> list[int]:
    """The tokens that are taken from the first masked position on."""
    allowed = matcher.walk(drawn[:1])
    assert allowed, "its mask allowed another"
    run = drawn[:1]
    while len(run) < len(drawn) and not matcher.terminated:
        if forced := matcher.forced(len(drawn) - len(run)):
            run += forced
        elif permitted[len(run)] and matcher.walk(drawn[len(run) : len(run) + 1]):
            run.append(drawn[len(run)])
        else:
            return run
    return run + drawn[len(run) :]  # behind a stop nothing is read
