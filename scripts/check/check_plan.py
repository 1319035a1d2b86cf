"""Plans jobs, runs them, and prints what was predicted beside what it took.

    python scripts/check/check_plan.py --rows gsm8k.jsonl [--work DIR] [--jobs demo,questions] \\
        [batchgen's arguments …]

Each job is planned with nothing known, from a run of its first rows, and from itself. Other
programs on the machine change its speed between a plan and its job, so the ratios say something on
a quiet machine only; what the plans assumed stands beside them.
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
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `question`")
    parser.add_argument("--limit", type=int, default=64, help="rows of the file that are run")
    parser.add_argument("--first", type=int, default=8, help="rows of the run before")
    parser.add_argument("--work", type=Path, help="folder for outputs; a temporary one if absent")
    parser.add_argument("--jobs", help="comma separated: demo, questions, exact lengths")
    given, more = parser.parse_known_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="check-plan-"))
    questions = ["dataset=files", f"dataset.path={given.rows}", "prompt.user={{ question }}"]
    limit = f"dataset.limit={given.limit}"
    exact = ["sampling.max_new_tokens=48", "sampling.ignore_eos=true"]
    cases = {
        "demo": [],
        "questions": [*questions, limit, "sampling.max_new_tokens=96"],
        "exact lengths": [*questions, limit, *exact],
    }
    chosen = [*cases] if given.jobs is None else given.jobs.split(",")
    print(f"{'job':<14} {'planned by':<14} {'low':>8} {'likely':>8} {'bound':>8} {'took':>8}"
          f" {'likely/took':>12}")  # fmt: skip
    for name in chosen:
        check(name, [*cases[name], *more], work / name.replace(" ", "_"), given.first)


def check(name: str, arguments: list[str], out: Path, first: int) -> None:
    """Plan a job in three ways and run it, and print what each plan said beside what it took."""
    whole, some = out / "whole", out / "first"
    run([*arguments, f"dataset.limit={first}", f"output.dir={some}"])
    plans = {
        "nothing": plan(arguments, whole),
        f"first {first}": plan([*arguments, f"plan.like={some}"], whole),
    }
    run([*arguments, f"output.dir={whole}"])
    plans["itself"] = plan([*arguments, f"plan.like={whole}"], out / "again")
    took = json.loads((whole / "metrics.json").read_text())["attempts"][-1]["wall_s"]
    for how, forecast in plans.items():
        if forecast is None:
            print(f"{name:<14} {how:<14} no forecast for this device")
            continue
        low, likely, bound = (forecast["seconds"][key] for key in ("low", "likely", "bound"))
        print(f"{name:<14} {how:<14} {low:8.1f} {likely:8.1f} {bound:8.1f} {took:8.1f}"
              f" {likely / took:12.2f}", flush=True)  # fmt: skip
        print("\n".join(f"{'':<14} {each}" for each in forecast["assumptions"]))


def plan(arguments: list[str], out: Path) -> dict[str, Any] | None:
    """The forecast of a job."""
    text = run(["plan", *arguments, f"output.dir={out}", "--json"])
    forecast: dict[str, Any] | None = json.loads(text)["forecast"]
    return forecast


def run(arguments: list[str]) -> str:
    """What a command prints; rows with an error are no failure here."""
    command = [sys.executable, "-m", "batchgen", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
