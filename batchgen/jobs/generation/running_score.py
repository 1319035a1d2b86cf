"""The mean mark of the answers that have finished so far, for the progress bar and trackers of a
job that grades. `running_score` makes the `RunningScore` of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from batchgen.config.groups.job_config import JobConfig
from batchgen.evals.graders.build_steps import post_steps
from batchgen.evals.graders.grade_rows import Grader, StepChain
from batchgen.evals.graders.step import MARK, SelfTimedStep
from batchgen.evals.grades.folder_grades import GRADES
from batchgen.storage.shards.checked_file import DamagedFile
from batchgen.storage.shards.output_fields import TEXT
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from batchgen.storage.shards.shard_files import read_columns, shard_files
from batchgen.util.text.row_json import json_readers
from batchgen.util.text.text_table import number_text, percent_text

_SHARE, _FREE_SECONDS = 0.01, 0.05
"""Grading in this thread may take _FREE_SECONDS and this share of the running time. The running
score leaves out answers for which there is no time."""
_SHARE_BESIDE, _FREE_SECONDS_BESIDE = 0.05, 1.0
"""These two limits for grading in another process."""
_FIRST_SECONDS, _MOST_ANSWERS = 20.0, 32
"""The seconds after which grading in another process begins, and the most answers that it grades at
once."""
_LOOK_SECONDS = 5.0  # between two looks at the folder of grades


class RunningScore(Protocol):
    """The score of the answers so far, for the progress bar and trackers."""

    def add(self, finished: Sequence[FinishedRow]) -> None:
        """Add rows that have finished."""

    def mean(self) -> float | None:
        """The mean mark; None as long as there is none."""

    def text(self) -> str:
        """The mean mark as text; empty as long as there is none."""

    def close(self) -> None:
        """Stop grading."""


def running_score(config: JobConfig, schema: OutputSchema, folder: Path) -> RunningScore | None:
    """Make the running score of a job; None if the job does not grade.

    Answers are graded as they finish, as many as a small share of the time allows. Slow steps, and
    steps that need other rows of the shard, are not run here: the score is read from the grades of
    published shards, which another process computes meanwhile.
    """
    column = config.score.column
    chain = StepChain(post_steps(config.post))
    if column not in (produced.name for produced in chain.columns):
        return None
    fields = [step.field_names for step in chain.steps]
    # Whether each step says which columns it reads, and rows have these before they are written.
    known = {name for names in fields for name in names or ()} <= set(schema.passthrough)
    if None in fields or not known or any(isinstance(s, SelfTimedStep) for s in chain.steps):
        return _OfShards(folder / GRADES, column)
    return _OfRows(chain, schema, config)


class _Mean:
    """The mean of a column's numbers, and its text."""

    def __init__(self, column: str) -> None:
        self.column, self.sum, self.count = column, 0.0, 0

    def add(self, values: Sequence[float]) -> None:
        self.sum += float(sum(values))
        self.count += len(values)

    def value(self) -> float | None:
        return self.sum / self.count if self.count else None

    def text(self) -> str:
        if (mean := self.value()) is None:
            return ""
        return f"score {percent_text(mean) if self.column == MARK else number_text(mean)} so far"


