"""The mode workers of bench_job_layer.py: a job by several workers of one folder."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from measuring import commas


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=commas(int), default=[1, 4], help="numbers of them")
    parser.add_argument("job", nargs=argparse.REMAINDER, help="-- and the job's arguments")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a job with each number of workers (`launcher=local`), each in a folder of its own.

    Printed are the seconds from the command to its end and until the last worker's engine began;
    the tokens a second of all workers together, each over the time in which it generated; the time
    between the first worker's end and the last one's; and the share of rows that were computed
    twice, by backup copies.
    """
    job = [argument for argument in options.job if argument != "--"]
    found = []
    for count in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            command = [sys.executable, "-m", "batchgen", *job, f"output.dir={out}"]
            command += ["launcher=local", f"launcher.workers={count}", "output.report=false"]
            start = time.perf_counter()
            subprocess.run(command, check=True)
            seconds = time.perf_counter() - start
            metrics = json.loads((out / "metrics.json").read_text())
        figures = {"workers": count, "seconds": seconds}
        found.append(figures | of_attempts(metrics["attempts"], metrics["rows"]))
        found[-1]["times"] = found[-1]["tokens_per_s"] / found[0]["tokens_per_s"]
    for each in found:
        print(
            f"{each['workers']} workers: {each['seconds']:.1f} s, engines began after "
            f"{each['start_seconds']:.1f} s, {each['tokens_per_s']:.0f} tokens/s "
            f"({each['times']:.2f} times), first to last end {each['tail_seconds']:.1f} s, "
            f"{each['computed_twice']:.1%} of rows twice"
        )
    return found


def of_attempts(attempts: Sequence[Mapping[str, Any]], rows: int) -> dict[str, float]:
    """Return figures of the workers of a job of so many rows."""
    busy = [attempt for attempt in attempts if attempt["rows"]]
    ends = [datetime.fromisoformat(a["started"]).timestamp() + a["wall_s"] for a in busy]
    return {
        "start_seconds": max(attempt["start_s"] for attempt in busy),
        "tokens_per_s": sum(a["engine"]["generated_tokens"] / a["generate_s"] for a in busy),
        "tail_seconds": max(ends) - min(ends),
        "computed_twice": sum(attempt["rows"] for attempt in busy) / rows - 1,
    }
