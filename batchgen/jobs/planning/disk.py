"""How many bytes a job will write, from a sample of its rows in the schema of its output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np

from batchgen.engine.interface.outputs import OutputColumn, RequestOutput
from batchgen.jobs.forecast.forecast import Range
from batchgen.jobs.forecast.planned_work import common_prefix
from batchgen.jobs.forecast.scan import ReadRow
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from batchgen.storage.shards.shard_files import write_shard
from batchgen.util.random_bits import random_below, random_words

_ROWS = 200
_TOKENS = 100_000
"""The most answers, and the most generated tokens, of a sample."""
_OPEN_SHARDS = 2
"""Shards that are incomplete at a time, as rows finish out of order."""


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one answer on average: in a shard, compressed, and in the journal of incomplete
    shards."""

    shard: float
    journal: float


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that a job needs on its disk: the whole output, the most that is in the journal at a
    time, and what is free now."""

    output: Range
    journal: Range
    free: int

    @property
    def total(self) -> Range:
        """The most that is needed at a time."""
        return Range(
            self.output.low + self.journal.low,
            self.output.likely + self.journal.likely,
            self.output.bound + self.journal.bound,
        )


def disk_use(
    schema: OutputSchema,
    sample: Sequence[tuple[ReadRow, FinishedRow]],
    generated: Range,
    answers: int,
    *,
    rows_per_shard: int,
    samples: int,
    folder: Path,
    decode: Callable[[list[int]], str] | None,
) -> DiskUse:
    """What a job of `answers` with `generated` tokens in all needs on the disk of a folder that
    need not be there. Rows of the sample are finished rows without an answer; `decode` makes text
    of tokens."""
    lengths = [max(round(tokens / max(answers, 1)), 1) for tokens in _three(generated)]
    each = [row_bytes(schema, sample, length, decode) for length in lengths]
    open_answers = min(answers, _OPEN_SHARDS * rows_per_shard * samples)
    return DiskUse(
        Range(*(one.shard * answers for one in each)),
        Range(*(one.journal * open_answers for one in each)),
        free_bytes(folder),
    )


def row_bytes(
    schema: OutputSchema,
    sample: Sequence[tuple[ReadRow, FinishedRow]],
    length: int,
    decode: Callable[[list[int]], str] | None,
) -> RowBytes:
    """What an answer of `length` tokens takes, by writing some.

    The tokens of the prompts stand for those of answers, because their text compresses alike;
    values of other columns are random, which compress worst.
    """
    prompts = [read.ids for read, _ in sample]
    shared = common_prefix(prompts)
    texts = [ids[shared:] or ids for ids in prompts]
    most = min(_TOKENS, sum(map(len, texts)))  # what is repeated would compress too well
    number = max(1, min(_ROWS, most // length, len(sample)))
    pool = cycle(chain.from_iterable(texts))
    rows: list[FinishedRow] = []
    for read, finished in sample[:number]:
        ids = list(islice(pool, length))
        text = "" if decode is None else decode(ids)
        columns = {c.name: _values(c, length, len(read.ids), len(rows)) for c in schema.columns}
        output = RequestOutput(
            finished.row_id, read.ids, ids, text, "length", columns=columns,
            counts=dict.fromkeys(schema.counts, 1),
        )  # fmt: skip
        rows.append(
            FinishedRow(finished.row_id, finished.row_index, 0, finished.fields, output=output)
        )
    batch = schema.encode(rows)
    with tempfile.TemporaryDirectory(prefix="batchgen-plan-") as folder:
        path = Path(folder, "part")
        write_shard([batch], schema, path, path)
        shard = path.stat().st_size
    return RowBytes(shard / len(rows), batch.serialize().size / len(rows))


def free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder that need not be there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def _values(column: OutputColumn, generated: int, prompt: int, seed: int) -> np.ndarray:
    """Random values of a column for one answer."""
    # An answer that is scored is counted with the prompt.
    tokens = {
        "output": generated,
        "context": generated + prompt - 1,
        "answer": prompt,
        "choice": 4,
    }[column.scope]
    shape = (tokens, *column.tail_shape)
    if column.dtype.kind == "f":
        return (random_words(seed, shape) / 2.0**64).astype(column.dtype)
    return random_below(100, seed, shape).astype(column.dtype)


def _three(value: Range) -> tuple[float, float, float]:
    return value.low, value.likely, value.bound
