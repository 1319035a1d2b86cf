"""The mode view of bench_job_layer.py: pages of `batchgen view` as a browser waits for them."""

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

sys.path.append(str(Path(__file__).parents[3] / "tests/batchgen"))
from written_job import grade_job, write_job

_MOST_MIB = 100
"""By how much the server's memory may grow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="the job; written there if it is not there")


def run(options: argparse.Namespace) -> list[Any]:
    """Time the pages of `batchgen view` as a browser waits for them, and `batchgen report`.

    A graded job with ids in no order is written (about 0.7 GB for 2 million rows, two minutes).
    Beside the milliseconds stands the resident memory of the server. The exit code is 1 if the
    first page takes over a second, the median of random rows over 100 ms, or the memory grows by
    more than 100 MiB from the first page on, apart from the hashes of ids (4 bytes for each row).
    """
    program = [sys.executable, "-m", "batchgen"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "out")
        if not folder.exists():
            write_job(folder, options.rows, 1, ids="shuffled")
            grade_job(folder, scored=False)
        began = time.perf_counter()
        with subprocess.Popen(
            [*program, "view", str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split(": ", 1)[1].split(" ")[0]
                print(f"the server is there after {time.perf_counter() - began:.2f} s")
                found, slow = _time_pages(folder, url, process.pid)
            finally:
                process.terminate()
        began = time.perf_counter()
        subprocess.run([*program, "report", str(folder)], check=True)
        seconds = time.perf_counter() - began
        size = (folder / "report.html").stat().st_size / 2**20
        print(f"the report took {seconds:.0f} s, and has {size:.1f} MiB")
    if slow:
        raise SystemExit(1)
    return [*found, {"name": "report", "ms": seconds * 1e3}]


def _time_pages(folder: Path, url: str, pid: int) -> tuple[list[Any], bool]:
    """Ask for pages of all kinds; returns their times, and whether a limit was passed."""
    shards = sorted((folder / "data").iterdir())
    rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
    last = pq.read_table(shards[-1], columns=["row_id"])["row_id"][-1].as_py()
    draw = random.Random(0)
    some = [draw.randrange(rows) for _ in range(100)]
    pages = {
        "first page": ["rows"],
        "random rows": [f"row?n={n}" for n in some],
        "their tokens": [f"row?n={n}&tokens=yes" for n in some],
        "random pages of rows": [f"rows?from={n}" for n in some],
        "rows with wrong answers": [f"rows?mark=wrong&from={n}" for n in some[:20]],
        "rows with errors (one in 1,000)": [f"rows?reason=error&from={n}" for n in some[:5]],
        "a text, 2 s of search": [f"rows?text=no+such+text&from={n}" for n in some[:5]],
        "overview": [""] * 5,
        "longest first, as far as 2 s go": ["rows?sort=longest"] * 2,
        "wrong answers with votes": ["rows?mark=wrong&show=votes"] * 5,
        "the id of the last row": [f"find?id={last}"],
        "again": [f"find?id={last}"] * 3,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, targets in pages.items():
        times = sorted(_get_ms(url + target) for target in targets)
        line = f"{name:<34}{median(times):>8.1f} ms"
        line += f"  (slowest of {len(times)}: {times[-1]:.1f})" if len(times) > 1 else ""
        mib = resident_mib(pid)
        print(f"{line:<72}{mib:>6.0f} MiB")
        found[name] = {"name": name, "ms": median(times), "slowest_ms": times[-1], "mib": mib}
    start = found["first page"]["mib"]
    grown, ids = (found[name]["mib"] - start for name in ("wrong answers with votes", "again"))
    print(f"memory grew by {grown:.0f} MiB, and by {ids:.0f} with the ids")
    slow = found["first page"]["ms"] > 1000 or found["random rows"]["ms"] > 100
    return list(found.values()), slow or grown > _MOST_MIB


def _get_ms(url: str) -> float:
    """Read a page, and again as long as it goes on searching; returns milliseconds."""
    began = time.perf_counter()
    while True:
        with urlopen(url, timeout=60) as answer:
            if b'http-equiv="refresh"' not in answer.read():
                return 1000 * (time.perf_counter() - began)
