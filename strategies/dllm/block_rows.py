"""The block of positions that each row of block diffusion works on now, and what a denoise step
writes into it. `DLLMStepInputs` holds the blocks between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from batchgen.engine.device.batched import Batched, row


@dataclass(frozen=True)
class BlockRows(Batched):
    """The block of L positions that each of B rows works on. Which positions are masked is kept
    apart from the tokens, because a prompt may contain the mask token itself."""

    starts: Tensor = row()  # [B] int64, the position of the block's first token, a multiple of L
    first_starts: Tensor = row()  # [B] int64, the same for the row's first block
    last_starts: Tensor = row()  # [B] int64, the same for the last block that the row can have
    token_ids: Tensor = row()  # [B, L] int64, the tokens; undefined where masked
    masked: Tensor = row()  # [B, L] bool, the positions whose tokens are not known yet
    prompt_tokens: Tensor = row()  # [B] int64, how many tokens of the prompt the block begins with
    denoised: Tensor = row()  # [B] int64, how many denoise steps the block has had
    steps: Tensor = row()  # [B] int32, how many steps of the row so far wrote a token
    complete: Tensor = row()  # [B] bool, whether the tokens are final, so that only their KV is not
    edit_steps: Tensor = row()  # [B] int64, how many steps the block has had without a mask


@dataclass(frozen=True)
class Writes:
    """What a denoise step writes into the blocks of B rows; everything else stays."""

    unmasked: Tensor  # [B, L] bool, masked positions that get their first token
    # [B, L] bool, positions whose token is replaced; None if no row has a rule that edits. The old
    # tokens are those of `BlockRows`, which still has them, and the step is its `steps` + 1.
    edited: Tensor | None
    token_ids: Tensor  # [B, L] int64, the drawn tokens, of which those at these positions count

    @property
    def positions(self) -> Tensor:
        """[B, L] bool, the positions that are written."""
        return self.unmasked if self.edited is None else self.unmasked | self.edited


@dataclass(frozen=True)
class KnownBlocks:
    """The blocks of B rows, of which some are complete."""

    rows: Tensor  # [B] bool, the rows whose block is to be yielded now
    starts: Tensor  # [B] int64, the positions of the blocks' first tokens
    token_ids: Tensor  # [B, L] int64, the tokens of the blocks
    prompt_tokens: Tensor  # [B] int64, how many tokens of the prompt a block begins with
    denoised: Tensor  # [B] int64, how many denoise steps a block has had
    # Name of an output column → [B, L, *tail], the values of the unmasked positions.
    columns: Mapping[str, Tensor]
