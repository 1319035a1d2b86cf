"""Estimates how many bytes a job will write, and checks the free disk space."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from batchgen.engine.interface.outputs import OutputColumn, Scope
from batchgen.jobs.forecast.forecast import Range

_TEXT_BYTES = 2.0
"""Compressed bytes of the text of a token; text has some four bytes a token."""
_ROW_BYTES = 150.0
"""Bytes of the other values of a row, such as its id and what it copies from the data set."""
_SHARD_BYTES = 4000.0
"""Bytes of a shard's schema and metadata."""
_OPEN_SHARDS = 2
"""Shards that are incomplete at a time, as rows finish out of order."""
_JOURNAL = 3.0
"""A journal is not compressed, and has the tokens beside their text."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that a job needs on its disk: the whole output, the most that is in the journal at a
    time, and what is free now."""

    output: Range
    journal: Range
    free: int
    shards: int  # files of the output

    @property
    def total(self) -> Range:
        """The most that is needed at a time."""
        return self.output.plus(self.journal)

    @property
    def shard(self) -> float:
        """The likely bytes of a shard, which memory holds when it is written."""
        return self.output.likely / self.shards


def disk_use(
    columns: Sequence[OutputColumn],
    generated: Range,
    prompt: float,
    answers: int,
    *,
    open_rows: int,
    folder: Path,
) -> DiskUse:
    """Estimate what a job of `answers` with `generated` tokens in all needs on the disk of a folder
    that need not be there.

    Values of columns count in full: they hardly compress.

    Args:
        prompt: the mean tokens of a prompt.
        open_rows: the answers of a shard.
    """
    values = dict.fromkeys(get_args(Scope), 0.0)
    for column in columns:
        values[column.scope] += column.dtype.itemsize * float(np.prod(column.tail_shape))
    of_token = _TEXT_BYTES + values["output"] + values["context"]
    few = sum(values[scope] for scope in ("choice", "tail", "edits"))
    of_row = _ROW_BYTES + values["row"] + 4 * few
    of_row += prompt * (values["context"] + values["answer"])
    shards = -(-answers // open_rows)
    fixed = of_row * answers + _SHARD_BYTES * shards
    output = generated.times(of_token).plus(Range(fixed, fixed, fixed))
    share = min(_OPEN_SHARDS * open_rows / max(answers, 1), 1.0)
    return DiskUse(output, output.times(_JOURNAL * share), free_bytes(folder), shards)


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder that need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free
