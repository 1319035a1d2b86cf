"""Prompt-lookup decoding (Saxena 2023): drafts are the tokens that followed the row's last n-gram
at its most recent occurrence. The index is on the device.

Text that repeats itself, or quotes its prompt, gets drafts without any draft model. No operation
waits for the host, so an overlapped loop can draft from tokens that the host has not seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.speculation import ngram_triton
from batchgen.kernels.speculation.ngram_table import EXTEND, FINISH, NgramTable

_LOW31 = 2**31 - 1
"""Masks the bits that an unsigned `>> 33` would leave. The shift of an int64 copies the sign into
the others."""


@dataclass(frozen=True, eq=False)
class NgramIndex(NgramTable):
    """An `NgramTable` with its operations: `reset`, `append` and `propose`."""

    def reset(self, store_rows: Tensor) -> None:
        """Forget the tokens of the store rows [R] int64."""
        self.lengths.index_fill_(0, store_rows, 0)

    def append(self, store_rows: Tensor, starts: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Store new tokens of R rows, and index the n-gram before each of them.

        So a row's last n-gram is found only once the token after it is known. Tokens beyond max_len
        are dropped.

        Args:
            store_rows: [R], different for all rows with a count above 0.
            starts: [R], the number of tokens that the row has, or less to replace its last tokens.
            token_ids: [R, W] int64 in [0, 2³¹) with contiguous columns.
            counts: [R], how many of a row's tokens are stored; 0 changes nothing.
        """
        run = ngram_triton.append if self.tokens.is_cuda else append_reference
        run(self, store_rows, starts, token_ids, counts)

    def propose(self, store_rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draft the next k tokens of B rows: what followed an earlier occurrence of the row's last
        tokens.

        n goes from max_n down to min_n. For each n the table looks up the most recent occurrence of
        the row's last n tokens, in the row itself and then, with `pool`, in any row; the first hit
        gives the drafts. If the hit is in the row itself and near its end, drafts continue with the
        drafts themselves, so repeating text is drafted to go on repeating. In another row drafts
        end with its known tokens.

        Returns drafts [B, k] int64, padded with the row's last token (0 if it has none), and
        num_drafts [B] int32.
        """
        run = ngram_triton.propose if self.tokens.is_cuda else propose_reference
        return run(self, store_rows, k)


def append_reference(
    table: NgramTable, store_rows: Tensor, starts: Tensor, token_ids: Tensor, counts: Tensor
) -> None:
    """`NgramIndex.append` in PyTorch."""
    if not token_ids.numel():
        return
    device, width, max_len = token_ids.device, token_ids.shape[1], table.tokens.shape[1]
    counts = counts.long().minimum(max_len - starts)
    step = torch.arange(width, device=device)
    new = step < counts.unsqueeze(1)
    positions = starts.unsqueeze(1) + step

    older = starts.unsqueeze(1) + torch.arange(-table.max_n, 0, device=device)
    older = table.tokens[store_rows.unsqueeze(1), older.clamp(0, max_len - 1)].long()
    history = torch.cat((older, token_ids), 1).unfold(1, table.max_n, 1)[:, :width]
    buckets = _buckets(table, history.flip(-1), store_rows.unsqueeze(1))
    known = new & (positions >= _key_lengths(table, device).view(-1, 1, 1))
    stamp = table.clock[0].clamp(max=table.last_stamp) << (table.row_bits + table.position_bits)
    packed = stamp | (store_rows.unsqueeze(1) << table.position_bits) | positions
    table.entries.scatter_reduce_(
        0, buckets.flatten(), torch.where(known, packed, 0).flatten(), "amax"
    )

    targets = store_rows.unsqueeze(1) * max_len + positions
    table.tokens.view(-1)[targets[new]] = token_ids[new].int()
    has_tokens = counts > 0
    table.lengths[store_rows[has_tokens]] = (starts + counts)[has_tokens].int()
    table.clock[0] += 1


def propose_reference(table: NgramTable, store_rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`NgramIndex.propose` in PyTorch."""
    device = store_rows.device
    lengths = table.lengths[store_rows].long()
    back = torch.arange(1, table.max_n + 1, device=device)
    recent = table.tokens[
        store_rows.unsqueeze(1), (lengths.unsqueeze(1) - back).clamp(min=0)
    ].long()

    # Candidates [keys, B]; the first valid one is taken.
    key_lengths = _key_lengths(table, device).unsqueeze(1)
    entries = table.entries[_buckets(table, recent, store_rows)]
    positions = entries & ((1 << table.position_bits) - 1)
    sources = (entries >> table.position_bits) & ((1 << table.row_bits) - 1)
    holds = (lengths >= key_lengths) & (positions >= key_lengths)
    holds &= positions < table.lengths[sources]
    # With `pool` every second key is shared by all rows. The others are the row's own, and another
    # row's entry there only has the same hash.
    is_own = sources == store_rows
    holds[:: 1 + table.pool] &= is_own[:: 1 + table.pool]
    before = (positions.unsqueeze(-1) - back).clamp(min=0)
    equal = table.tokens[sources.unsqueeze(-1), before] == recent
    holds &= (equal | (back > key_lengths.unsqueeze(-1))).all(-1)
    first = holds.byte().argmax(0, keepdim=True)

    source, position = sources.gather(0, first).squeeze(0), positions.gather(0, first).squeeze(0)
    # The known tokens from the hit on. In the row itself the drafts repeat them.
    period = (table.lengths[source] - position).clamp(min=1)
    num_drafts = torch.where(source == store_rows, k, period.clamp(max=k)) * holds.any(0)
    ahead = torch.arange(k, device=device)
    following = position.unsqueeze(1) + ahead % period.unsqueeze(1)
    last = torch.where(lengths > 0, recent[:, 0], 0).unsqueeze(1)
    drafted = ahead < num_drafts.unsqueeze(1)
    drafts = torch.where(drafted, table.tokens[source.unsqueeze(1), following].long(), last)
    return drafts, num_drafts.int()


def _key_lengths(table: NgramTable, device: torch.device) -> Tensor:
    """Return each key's n in the order of preference: long n-grams first, the row's own before
    shared ones."""
    sizes = torch.arange(table.max_n, table.min_n - 1, -1, device=device)
    return sizes.repeat_interleave(1 + table.pool)


def _buckets(table: NgramTable, recent: Tensor, store_rows: Tensor) -> Tensor:
    """Return the indices in `entries` of the keys of n-grams, [keys, *shape].

    `recent` [*shape, max_n] has the tokens before a position, the last first; `store_rows` can be
    broadcast to shape.
    """
    tokens = recent + 1
    state = torch.zeros_like(tokens[..., 0])
    states = []
    for n in range(1, table.max_n + 1):
        state = (state + tokens[..., n - 1]) * EXTEND
        state = state ^ ((state >> 33) & _LOW31)
        states.append(state)
    ngrams = torch.stack(states[table.min_n - 1 :][::-1])
    sizes = torch.arange(table.max_n, table.min_n - 1, -1, device=store_rows.device)
    shared = sizes.view(-1, *[1] * store_rows.dim())
    own_salt = (store_rows + 1) * 16 + shared
    salts = torch.stack((own_salt, shared.expand_as(own_salt)) if table.pool else (own_salt,), 1)
    keys = (ngrams.unsqueeze(1) + salts) * FINISH
    keys = (keys ^ ((keys >> 33) & _LOW31)) & (len(table.entries) - 1)
    return keys.flatten(0, 1)
