"""The mode view of bench_job_layer.py: the times of pages, and the memory of their server."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import pyarrow.parquet as pq
from measuring import resident_mib
from synthetic_job import grade_job, write_job

RANDOM_ROWS = 100
_MOST_MIB = 100


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="the job; written there if it is not there")


def run_view(options: argparse.Namespace) -> list[Any]:
    """Time the pages of `batchgen view` as a browser waits for them, and `batchgen report`.

    A graded job with ids in no order is written (about 0.7 GB for 2 million rows, two minutes).
    Beside the milliseconds stands the resident memory of the server. The exit code is 1 if the
    first page takes over a second, the median of random rows over 100 ms, or the memory grows by
    more than 100 MiB from the first page on, apart from the hashes of ids (4 bytes for each row).
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "out")
        began = time.perf_counter()
        if not folder.exists():
            write_job(folder, options.rows, 1, ids="shuffled")
            grade_job(folder, scored=False)
            files = [path for path in folder.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files) / 2**30
            print(
                f"{options.rows:,} rows in {len(files):,} files of {size:.2f} GiB, written in "
                f"{time.perf_counter() - began:.0f} s"
            )
        command = [sys.executable, "-m", "batchgen", "view", str(folder)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split(": ", 1)[1].split(" ")[0]
                print(f"the server is there after {time.perf_counter() - began:.2f} s")
                found, slow = _time_pages(folder, url, process.pid)
            finally:
                process.terminate()
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "batchgen", "report", str(folder)], check=True)
        size = (folder / "report.html").stat().st_size / 2**20
        seconds = time.perf_counter() - began
        print(f"the report took {seconds:.0f} s, and has {size:.1f} MiB")
    if slow:
        raise SystemExit(1)
    return [*found, {"name": "report", "ms": seconds * 1e3}]


def _time_pages(folder: Path, url: str, pid: int) -> tuple[list[Any], bool]:
    """Ask for pages of all kinds; returns their times, and whether a limit was passed."""
    found: list[Any] = []

    def timed(name: str, targets: list[str]) -> float:
        """The median of some pages, in milliseconds."""
        times = sorted(_get_ms(url + target) for target in targets)
        line = f"{name:<34}{median(times):>8.1f} ms"
        line += f"  (slowest of {len(times)}: {times[-1]:.1f})" if len(times) > 1 else ""
        print(f"{line:<72}{resident_mib(pid):>6.0f} MiB")
        found.append({"name": name, "ms": median(times), "slowest_ms": times[-1]})
        return median(times)

    shards = sorted((folder / "data").iterdir())
    rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
    draw = random.Random(0)
    first = timed("first page", ["rows"])
    start = resident_mib(pid)
    some = [draw.randrange(rows) for _ in range(RANDOM_ROWS)]
    one = timed("random rows", [f"row?n={n}" for n in some])
    timed("their tokens", [f"row?n={n}&tokens=yes" for n in some])
    timed("random pages of rows", [f"rows?from={n}" for n in some])
    timed("rows with wrong answers", [f"rows?mark=wrong&from={n}" for n in some[:20]])
    timed("rows with errors (one in 1,000)", [f"rows?reason=error&from={n}" for n in some[:5]])
    timed("a text, 2 s of search", [f"rows?text=no+such+text&from={n}" for n in some[:5]])
    timed("overview", [""] * 5)
    timed("longest first, as far as 2 s go", ["rows?sort=longest"] * 2)
    timed("wrong answers with votes", ["rows?mark=wrong&show=votes"] * 5)
    grown = resident_mib(pid) - start
    last = pq.read_table(shards[-1], columns=["row_id"])["row_id"][-1].as_py()
    timed("the id of the last row", [f"find?id={last}"])
    timed("again", [f"find?id={last}"] * 3)
    print(f"memory grew by {grown:.0f} MiB, and by {resident_mib(pid) - start:.0f} with the ids")
    return found, first > 1000 or one > 100 or grown > _MOST_MIB


def _get_ms(url: str) -> float:
    """Read a page, and again as long as it goes on searching; returns milliseconds."""
    began = time.perf_counter()
    while True:
        with urlopen(url, timeout=60) as answer:
            if b'http-equiv="refresh"' not in answer.read():
                return 1000 * (time.perf_counter() - began)
