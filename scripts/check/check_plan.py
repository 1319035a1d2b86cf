"""Plan jobs with `batchgen plan`, run them, and print the predicted seconds next to the measured
ones.

    python scripts/check/check_plan.py --rows gsm8k.jsonl [--jobs demo,questions] \\
        [batchgen's arguments …]

Each job is planned three times: without an earlier run, from a run of its first rows, and from its
own run. Other programs on the machine change its speed between a plan and its job, so the ratios
mean something only on a quiet machine. The assumptions of the plans are printed too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="JSON lines with `question`; not needed for the demo")
    parser.add_argument("--limit", type=int, default=64, help="rows of the file that are run")
    parser.add_argument("--first", type=int, default=8, help="rows of the run that a plan uses")
    parser.add_argument("--jobs", default="demo,questions")
    options, more = parser.parse_known_args()
    questions = [
        "dataset=files", f"dataset.path={options.rows}", f"dataset.limit={options.limit}",
        "prompt.user={{ question }}", "sampling.max_new_tokens=96",
    ]  # fmt: skip
    print(f"{'job':<10} {'planned by':<10} {'low':>8} {'likely':>8} {'bound':>8} {'took':>8} ratio")
    for name in options.jobs.split(","):
        # Without arguments, batchgen runs its demo.
        arguments = [*({"demo": [], "questions": questions}[name]), *more]
        with tempfile.TemporaryDirectory(prefix="check-plan-") as folder:
            check(name, arguments, Path(folder), options.first)


def check(name: str, arguments: list[str], folder: Path, first: int) -> None:
    """Plan a job in three ways and run it. Print each forecast next to the measured seconds.

    Args:
        name: the job's name in the output.
        arguments: the arguments of batchgen that make the job.
        folder: an empty folder for the outputs.
        first: the rows of the short run from which the second plan is made.
    """
    whole, short = folder / "whole", folder / "first"
    run([*arguments, f"dataset.limit={first}", f"output.dir={short}"])
    plans = {
        "nothing": plan(arguments, whole),
        f"first {first}": plan([*arguments, f"plan.like={short}"], whole),
    }
    run([*arguments, f"output.dir={whole}"])
    plans["itself"] = plan([*arguments, f"plan.like={whole}"], folder / "again")
    took = json.loads((whole / "metrics.json").read_text())["attempts"][-1]["wall_s"]
    for how, forecast in plans.items():
        low, likely, bound = (forecast["seconds"][key] for key in ("low", "likely", "bound"))
        figures = f"{low:8.1f} {likely:8.1f} {bound:8.1f} {took:8.1f} {likely / took:.2f}"
        line = f"{name:<10} {how:<10} {figures}"
        print(line, *forecast["assumptions"], sep="\n  ", flush=True)


def plan(arguments: list[str], out: Path) -> dict[str, Any]:
    """Return the forecast of a job whose output would be in `out`, which a plan does not write."""
    planned = json.loads(run(["plan", *arguments, f"output.dir={out}", "--json"]))
    return dict(planned["forecast"])


def run(arguments: list[str]) -> str:
    """Run batchgen and return its output. Exit if it fails. Exit code 3, which says that some rows
    ended with an error, is no failure."""
    command = [sys.executable, "-m", "batchgen", *arguments]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if process.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return process.stdout


if __name__ == "__main__":
    main()
