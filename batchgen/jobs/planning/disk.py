"""Estimates how many bytes a job will write, and reads how many are free. `batchgen plan` shows
both."""

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
"""Compressed bytes of the text of one token; uncompressed, a token has some four bytes."""
_ROW_BYTES = 150.0
"""Bytes of the other values of a row, such as its id and the columns copied from the data set."""
_SHARD_BYTES = 4000.0
"""Bytes of a shard's schema and metadata."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """The bytes of a job's output, and the bytes that are free on its disk."""

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
    """Estimate what a job writes.

    The values of columns count in full, because they hardly compress. The scope of a column says
    for which tokens it has values (`OutputColumn.scope`).

    Args:
        columns: the columns of the output.
        generated: the tokens of all answers.
        prompt: the mean tokens of a prompt, together with those of an answer that is only scored.
        answers: the number of answers.
        per_shard: the answers of a shard.
        folder: the output folder, which need not exist.
    """
    values = dict.fromkeys(get_args(Scope), 0.0)  # scope → bytes of one value of all its columns
    for column in columns:
        values[column.scope] += column.dtype.itemsize * float(np.prod(column.tail_shape))
    token_bytes = _TEXT_BYTES + values["output"] + values["context"]
    # Values per choice of a constraint, per token after the answer's end, and per replaced token:
    # how many a row has is not known before it runs, but they are few, and four are assumed.
    small = sum(values[scope] for scope in ("choice", "tail", "edits"))
    answer_bytes = _ROW_BYTES + values["row"] + 4 * small
    # Values of scope answer are of the tokens of scored answers, which count as tokens of the
    # prompt here. A generated token has none.
    answer_bytes += prompt * (values["context"] + values["answer"])
    fixed = Range.exactly(answer_bytes * answers + _SHARD_BYTES * -(-answers // per_shard))
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()
    )
    free = shutil.disk_usage(existing).free
    return DiskUse(generated.times(token_bytes).plus(fixed), free)
