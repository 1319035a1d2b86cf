"""Finished rows of a small job and a writer for them, for tests of the output folder."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.util.request_id import RequestId
from tests.support.jobs.fake_job import LOGPROBS, TOP_LOGPROBS, FakeSource, outcome

SCHEMA = OutputSchema.build(FakeSource.schema, (LOGPROBS, TOP_LOGPROBS), (), prompt_token_ids=True)
ROWS, SAMPLES, PER_SHARD = 23, 3, 5


def finished_row(index: int, sample: int) -> FinishedRow:
    fields = {"question": f"q{index}", "number": index, "tags": ["t"] * (index % 3)}
    row_id = f"id{index}"
    if index % 7 == 3:
        return FinishedRow(row_id, index, sample, fields, error=RequestError("bad", "is bad"))
    output = outcome(
        RequestId("", index, sample), [index] * (index % 4), RequestParams(seed=sample)
    )
    return FinishedRow(row_id, index, sample, fields, output=output)


def all_rows(rows: int = ROWS, samples: int = SAMPLES) -> list[FinishedRow]:
    return [finished_row(i, s) for i in range(rows) for s in range(samples)]


def open_writer(
    folder: Path, per_shard: int = PER_SHARD, samples: int = SAMPLES, **options: Any
) -> OutputWriter:
    for name in ("data", "journal"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    data, journal = folder / "data", folder / "journal"
    return OutputWriter(data, journal, SCHEMA, per_shard, samples, **options)


def write(folder: Path, batches: Sequence[Sequence[FinishedRow]], per_shard: int, n: int) -> None:
    with open_writer(folder, per_shard) as writer:
        for batch in batches:
            writer.write(batch)
        writer.finish(n)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "data").iterdir())}


def split(rows: list[FinishedRow], rng: random.Random) -> list[list[FinishedRow]]:
    cuts = sorted(rng.sample(range(1, len(rows)), min(len(rows) - 1, rng.randint(1, 20))))
    return [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
