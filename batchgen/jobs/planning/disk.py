"""Estimates how many bytes a job will write, and checks the free disk space."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from batchgen.engine.interface.outputs import OutputColumn, Scope
from batchgen.jobs.forecast.range import Range

_TEXT_BYTES = 2.0
"""Compressed bytes of the text of a token; text has some four bytes a token."""
_ROW_BYTES = 150.0
"""Bytes of the other values of a row, such as its id and what it copies from the data set."""
_SHARD_BYTES = 4000.0
"""Bytes of a shard's schema and metadata."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """The bytes of a job's output, and those that are free on its disk."""

    output: Range
    free: int


def disk_use(
    columns: Sequence[OutputColumn],
    generated: Range,
    prompt: float,
    answers: int,
    *,
    per_shard: int,
    folder: Path,
) -> DiskUse:
    """Estimate what a job of `answers`, of which a shard has `per_shard`, writes for `generated`
    tokens in all and prompts of `prompt` tokens, into a folder that need not be there.

    Values of columns count in full: they hardly compress.
    """
    values = dict.fromkeys(get_args(Scope), 0.0)
    for column in columns:
        values[column.scope] += column.dtype.itemsize * float(np.prod(column.tail_shape))
    of_token = _TEXT_BYTES + values["output"] + values["context"]
    few = sum(values[scope] for scope in ("choice", "tail", "edits"))
    of_row = _ROW_BYTES + values["row"] + 4 * few
    of_row += prompt * (values["context"] + values["answer"])
    fixed = Range.exactly(of_row * answers + _SHARD_BYTES * -(-answers // per_shard))
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    return DiskUse(generated.times(of_token).plus(fixed), free)
