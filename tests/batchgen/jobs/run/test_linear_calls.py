"""What a job and its readers do grows with its columns and shards, and no faster: calls of our own
functions are counted, not seconds."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import batchgen
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.row_source import open_dataset
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.fake_job import FakeJob

OWN = str(Path(batchgen.__file__).parent)
FACTOR = 4


def calls(work: Callable[[], Any]) -> Counter[CodeType]:
    """How often each function of batchgen is called, generators resumed included."""
    found: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found[frame.f_code] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def check_linear(work: Callable[[int], Any], size: int) -> None:
    """No function may be called much more than FACTOR times as often for FACTOR times the size."""
    work(2)  # what is done once in a process
    small, large = calls(lambda: work(size)), calls(lambda: work(FACTOR * size))
    faster = {
        f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}": (few, many)
        for code, many in large.items()
        if many > 40 * size and many > 1.4 * FACTOR * (few := small[code])
    }
    assert not faster


def read(out: Path) -> None:
    reader = JobFolderReader(out)
    reader.check()
    assert reader.whole and reader.end and reader.schema is not None
    assert len(list(reader.rows())) == len(list(reader.rows(["text"])))


@pytest.mark.thorough
def test_calls_are_linear_in_shards(tmp_path: Path) -> None:
    """Each look at the leases read the names of all shards again: 18 ms for each of 6,000."""

    def work(shards: int) -> None:
        out = tmp_path / str(shards)
        job = FakeJob(str(out), rows=shards, rows_per_shard=1, samples=1, bad=False)
        for _ in range(2):
            job.run()
        read(out)

    check_linear(work, 18)


def test_calls_are_linear_in_columns(tmp_path: Path) -> None:
    def work(columns: int) -> None:
        path, out = tmp_path / f"{columns}.jsonl", tmp_path / str(columns)
        rows = [{f"c{i}": f"{i} {row}" for i in range(columns)} for row in range(8)]
        path.write_text("\n".join(json.dumps(row) for row in rows))
        job = FakeJob(str(out), rows_per_shard=4, samples=1, bad=False)
        source = open_dataset(DatasetConfig(kind="files", path=str(path)))
        for _ in range(2):
            execute_job(job.config(), replace(job.parts(), source=source))
        read(out)

    check_linear(work, 50)
