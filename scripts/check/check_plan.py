"""Plans jobs, runs them, and prints the predicted figures next to the measured ones.

    python scripts/check/check_plan.py --rows gsm8k.jsonl [--jobs demo,questions] \\
        [batchgen's arguments …]

Each job is planned three times: with nothing known, from a run of its first rows, and from its own
run. Other programs on the machine change its speed between a plan and its job, so the ratios mean
something only on a quiet machine. What the plans assumed is printed, too.
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
    parser.add_argument("--first", type=int, default=8, help="rows of the run before")
    parser.add_argument("--jobs", default="demo,questions")
    options, more = parser.parse_known_args()
    questions = [
        "dataset=files", f"dataset.path={options.rows}", f"dataset.limit={options.limit}",
        "prompt.user={{ question }}", "sampling.max_new_tokens=96",
    ]  # fmt: skip
    print(f"{'job':<10} {'planned by':<10} {'low':>8} {'likely':>8} {'bound':>8} {'took':>8} ratio")
    for name in options.jobs.split(","):
        arguments = [*({"demo": [], "questions": questions}[name]), *more]
        with tempfile.TemporaryDirectory(prefix="check-plan-") as folder:
            check(name, arguments, Path(folder), options.first)


def check(name: str, arguments: list[str], folder: Path, first: int) -> None:
    """Plan a job in three ways and run it; print each forecast next to the measured figures."""
    whole, some = folder / "whole", folder / "first"
    run([*arguments, f"dataset.limit={first}", f"output.dir={some}"])
    plans = {
        "nothing": plan(arguments, whole),
        f"first {first}": plan([*arguments, f"plan.like={some}"], whole),
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
    """Return the forecast of a job."""
    planned = json.loads(run(["plan", *arguments, f"output.dir={out}", "--json"]))
    return dict(planned["forecast"])


def run(arguments: list[str]) -> str:
    """What a command prints; rows with an error are no failure here."""
    command = [sys.executable, "-m", "batchgen", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
