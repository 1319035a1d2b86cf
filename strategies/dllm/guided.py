"""Denoise steps of constrained rows, whose positions are unmasked from left to right.

A constraint can say what may follow only when all tokens before are known. So a step takes the
tokens of a row in this order, and stops at the first one that it must not take:

- Tokens that the constraint forces at the first masked position are taken at once, whatever was
  drawn there.
- The first position after them draws its token under the mask of the allowed tokens.
- Later positions drew their tokens without the constraint. They are taken as long as the unmasking
  rule permits and the constraint allows them, together with forced tokens between them.
- Then tokens that the rule replaces are tried one by one, from left to right: the matcher goes back
  to the replaced position and reads the block again. A replacement is taken if the block, up to the
  newest token, still begins a legal text.

The log-probabilities of a token describe the distribution that it was drawn from. After the
position that draws under the mask, and where a token is replaced, that is the distribution without
the constraint. A forced token has probability 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

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
    """The tokens that a step takes in the constrained rows among B rows with blocks of L
    positions."""

    # [B] bool, the rows that have a constraint and have not ended. Other rows follow the unmasking
    # rule alone.
    rows: npt.NDArray[np.bool_]
    unmasks: npt.NDArray[np.bool_]  # [B, L] bool, the positions of these rows that are unmasked
    edited: npt.NDArray[np.bool_]  # [B, L] bool, the positions of these rows that are replaced
    # [B] bool, the rows in which the mask and other options left no token at the position that
    # draws under the mask.
    conflicts: npt.NDArray[np.bool_]

    @classmethod
    def nothing(cls, rows: int, length: int) -> Taken:
        """Return a step of B rows with blocks of L positions that has not taken anything yet."""
        constrained, conflicts = np.zeros((2, rows), np.bool_)
        unmasks, edited = np.zeros((2, rows, length), np.bool_)
        return cls(constrained, unmasks, edited, conflicts)


@dataclass(slots=True)
class _Run:
    """The tokens that a step takes in one row, from its first masked position on."""

    row: int  # the row's index in the batch
    matcher: Matcher  # the row's matcher, which has read all tokens taken so far
    start: int  # the index in the block of the first masked position
    room: int  # the number of positions from there to the end of the block
    token_ids: list[int] = field(default_factory=list)  # the tokens taken so far
    # The indices in `token_ids` of the tokens that the constraint forced.
    forced: list[int] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """Whether there is a masked position after the tokens taken so far."""
        return len(self.token_ids) < self.room

    def force(self) -> None:
        """Take the tokens that the constraint forces next, up to the end of the block."""
        count = len(self.token_ids)
        if self.draws and (token_ids := self.matcher.forced(self.room - count)):
            self.token_ids += token_ids
            self.forced += range(count, len(self.token_ids))

    def extend(self, drawn: list[int], permitted: list[int]) -> None:
        """Take drawn tokens, and forced ones between them, as long as both the unmasking rule and
        the constraint allow it.

        Args:
            drawn: the token drawn at each position from `start` on. The first one not taken yet was
                drawn under the mask.
            permitted: for each of these positions, whether the unmasking rule permits to take it.
        """
        index = masked = len(self.token_ids)
        while index < self.room:
            if self.matcher.terminated:
                self.token_ids += drawn[index:]  # the row ends before these, so any tokens will do
                return
            if index > masked and not permitted[index]:
                return
            if not self.matcher.walk(drawn[index : index + 1]):
                assert index > masked, "the token drawn under the mask is not allowed"
                return
            self.token_ids.append(drawn[index])
            self.force()
            index = len(self.token_ids)

    def edit(self, old_ids: list[int], drawn: list[int], positions: list[int]) -> list[int]:
        """Replace tokens of the block by drawn ones where the constraint allows it, and return
        these positions. If the row then ends in the block, take any drawn tokens after its end.

        Args:
            old_ids: the token at each position that an earlier step has unmasked; elsewhere -1.
            drawn: the token drawn at each position.
            positions: the positions where the rule replaces tokens, ascending.
        """
        first = self.start - sum(token_id >= 0 for token_id in old_ids)
        tokens, allowed = [*old_ids[first : self.start], *self.token_ids], list[int]()
        for position in positions:
            index = position - first
            edited = [*tokens[:index], drawn[position], *tokens[index + 1 :]]
            if self._walk_from(index, edited):
                tokens = edited
                allowed.append(position)
            else:
                self._walk_from(index, tokens)
        if self.matcher.terminated:
            self.token_ids += drawn[self.start + len(self.token_ids) :]
        return allowed

    def _walk_from(self, index: int, tokens: list[int]) -> bool:
        """Let the matcher read the block's tokens again from an index on. Returns whether all are
        legal; those after a stop id always are, because the row ends before them."""
        committed = self.matcher.num_committed
        kept = min(index, self.matcher.num_tokens - committed)
        self.matcher.rewind(committed + kept)
        walked = kept + self.matcher.walk(tokens[kept:])
        return self.matcher.terminated or walked == len(tokens)


def denoise(
    guide: Guide,
    masked: npt.NDArray[np.bool_],
    logits: Tensor,
    draw: Callable[[TokenMask | None], Drawn],
    permit: Callable[[Drawn], Tensor],
    editing: Collection[int],
    edit: Callable[[Drawn], tuple[Tensor, Tensor]],
) -> tuple[Drawn, Taken]:
    """Decide which tokens a denoise step takes in the constrained rows. Waits for the tokens that
    the device draws, unless all tokens are forced.

    The matchers accept the tokens only tentatively, because a block is committed as a whole.

    Args:
        masked: [B, L] bool, the positions of each row's block that are still masked.
        logits: [B · L, V], the logits of all positions.
        draw: draws a token for each position, under a mask or freely (None).
        permit: given the draw, returns the positions [B, L] that the unmasking rule permits after
            the first one.
        editing: the constrained rows whose rule replaces tokens.
        edit: given the draw, returns the tokens [B, L] int64 that earlier steps have unmasked
            (elsewhere -1), and the positions [B, L] bool where drawn tokens replace them.

    Returns:
        The tokens of all B · L positions, drawn or forced, and which of them are taken.
    """
    rows, length = masked.shape
    taken = Taken.nothing(rows, length)
    runs = []
    for row, matcher in guide.matchers:
        taken.rows[row] = True
        edits = row in editing
        if edits or masked[row].any():
            start = int(masked[row].argmax()) if masked[row].any() else length
            runs.append(_Run(row, matcher, start, length - start))
            # An earlier step that took tokens of this block has already taken the tokens that they
            # force, except those after replaced tokens.
            if edits or matcher.num_tokens == matcher.num_committed:
                runs[-1].force()
    drawing = [run for run in runs if run.draws]
    masks = MaskBuilder(logits)
    masks.allow(
        [run.row * length + run.start + len(run.token_ids) for run in drawing],
        [run.matcher for run in drawing],
    )
    drawn = draw(masks.build() if drawing else None)
    if drawing or editing:
        _take_drawn(drawn, permit(drawn), edit(drawn) if editing else (), runs, taken)
    for run in runs:
        taken.unmasks[run.row, run.start : run.start + len(run.token_ids)] = True
    return _with_forced(drawn, runs, length, masks, draw), taken


def _take_drawn(
    drawn: Drawn, permitted: Tensor, edits: tuple[Tensor, ...], runs: list[_Run], taken: Taken
) -> None:
    """Wait for the drawn tokens, and let each row take some of them, unless its logits are broken
    or its constraint has a conflict.

    Args:
        permitted: [B, L] bool, the positions that the unmasking rule permits.
        edits: the result of `edit` (see `denoise`), or empty.
    """
    shape = taken.unmasks.shape
    conflict = drawn.failed.new_zeros(()).expand_as(drawn.failed)
    flags = (
        permitted.flatten(),
        drawn.failed,
        conflict if drawn.conflict is None else drawn.conflict,
    )
    parts = (drawn.token_ids, *flags, *(part.flatten() for part in edits))
    sent = Download(torch.stack(parts))  # one copy, for one wait; unpacked in the same order
    token_ids, allowed, failed, conflicts, *replaced = sent.wait().reshape(-1, *shape)
    for run in runs:
        row, index = run.row, run.start + len(run.token_ids)
        if run.draws:
            taken.conflicts[row] = conflicts[row, index]
            if failed[row, index] or conflicts[row, index]:
                continue
            run.extend(token_ids[row, run.start :].tolist(), allowed[row, run.start :].tolist())
        if replaced:
            known, chosen = (each[row] for each in replaced)
            indices = chosen.nonzero()[0].tolist()
            taken.edited[row, run.edit(known.tolist(), token_ids[row].tolist(), indices)] = True


def _with_forced(
    drawn: Drawn,
    runs: list[_Run],
    length: int,
    masks: MaskBuilder,
    draw: Callable[[TokenMask], Drawn],
) -> Drawn:
    """Put the forced tokens into the draw. If any row asks for output columns, draw again with only
    the forced token allowed at each of their positions, so that the columns describe the forced
    tokens. The arguments are as in `denoise`."""
    forced = {
        run.row * length + run.start + position: run.token_ids[position]
        for run in runs
        for position in run.forced
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
