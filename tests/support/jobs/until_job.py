"""A fake job with `sampling.until`, and the rows that it must have."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.config.groups.sampling_config import UntilConfig
from batchgen.evals.graders.step import AnswerRow, AnswerRows, Column, GradeFailure
from batchgen.storage.shards.enough import Enough
from tests.support.jobs.shared_jobs import SharedJob

MARKED = "mark == 1"
"""An expression over the column of `ScriptedMark`."""
Row = dict[str, Any]


class Rows(list[Row]):
    """Rows that a failing test does not print one by one."""

    def __repr__(self) -> str:
        return f"{len(self)} rows"


@dataclass(frozen=True, kw_only=True)
class ScriptedMark:
    """Gives the mark 1 to answers whose numbers have a sum that `one_of` divides; every eleventh
    sum cannot be graded.

    Attributes:
        isolated: whether it runs in a worker process.
        seconds: how long it takes, for sums that `one_of` divides.
    """

    version = 1

    one_of: int = 3
    isolated: bool = False
    seconds: float = 0.0

    columns = (Column("mark", "float64", "1 or 0"),)
    reads_text = True
    field_names = ("number",)
    value_names = ()

    def prepare(self) -> None:
        pass

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        total = sum(map(int, row.text.split())) + row.fields["number"]
        if total % 11 == 10:
            raise GradeFailure("scripted", "every eleventh sum")
        if total % self.one_of == 0:
            time.sleep(self.seconds)
        return {"mark": float(total % self.one_of == 0)}

    def apply_all(
        self, rows: AnswerRows, failures: dict[int, GradeFailure]
    ) -> dict[str, list[Any]]:
        found = list[float | None]()
        for text, number in zip(rows.texts.to_pylist(), rows.fields["number"], strict=True):
            try:
                found.append(self.apply(AnswerRow(text, {"number": number}, {}))["mark"])
            except GradeFailure as failure:
                failures[len(found)] = failure
                found.append(None)
        return {"mark": found}


@dataclass(frozen=True)
class UntilJob(SharedJob):
    """A fake job with `sampling.until`; without `where` all rows have `most` samples."""

    samples: int = 1
    where: str = MARKED
    valid: int = 2
    width: float | None = None
    most: int = 6
    one_of: int = 3
    isolated: bool = False
    grade_s: float = 0.0

    def config(self) -> JobConfig:
        config = super().config()
        step = StepConfig(
            target="tests.support.jobs.until_job.ScriptedMark",
            options={"one_of": self.one_of, "isolated": self.isolated, "seconds": self.grade_s},
        )
        if not self.where:
            return replace(config, sampling=replace(config.sampling, n=self.most))
        rule = {"valid": self.valid} if self.width is None else {"width": self.width}
        until = UntilConfig(where=self.where, most=self.most, **rule)
        return replace(
            config,
            post=(step,),
            score=replace(config.score, workers=1),
            sampling=replace(config.sampling, until=until),
        )


def rows_of(out: Path | str) -> Rows:
    """The rows of a finished job."""
    tables = [pq.read_table(path) for path in sorted((Path(out) / "data").iterdir())]
    return Rows(pa.concat_tables(tables).to_pylist())


def every_sample(job: UntilJob, out: Path) -> Rows:
    """All `most` samples of the rows of a job."""
    every = replace(job, out=str(out), where="", max_num_seqs=64, rows_per_shard=1000, log="")
    every.run()
    return rows_of(out)


def is_marked(row: Row, one_of: int = 3) -> bool:
    """What `MARKED` is for a row, found without grades."""
    total: int = sum(map(int, row["text"].split())) + row["number"]
    return total % 11 != 10 and total % one_of == 0


def expected(
    every: Rows,
    valid: int | None,
    most: int,
    is_valid: Callable[[Row], bool] = is_marked,
    width: float | None = None,
) -> Rows:
    """The rows that a job must have, of all samples of its rows."""
    rule = Enough(valid if width is None else None, most, width)
    by_row = defaultdict[int, list[Row]](list)
    for row in every:
        by_row[row["row_index"]].append(row)
    found = Rows()
    for samples in by_row.values():
        kept, outcome = list[Row](), "exhausted"
        for row in samples[:most]:
            is_error = row["finish_reason"] == "error"
            kept.append({**row, "valid": None if is_error else is_valid(row)})
            if is_error and row["num_prompt_tokens"] is None:
                outcome = "failed"
                break
            count = sum(row["valid"] is True for row in kept)
            if rule.is_reached(np.array(count), np.array(len(kept))):
                outcome = "enough"
                break
        counts = {"num_valid": sum(r["valid"] is True for r in kept), "num_samples": len(kept)}
        found += [{**row, "outcome": outcome, **counts} for row in kept]
    return found
