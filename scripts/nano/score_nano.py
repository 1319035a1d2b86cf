"""Score a job with a nano model: its right answers, and its tokens per step.

A step is a forward that brought tokens: a denoise step of nano_sdar, any forward of nano_hybrid.

    batchgen +experiment=nano_sdar
    python scripts/nano/score_nano.py outputs/nano_sdar
    batchgen +experiment=nano_sdar 'prompt.user="{{ question }} Answer in JSON."' \\
        sampling.max_new_tokens=100 output.dir=outputs/nano_json
    python scripts/nano/score_nano.py outputs/nano_json --json
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from nano_exam import Tally
from nano_problems import Form, final_number

COLUMNS = ("kind", "final", "text", "num_generated_tokens", "num_forwards")
COMMITS = "num_commit_forwards"
"""A column of strategy=dllm: forwards that brought no tokens."""


def score(rows: Iterable[Mapping[str, Any]], form: Form) -> dict[str, Tally]:
    """Sum up the rows by kind of problem. A row without an answer counts as wrong, with its steps.

    Args:
        rows: with the columns `COLUMNS`, and with strategy=dllm also `COMMITS`.
        form: of the answers.
    """
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    for row in rows:
        right = final_number(row["text"] or "", form) == int(row["final"])
        steps = (row["num_forwards"] or 0) - (row.get(COMMITS) or 0)
        tallies[row["kind"]].add(right, row["num_generated_tokens"], steps)
    return dict(sorted(tallies.items()))


def total(tallies: Iterable[Tally]) -> Tally:
    result = Tally()
    for tally in tallies:
        result.rows += tally.rows
        result.right += tally.right
        result.tokens += tally.tokens
        result.steps += tally.steps
    return result


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the columns that `score` takes of all rows in a job's folder.

    Raises:
        FileNotFoundError: if there is no data.
        ValueError: if a column is missing or no row was run.
    """
    files = sorted((folder / "data").glob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"{folder} has no data/*.parquet: give a job's output.dir")
    data = ds.dataset([str(file) for file in files], format="parquet")
    missing = [name for name in COLUMNS if name not in data.schema.names]
    if missing:
        raise ValueError(
            f"{folder} has no column {missing[0]}: give a job with dataset=nano_eval "
            "and strategy=dllm or ar_spec"
        )
    names = [name for name in (*COLUMNS, COMMITS) if name in data.schema.names]
    rows: list[dict[str, Any]] = data.to_table(columns=names).to_pylist()
    if not any(row["num_forwards"] for row in rows):
        raise ValueError(f"no row of {folder} was run: column error says why")
    return rows


def line(name: str, tally: Tally) -> str:
    per_step = f"{tally.tokens_per_step:.2f}" if tally.steps else "-"
    return f"{name:<10}{tally.right:>5} of {tally.rows:<5}{tally.accuracy:>7.1%}{per_step:>15}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", type=Path, help="the job's output.dir")
    parser.add_argument("--json", action="store_true", help="answers were asked for in JSON")
    args = parser.parse_args()
    try:
        rows = read_rows(args.folder)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    tallies = score(rows, "json" if args.json else "plain")
    print(f"{'kind':<10}{'right':>5}    {'':<5}{'':>7}{'tokens/step':>15}")
    for kind, tally in tallies.items():
        print(line(kind, tally))
    print(line("all", total(tallies.values())))


if __name__ == "__main__":
    main()
