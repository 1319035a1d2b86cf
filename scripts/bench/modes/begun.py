"""The mode begun of bench_job_layer.py: what the records of begun rows cost."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.engine.interface.outputs import Begun, OutputColumn
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.generation.begun_answers import BegunAnswers
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.util.request_id import RequestId

EVERY = 120.0
PROMPT = list(range(200))
FLOAT, INT, BYTE = (np.dtype(kind) for kind in ("f4", "i4", "u1"))


def _top(k: int) -> tuple[OutputColumn, ...]:
    return (
        OutputColumn("logprobs", FLOAT),
        OutputColumn("top_logprobs", FLOAT, (k,)),
        OutputColumn("top_logprob_ids", INT, (k,)),
    )


CASES: Mapping[str, tuple[OutputColumn, ...]] = {
    "no columns": (),
    "logprobs": (OutputColumn("logprobs", FLOAT),),
    "top_logprobs=5": _top(5),
    "routed_experts": (OutputColumn("routed_experts", BYTE, (48, 8), "context"),),
    "top_logprobs=256": _top(256),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=256, help="rows that run")
    parser.add_argument("--tokens", type=int, default=3600, help="of a row between two records")


class _RunningRows:
    """An engine whose rows all have so many tokens, and share what stands beside them."""

    def __init__(self, rows: int, columns: tuple[OutputColumn, ...], most: int) -> None:
        self.length = 0
        self._ids = [RequestId("", row, 0) for row in range(rows)]
        self._tokens = list(range(most))
        self._values = {c.name: _values(c, most + len(PROMPT)) for c in columns}
        self._context = {c.name for c in columns if c.scope == "context"}

    def begun_lengths(self) -> dict[RequestId, int]:
        return dict.fromkeys(self._ids, self.length)

    def begun(self, request_id: RequestId, start: int = 0) -> Begun:
        own, before = slice(start, self.length), len(PROMPT) - 1
        context = slice(start + before if start else 0, self.length + before)
        places = {name: context if name in self._context else own for name in self._values}
        columns = {name: values[places[name]].copy() for name, values in self._values.items()}
        return Begun(self._tokens[own], columns)


def _values(column: OutputColumn, count: int) -> npt.NDArray[Any]:
    made = np.random.default_rng(0).integers(0, 200, (count, *column.tail_shape))
    return made.astype(column.dtype)


class _Keys:
    def key(self, asked: RowRequest) -> bytes:
        return bytes(16)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Record rows twice, as a job with `output.begun_every=120` does, and print of the second time:
    the seconds of the processor, their share of the time between two records, the bytes, and the
    share of the rows for which there was time."""
    results = []
    for name, columns in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = _measure(Path(folder), columns, options.rows, options.tokens)
        results.append({"columns": name, **found})
        print(
            f"{name:17} {found['cpu_s']:.3f} s CPU ({found['cpu_s'] / EVERY:.2%}), "
            f"{found['bytes'] / 2**20:.1f} MiB, {found['recorded']:.0%} of the rows"
        )
    return results


def _measure(
    folder: Path, columns: tuple[OutputColumn, ...], rows: int, tokens: int
) -> dict[str, float]:
    engine = _RunningRows(rows, columns, 2 * tokens)
    schema = OutputSchema.build(pa.schema([]), columns, (), prompt_token_ids=False)
    asked = RowRequest(PROMPT, RequestParams())
    data, journal = folder / "data", folder / "journal"
    for path in (data, journal):
        path.mkdir()
    with OutputWriter(data, journal, schema, rows, 1) as writer:
        writer.take(0)
        answers = BegunAnswers(engine, writer, _Keys(), EVERY)  # type: ignore[arg-type]
        for count in (1, 2):
            engine.length = count * tokens
            size, cpu = _size(journal), time.process_time()
            recorded = answers.save(lambda _: asked)
            cpu = time.process_time() - cpu
        size = _size(journal) - size
    return {"cpu_s": cpu, "bytes": size, "recorded": recorded / rows}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
