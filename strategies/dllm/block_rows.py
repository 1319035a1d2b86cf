"""The current block of each row in block diffusion, and the tokens that a denoise step writes to
it. `DLLMStepInputs` holds the blocks between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from batchgen.engine.device.batched import Batched, row


@dataclass(frozen=True)
class BlockRows(Batched):
    """The current block, of L positions, of each of B rows. A separate mask says which positions
    are masked, because a prompt may contain the mask token."""

    starts: Tensor = row()  # [B] int64, the position of the block's first token, a multiple of L
    first_starts: Tensor = row()  # [B] int64, the same for the row's first block
    last_starts: Tensor = row()  # [B] int64, the same for the last block that the row can have
    token_ids: Tensor = row()  # [B, L] int64, the tokens; undefined where masked
    masked: Tensor = row()  # [B, L] bool, the positions whose tokens are not known yet
    prompt_tokens: Tensor = row()  # [B] int64, how many prompt tokens the block begins with
    denoised: Tensor = row()  # [B] int64, how many denoise steps the block has had
    steps: Tensor = row()  # [B] int32, how many steps of the row have written a token
    complete: Tensor = row()  # [B] bool, whether the tokens are final, though their KV is not yet
    edit_steps: Tensor = row()  # [B] int64, how many steps the block has had without a mask


@dataclass(frozen=True)
class Writes:
    """The tokens that a denoise step writes to the blocks of B rows. All other tokens stay."""

    unmasked: Tensor  # [B, L] bool, masked positions that get their first token
    # [B, L] bool, positions whose token is replaced; None if no row has an editing rule.
    # `BlockRows` still has the old tokens; the step's number is its `steps` + 1.
    edited: Tensor | None
    token_ids: Tensor  # [B, L] int64, the drawn tokens; used only at these positions

    @property
    def positions(self) -> Tensor:
        """The positions that are written, [B, L] bool."""
        return self.unmasked if self.edited is None else self.unmasked | self.edited


@dataclass(frozen=True)
class KnownBlocks:
    """The blocks of B rows, some of which are complete."""

    rows: Tensor  # [B] bool, the rows whose block is complete
    starts: Tensor  # [B] int64, the positions of the blocks' first tokens
    token_ids: Tensor  # [B, L] int64, the tokens of the blocks
    prompt_tokens: Tensor  # [B] int64, how many prompt tokens a block begins with
    denoised: Tensor  # [B] int64, how many denoise steps a block has had
    # Maps the name of an output column to [B, L, *tail], the values of the unmasked positions.
    columns: Mapping[str, Tensor]

    @classmethod
    def of(cls, blocks: BlockRows, rows: Tensor, columns: Mapping[str, Tensor]) -> Self:
        """The current blocks of B rows, with `rows` [B] bool as the rows whose block is
        complete."""
        return cls(
            rows,
            blocks.starts,
            blocks.token_ids,
            blocks.prompt_tokens,
            blocks.denoised,
            dict(columns),
        )
