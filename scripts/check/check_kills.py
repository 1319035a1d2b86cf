"""Run a job or a pipeline twice, undisturbed and killed, and compare what both wrote.

    python scripts/check/check_kills.py +experiment=nano_hybrid engine.deterministic=true

The second one is killed with SIGKILL, with all its processes, each time it has written another part
of its shards, and started again. Until its last start it runs few rows at a time. Then the script
prints the undisturbed job's figures, how many shards are equal byte for byte, and how many answers
have equal tokens. Further arguments go to batchgen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2, help="how often the second job is killed")
    parser.add_argument("--rows", type=int, default=16, help="rows at a time until its last start")
    parser.add_argument("--folder", type=Path, help="where both write; default: a temporary folder")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="check-kills-") as temporary:
        folder = options.folder or Path(temporary)
        check(arguments, folder / "undisturbed", folder / "killed", options.kills, options.rows)


def check(arguments: list[str], undisturbed: Path, killed: Path, kills: int, rows: int) -> None:
    """Run both jobs, and print how they compare."""
    few = f"engine.max_num_seqs={rows}"
    finish(start(arguments, undisturbed))
    parts = shards(undisturbed)
    moments = []
    for kill in range(1, kills + 1):
        process = start([*arguments, few], killed)
        kill_at(process, killed, kill * len(parts) // (kills + 1))
        moments.append(len(shards(killed)))
    finish(start(arguments, killed))
    others = shards(killed)
    if parts.keys() != others.keys():
        sys.exit(f"the jobs wrote other shards: {sorted(parts.keys() ^ others.keys())}")
    same_files = sum(parts[name].read_bytes() == others[name].read_bytes() for name in parts)
    pairs = [compared(parts[name], others[name]) for name in parts]
    answers, equal = (sum(figures) for figures in zip(*pairs, strict=True))
    print(f"undisturbed: {figures_of(undisturbed)}")
    print(
        f"killed with {', '.join(map(str, moments))} of {len(parts)} shards: "
        f"{same_files} of {len(parts)} shards are equal byte for byte, "
        f"{equal} of {answers} answers have equal tokens"
    )


def start(arguments: list[str], out: Path) -> subprocess.Popen[bytes]:
    """Start batchgen in a process group of its own."""
    command = [sys.executable, "-m", "batchgen", *arguments, f"output.dir={out}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for batchgen. Exit code 3, which says that some rows ended with an error, is no
    failure."""
    if process.wait() not in (0, 3):
        sys.exit(f"batchgen ended with {process.returncode}")


def kill_at(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    """Kill a job's processes as soon as it has written `count` shards."""
    while len(shards(out)) < count:
        if process.poll() is not None:
            sys.exit(
                "the job ended before it could be killed: make shards smaller, with rows_per_shard"
            )
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shards(out: Path) -> dict[str, Path]:
    """Return the files of all data sets in a folder, by their paths within it."""
    return {str(path.relative_to(out)): path for path in sorted(out.glob("**/data/part-*.parquet"))}


def compared(first: Path, second: Path) -> tuple[int, int]:
    """Count the answers of a shard, and those whose tokens, or without tokens all of whose columns,
    are equal in the other one."""
    tables = [pq.read_table(path) for path in (first, second)]
    if "token_ids" in tables[0].column_names:
        tables = [table.select(["row_id", "sample_index", "token_ids"]) for table in tables]
    rows, others = (table.to_pylist() for table in tables)
    return len(rows), sum(row == other for row, other in zip(rows, others, strict=True))


def figures_of(out: Path) -> str:
    """Describe the speed of a job, or of all jobs of a pipeline."""
    metrics: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in sorted(out.glob("**/metrics.json"))
    ]
    jobs = [each for each in metrics if each.get("device_s")]
    tokens = sum(job["generated_tokens"] for job in jobs)
    device, generating = (sum(job[key] for job in jobs) for key in ("device_s", "generate_s"))
    return (
        f"{tokens:,} tokens in {generating:.1f} s, {tokens / generating:,.0f} tokens/s, "
        f"{device:.1f} s of device"
    )


if __name__ == "__main__":
    main()
