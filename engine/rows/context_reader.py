"""Reads columns of context scope out of the paged cache, for the rows that ask for them.

A column of context scope has a value for every token of a row, including prompt tokens: for
example, the experts that a token was routed to. The layers write these values to the tokens' KV
slots. So they must be copied to the host before a row's blocks are given to another row. The
scheduler calls `ContextReader.read` whenever a row ends, is preempted or is flushed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.device.transfer import Download, upload
from batchgen.engine.rows.sequence import Sequence


class ContextReader:
    """Reads the values of a row's tokens before its blocks are given to other rows.

    The host does not wait for the device: the copy is enqueued after the forwards that wrote the
    values, and before any forward that could overwrite them.

    Args:
        planes: maps the name of each column to its plane in the paged cache, [num_blocks,
            block_size, *tail].
    """

    def __init__(self, planes: Mapping[str, Tensor], block_size: int) -> None:
        self._planes = planes
        self._block_size = block_size

    def read(self, seq: Sequence) -> None:
        """Start to copy the values of a row's tokens that were not read before. The row must still
        own its blocks.

        Values that were read before are kept: a preempted row computes its tokens again, but the
        first values are those that its output was generated with.
        """
        names, context = seq.context_columns, seq.context
        # A row that has ended has no value for its last token: no forward read that token, or the
        # value is ignored. A row that only reads its prompt has a value for all tokens.
        num_known = seq.num_tokens if seq.num_pooled_tokens else seq.num_tokens - 1
        if seq.finish_reason is None:
            num_known = min(seq.num_computed_tokens, num_known)
        indices = np.arange(context.num_tokens, num_known)
        if not names or not len(indices):
            return
        blocks = np.array(seq.block_table, np.int64)[indices // self._block_size]
        slots = blocks * self._block_size + indices % self._block_size
        slots_on_device = upload(slots, torch.int64, self._planes[names[0]].device)
        part = {name: Download(self._planes[name].flatten(0, 1)[slots_on_device]) for name in names}
        context.add(part, len(indices))
