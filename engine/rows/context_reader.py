"""Reads columns of context scope out of the paged cache, for the rows that ask for them.

A column of context scope has a value for every token of a row, the prompt's among them, such as
which experts a token went to. The layers write these values beside the KV of the tokens, so they
are copied to the host before a row's blocks are given to another row. The scheduler calls this
whenever a row ends, is preempted or is flushed.
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
        planes: maps the name of each column that rows may ask for to its plane in the paged cache,
            [num_blocks, block_size, *tail].
    """

    def __init__(self, planes: Mapping[str, Tensor], block_size: int) -> None:
        self._planes = planes
        self._block_size = block_size

    def read(self, seq: Sequence) -> None:
        """Read what was not read yet of a row that ends or is preempted; it still owns its blocks.
        What was read before stays: after a preemption tokens are computed again, and the values
        that were used to generate the row are those of the first time."""
        names, rows = seq.context_columns, seq.context
        # The last token of a row that has ended was never read, or its value does not count, unless
        # the row was to be read alone.
        num_known = seq.num_tokens - (not seq.num_pooled_tokens)
        if seq.finish_reason is None:
            num_known = min(seq.num_computed_tokens, num_known)
        indices = np.arange(rows.num_tokens, num_known)
        if not names or not len(indices):
            return
        blocks = np.array(seq.block_table, np.int64)[indices // self._block_size]
        slots = blocks * self._block_size + indices % self._block_size
        there = upload(slots, torch.int64, self._planes[names[0]].device)
        part = {name: Download(self._planes[name].flatten(0, 1)[there]) for name in names}
        rows.add(part, len(indices))
