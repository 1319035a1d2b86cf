"""Plans jobs, runs them, and prints what was predicted beside what it took.

    python scripts/check/check_plan.py --rows gsm8k.jsonl [--work DIR] [--jobs demo,many] \\
        [batchgen's arguments …]

Each job is run twice. The first run is planned with nothing known, and says itself what it will
take once its engine is there; the second one is planned with a probe, and from the first. Then come
the seconds that a plan of 100,000 rows takes. Other programs on the machine change its speed
between a plan and its job, so the ratios say something on a quiet machine only; what the plans
assumed stands beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PLAN_ROWS = 100_000
MANY = "many"
"""What `--jobs` calls the plan of so many rows, which is not run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `question`")
    parser.add_argument("--limit", type=int, default=64, help="rows of the file that are run")
    parser.add_argument("--probe", type=int, default=8)
    parser.add_argument("--work", type=Path, help="folder for outputs; a temporary one if absent")
    parser.add_argument("--jobs", help="comma separated: demo, questions, exact lengths, many")
    given, more = parser.parse_known_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="check-plan-"))
    questions = ["dataset=files", f"dataset.path={given.rows}", "prompt.user={{ question }}"]
    cases = {
        "demo": [],
        "questions": [*questions, f"dataset.limit={given.limit}", "sampling.max_new_tokens=96"],
        "exact lengths": [
            *questions,
            f"dataset.limit={given.limit}",
            "sampling.max_new_tokens=48",
            "sampling.ignore_eos=true",
        ],
    }
    chosen = [*cases, MANY] if given.jobs is None else given.jobs.split(",")
    if unknown := [name for name in chosen if name not in (*cases, MANY)]:
        parser.error(f"--jobs has {unknown[0]!r}, and the jobs are {', '.join([*cases, MANY])}")
    print(f"{'job':<14} {'planned by':<14} {'low':>8} {'likely':>8} {'bound':>8} {'took':>8}"
          f" {'likely/took':>12}")  # fmt: skip
    for name in (name for name in cases if name in chosen):
        check(name, [*cases[name], *more], work / name.replace(" ", "_"), given.probe)
    if MANY in chosen:
        time_many(given.rows, work, more)


def time_many(rows: Path, work: Path, more: list[str]) -> None:
    """Print the seconds that a plan of PLAN_ROWS rows takes."""
    many = work / "many.jsonl"
    write_many(rows, many)
    arguments = ["dataset=files", f"dataset.path={many}", "prompt.user={{ question }}", *more]
    for attempt in ("first", "again"):
        started = time.perf_counter()
        plan(arguments, work / MANY)
        print(f"a plan of {PLAN_ROWS:,} rows, {attempt}: {time.perf_counter() - started:.1f} s")


def check(name: str, arguments: list[str], out: Path, probe: int) -> None:
    """Plan a job and run it, twice, and print what each plan said beside what came after it.

    The first start may have to compile kernels, which a probe or the second job then finds.
    """
    first, second = out / "first", out / "second"
    nothing = plan(arguments, first)
    metrics = run_job(arguments, first)
    show(name, "nothing", nothing, metrics)
    show(name, "its start", metrics["predicted"], metrics)
    probed = plan([*arguments, f"plan.probe={probe}"], second)
    like = plan([*arguments, f"plan.like={first}"], second)
    metrics = run_job(arguments, second)
    show(name, f"probe of {probe}", probed, metrics)
    show(name, "the first job", like, metrics)


def run_job(arguments: list[str], out: Path) -> dict[str, Any]:
    """Run a job and return what its metrics.json says."""
    run([*arguments, f"output.dir={out}"])
    metrics: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return metrics


def show(name: str, how: str, forecast: dict[str, Any] | None, metrics: dict[str, Any]) -> None:
    """Print a forecast beside what the job took."""
    if forecast is None:
        print(f"{name:<14} {how:<14} no forecast for this device")
        return
    took = metrics["actual"]["seconds"]
    low, likely, bound = (forecast["seconds"][key] for key in ("low", "likely", "bound"))
    print(f"{name:<14} {how:<14} {low:8.1f} {likely:8.1f} {bound:8.1f} {took:8.1f}"
          f" {likely / took:12.2f}", flush=True)  # fmt: skip
    print("\n".join(f"{'':<14} {each}" for each in forecast["assumptions"]))


def plan(arguments: list[str], out: Path) -> dict[str, Any] | None:
    """The forecast of a job."""
    text = run(["plan", *arguments, f"output.dir={out}", "--json"])
    found: dict[str, Any] | None = json.loads(text)["forecast"]
    return found


def run(arguments: list[str]) -> str:
    """What a command prints; rows with an error are no failure here."""
    command = [sys.executable, "-m", "batchgen", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def write_many(rows: Path, path: Path) -> None:
    """Write PLAN_ROWS rows of one to three questions each, two of which are far too long."""
    questions = [json.loads(line)["question"] for line in rows.read_text().splitlines()]
    draws = random.Random(1)
    with path.open("w") as file:
        for index in range(PLAN_ROWS):
            text = " ".join(draws.choices(questions, k=draws.choice([1, 1, 1, 2, 3])))
            text *= 1000 if index in (777, 77_777) else 1
            file.write(json.dumps({"question": text}) + "\n")


if __name__ == "__main__":
    main()
