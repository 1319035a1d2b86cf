"""Kill a job many times, and compare its output with that of the same job left alone.

    python scripts/check/check_kill_resume.py --kills 20 --work /tmp/check -- \\
        batchgen dataset=files dataset.path=rows.jsonl sampling.n=2 output.dir={out}

`{out}` in the command is replaced by the output folder. The first run is not disturbed and shows
how long a run takes. Then the job is killed (SIGKILL) at random moments, and at last left alone.
Two things are checked: every column of every shard is equal (floats within 1e-5), and every
(row, sample) that was finished when a run was killed was taken over by the next run.

With `--grow` the job then grows, once for each of them, and all is done again in the same folder:

    python scripts/check/check_kill_resume.py --kills 5 --work /tmp/check \\
        --grow dataset.limit=120 --grow sampling.n=4 --grow dataset.path=more.jsonl \\
        --grow output.retry_errors=true -- \\
        batchgen dataset=files dataset.path=rows.jsonl dataset.limit=50 output.dir={out}

Each time the output must equal that of a job which ran so from the start.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.folder.read_job import JobFolderReader

TOLERANCE = 1e-5
"""How much floats may differ."""


def compare_outputs(expected: Path, found: Path) -> int:
    """Compare two output folders shard by shard; returns the number of rows.

    Raises:
        AssertionError: if they differ; the message says where.
    """
    names = [path.name for path in sorted((expected / "data").iterdir())]
    assert names == [path.name for path in sorted((found / "data").iterdir())], "other shards"
    rows = 0
    for name in names:
        one, two = (pq.read_table(folder / "data" / name) for folder in (expected, found))
        assert one.schema.equals(two.schema, check_metadata=True), f"{name}: other schema"
        assert one.num_rows == two.num_rows, f"{name}: {one.num_rows} and {two.num_rows} rows"
        keys = list(zip(two["row_index"].to_pylist(), two["sample_index"].to_pylist(), strict=True))
        assert keys == sorted(set(keys)), f"{name}: rows out of order or twice"
        for column in one.column_names:
            assert _equal(one[column], two[column]), f"{name}: column {column} differs"
        rows += one.num_rows
    return rows


def finished_rows(folder: Path) -> int:
    """Count the output rows in the shards and the journals of a job, each once."""
    if not (folder / "manifest.json").is_file():
        return 0
    return sum(batch.num_rows for batch in JobFolderReader(folder).batches(["row_index"]))


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts in the folder's metrics.json; none if there is no such file."""
    path = folder / "metrics.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["attempts"] if path.exists() else []
    return found


def _equal(one: pa.ChunkedArray, two: pa.ChunkedArray) -> bool:
    if one.equals(two):
        return True
    one, two = one.combine_chunks(), two.combine_chunks()
    while pa.types.is_list(one.type) or pa.types.is_fixed_size_list(one.type):
        if pa.types.is_list(one.type) and not one.offsets.equals(two.offsets):
            return False
        one, two = one.flatten(), two.flatten()
    if not pa.types.is_floating(one.type) or one.null_count or two.null_count:
        return False
    return np.allclose(one.to_numpy(), two.to_numpy(), rtol=0, atol=TOLERANCE)


def _run_killed(command: list[str], delay: float, log: Path) -> int | None:
    """Run the command, and kill it after `delay` seconds; the exit code, or None if killed."""
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        return process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Check that a job survives kill -9.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; is emptied")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    rng = random.Random(args.seed)
    for stage in range(1 + len(args.grow)):
        grown = args.grow[:stage]
        if grown:
            print(f"grown by {grown[-1]}")
        # A later value of a key takes the place of an earlier one.
        keys = {part.split("=", 1)[0]: part for part in [*args.command, *grown]}
        _check(list(keys.values()), args.work, stage, args.kills, rng)


def _check(command: list[str], work: Path, stage: int, kills: int, rng: random.Random) -> None:
    """Run a command undisturbed in a new folder and with kills in the folder of all stages."""
    expected, found, log = work / f"expected{stage}", work / "killed", work / "log"
    commands = {
        out: [part.replace("{out}", str(out)) for part in command] for out in (expected, found)
    }
    started = time.monotonic()
    code = _run_killed(commands[expected], 1e9, log)
    seconds = time.monotonic() - started
    if code not in (0, 3):
        sys.exit(f"the undisturbed job ended with exit code {code}: see {log}")
    generating: float = attempts(expected)[0]["generate_s"]
    startup = seconds - generating
    print(f"the undisturbed job took {startup:.1f} s to start and {generating:.1f} s to generate")
    done = 0
    retries = "output.retry_errors=true" in command
    while True:
        # Some kills come while the job starts, and all so early that it survives so many of them.
        delay = rng.uniform(0.8 * startup, startup + generating / kills) if done < kills else 1e9
        before = finished_rows(found), len(attempts(found))
        code = _run_killed(commands[found], delay, log)
        # An attempt that was killed while it started is not among the attempts.
        if len(attempts(found)) > before[1] and not retries:
            resumed = attempts(found)[-1]["rows_resumed"]
            assert resumed == before[0], f"{resumed} of {before[0]} finished rows were taken over"
        if code is not None:
            break
        done += 1
        print(f"kill {done} after {delay:.2f} s: {finished_rows(found)} rows are safe", flush=True)
    if code not in (0, 3):
        sys.exit(f"the killed job ended with exit code {code}: see {log}")
    rows = compare_outputs(expected, found)
    print(f"{done} kills, {rows} rows: equal to those of the undisturbed job")
    if done < kills and not stage:
        sys.exit(f"only {done} kills before the job was complete: use a longer job")


if __name__ == "__main__":
    main()
