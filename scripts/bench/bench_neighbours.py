"""What busy processes beside a job on a CPU cost it, by how its threads wait for each other.

    python scripts/bench/bench_neighbours.py --rounds 3 -- dataset=files dataset.path=rows.jsonl …

runs the job once per round for each way to wait, quiet and beside busy loops in turns, and prints
medians. What the machine's other users do comes on top: the load before each job is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAYS = {
    "spin (OpenMP's own)": {"GOMP_SPINCOUNT": "300000"},
    "short spin (batchgen's)": {"GOMP_SPINCOUNT": "2000"},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}
"""300,000 is what GCC's OpenMP takes if nothing is set."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2, help="busy processes")
    parser.add_argument("overrides", nargs="+", help="of batchgen, after --")
    args = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(args.rounds):
        for loops in dict.fromkeys((0, args.loops)):
            for name, variables in WAYS.items():
                load = os.getloadavg()[0]
                with busy_loops(loops):
                    rate = tokens_per_s(args.overrides, variables)
                rates.setdefault((name, loops), []).append(rate)
                shown = f"round {number}, load {load:.1f}: {name}, {loops} loops"
                print(f"{shown}: {rate:.1f} tokens/s", flush=True)
    for (name, loops), values in rates.items():
        print(f"{name}, {loops} loops: {statistics.median(values):.1f} tokens/s")


def tokens_per_s(overrides: list[str], variables: dict[str, str]) -> float:
    """Of a job in a new process and folder."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | variables
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


if __name__ == "__main__":
    main()
