"""A fake job whose workers are started by launchers, for tests of these."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs import fake_job


def worker_of(job: fake_job.FakeJob) -> Callable[[Path, int], Sequence[str]]:
    """The command of the workers of a job, for a launcher."""
    arguments = [fake_job.__file__, json.dumps(asdict(job))]
    return lambda file, place: arguments


def data(out: Path) -> dict[str, bytes]:
    """The data files of a job, by their names."""
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}


def beats(out: Path) -> list[dict[str, Any]]:
    """The heartbeats of all workers."""
    return [json.loads(path.read_bytes()) for path in sorted((out / "workers").glob("0*.json"))]


def when_rows_are_done(
    out: Path, rows: int, workers: int, do: Callable[[], None]
) -> threading.Thread:
    """Do something in a thread, once so many workers run and so many rows are finished."""

    def is_time() -> bool:
        try:
            return len(beats(out)) >= workers and len(list(JobFolderReader(out).rows())) >= rows
        except (FileNotFoundError, ValueError):  # the job is about to begin
            return False

    def wait() -> None:
        while not is_time():
            time.sleep(0.1)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
