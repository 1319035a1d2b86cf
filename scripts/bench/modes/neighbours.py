"""The mode neighbours of bench_job_layer.py: what busy processes beside a job cost it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAYS_TO_WAIT = {
    "spin (OpenMP's own)": {"GOMP_SPINCOUNT": "300000"},  # GCC's, if nothing is set
    "short spin (batchgen's)": {"GOMP_SPINCOUNT": "2000"},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def add_neighbour_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2, help="busy processes")
    parser.add_argument("overrides", nargs="+", help="of batchgen, after --")


def run_neighbours(options: argparse.Namespace) -> list[Any]:
    """Time a job on a CPU by how its threads wait for each other, quiet and beside busy processes.

    The job runs once per round for each way to wait. What the machine's other users do comes on
    top: the load before each job is shown.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds):
        for loops in dict.fromkeys((0, options.loops)):
            for name, variables in WAYS_TO_WAIT.items():
                load = os.getloadavg()[0]
                with busy_loops(loops):
                    rate = tokens_per_s(options.overrides, variables)
                rates.setdefault((name, loops), []).append(rate)
                shown = f"round {number}, load {load:.1f}: {name}, {loops} loops"
                print(f"{shown}: {rate:.1f} tokens/s", flush=True)
    for (name, loops), values in rates.items():
        print(f"{name}, {loops} loops: {median(values):.1f} tokens/s")
    return [
        {"name": name, "loops": loops, "tokens_per_s": all_rates}
        for (name, loops), all_rates in rates.items()
    ]


def tokens_per_s(overrides: list[str], variables: dict[str, str]) -> float:
    """Run a job in a new process and folder."""
    environment = {k: v for k, v in os.environ.items() if k not in WAIT_VARIABLES} | variables
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "job"
        command = [sys.executable, "-m", "batchgen", *overrides, f"output.dir={out}"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        metrics = json.loads((out / "metrics.json").read_text())
    return float(metrics["tokens_per_s"])


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