class _OfRows:
    """A running score that grades rows as they finish: in this thread, or in another thread if a
    step needs a process."""

    def __init__(self, chain: StepChain, schema: OutputSchema, config: JobConfig) -> None:
        self._chain, self._config = chain, config.score
        self._readers: Mapping[str, Callable[[Any], Any]] = json_readers(schema.arrow)
        self._mean = _Mean(config.score.column)
        self._started, self._closed = time.monotonic(), False
        self._spent = 0.0  # seconds of grading so far
        # Whether a step runs in a process of its own, so that grading takes no time of this thread.
        self._is_beside = any(step.isolated for step in chain.steps)
        self._thread: ThreadPoolExecutor | None = None
        self._grader: Grader | None = None
        self._future: Future[list[float]] | None = None

    def add(self, finished: Sequence[FinishedRow]) -> None:
        """See `RunningScore`."""
        seconds = time.monotonic() - self._started
        share, free_seconds = _SHARE, _FREE_SECONDS
        if self._is_beside:
            share, free_seconds = _SHARE_BESIDE, _FREE_SECONDS_BESIDE
        if self._spent > free_seconds + share * seconds:
            return
        rows = [row for row in finished if self._counts(row)]
        if not self._is_beside:
            self._mean.add(self._graded(rows))
        elif rows and seconds >= _FIRST_SECONDS and (self._future is None or self._future.done()):
            self._take()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "score so far")
            self._future = self._thread.submit(self._graded, rows[:_MOST_ANSWERS])

    def _counts(self, row: FinishedRow) -> bool:
        """Whether a row's answer is graded."""
        is_cut = row.finish_reason == "length" and self._config.cut_texts == "left_out"
        return row.failure is None and row.output is not None and not is_cut

    def _graded(self, rows: Sequence[FinishedRow]) -> list[float]:
        """The marks of rows that have one."""
        started = time.monotonic()
        if self._grader is None:
            self._grader = Grader(self._chain.steps, workers=1, seconds=self._config.seconds)
        graded = self._grader.grade(self._texts(rows))
        marks = []
        for row, values in zip(rows, graded, strict=False):
            if (value := values[self._config.column]) is not None:
                is_wrong = row.finish_reason == "length" and self._config.cut_texts == "wrong"
                marks.append(0.0 if is_wrong else float(value))
        self._spent += time.monotonic() - started
        return marks

    def _texts(self, rows: Sequence[FinishedRow]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the text and the fields of each row, as steps read them."""
        for row in rows:
            if self._closed:  # the score is no longer needed
                return
            assert row.output is not None
            fields = dict(row.fields)
            for name in fields.keys() & self._readers.keys():
                fields[name] = self._readers[name](fields[name])
            yield row.extra.get(TEXT, row.output.text) or "", fields

    def _take(self) -> None:
        """Add the marks that the thread has computed."""
        if self._future is not None and self._future.done():
            self._mean.add(self._future.result())
            self._future = None

    def mean(self) -> float | None:
        """See `RunningScore`."""
        self._take()
        return self._mean.value()

    def text(self) -> str:
        """See `RunningScore`."""
        self._take()
        return self._mean.text()

    def close(self) -> None:
        """See `RunningScore`; answers that are being graded are not waited for."""
        self._closed = True
        if self._thread is not None:  # which owns the processes
            self._thread.submit(self._end)
            self._thread.shutdown(wait=False)
        else:
            self._end()

    def _end(self) -> None:
        if self._grader is not None:
            self._grader.close()


class _OfShards:
    """A running score that reads the grades of shards as they are written."""

    def __init__(self, grades: Path, column: str) -> None:
        self._grades, self._mean = grades, _Mean(column)
        self._seen: set[int] = set()
        self._next_look = 0.0

    def add(self, finished: Sequence[FinishedRow]) -> None:
        """See `RunningScore`; nothing to do, as grades are read from files."""

    def mean(self) -> float | None:
        """See `RunningScore`."""
        self._look()
        return self._mean.value()

    def text(self) -> str:
        """See `RunningScore`."""
        self._look()
        return self._mean.text()

    def _look(self) -> None:
        """Read new files of grades, every few seconds."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            files = shard_files(self._grades) if self._grades.is_dir() else {}
            for shard in files.keys() - self._seen:
                self._seen.add(shard)
                self._read(files[shard])

    def _read(self, path: Path) -> None:
        try:
            column = read_columns(path, [self._mean.column])[self._mean.column]
        except (DamagedFile, FileNotFoundError, KeyError):  # the end of the job says what is wrong
            return
        self._mean.add(column.drop_null().to_numpy().astype(np.float64).tolist())

    def close(self) -> None:
        """See `RunningScore`."""
