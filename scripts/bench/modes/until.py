"""What `sampling.until` computes beside as many samples of every row, with a shipped model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

_COUNTS = ("samples", "kept", "tokens", "kept tokens", "row forwards", "steps", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--valid", type=int, default=2)
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.8)
    parser.add_argument("--rows-at-once", type=int, default=64)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both jobs on the same problems, and check that one has the first samples of the other."""
    until = f"{{where: mark == 1, valid: {options.valid}, most: {options.most}}}"
    with tempfile.TemporaryDirectory(prefix="bench_until") as temporary:
        every = _job(options, Path(temporary, "n"), f"sampling.n={options.most}")
        enough = _job(options, Path(temporary, "until"), f"sampling.until={until}")
        keys = ["row_index", "sample_index", "token_ids"]
        tables = [pq.read_table(Path(temporary, name, "data"), columns=keys).to_pylist()
                  for name in ("n", "until")]  # fmt: skip
        assert all(row in tables[0] for row in tables[1])
    for name in _COUNTS:
        share = enough[name] / every[name]
        print(f"{name:<14}{every[name]:>10,.0f}{enough[name]:>10,.0f}{share:>8.0%}")
    print(enough["until"])
    return [every, enough]


def _job(options: argparse.Namespace, out: Path, samples: str) -> dict[str, Any]:
    """Run one job and return what its engine has counted."""
    arguments = [
        *("experiment=nano_hybrid", "sampling=sample", "sampling.top_p=1", samples),
        f"sampling.temperature={options.temperature}",
        f"dataset.limit={options.rows}",
        f"engine.max_num_seqs={options.rows_at_once}",
        *("output.columns=[]", "output.report=false", f"output.dir={out}"),
    ]
    subprocess.run([sys.executable, "-m", "batchgen", *arguments], check=True, capture_output=True)
    metrics = json.loads((out / "metrics.json").read_text())
    (attempt,) = metrics["attempts"]
    engine = attempt["engine"]
    return {
        "samples": attempt["rows"],
        "kept": metrics["rows"],
        "kept tokens": metrics["generated_tokens"],
        "tokens": engine["generated_tokens"],
        "row forwards": engine["counts"]["num_forwards"],
        "steps": engine["decode_steps"] + engine["prefill_steps"],
        "seconds": attempt["generate_s"],
        "until": metrics["until"],
    }
