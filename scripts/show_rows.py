"""Print some rows of a finished job: the questions and the answers.

python scripts/show_rows.py FOLDER [--rows N]
"""

import argparse
from pathlib import Path

import pyarrow.dataset as ds

from batchgen.paths import short_user_path


def main() -> None:
    parser = argparse.ArgumentParser(description="Print some rows of a finished job.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    arguments = parser.parse_args()
    folder = short_user_path(arguments.folder, "FOLDER")
    data = ds.dataset(folder / "data", format="parquet")
    for row in data.head(arguments.rows).to_pylist():
        answer = row["text"] if row["error"] is None else f"ERROR {row['error']}"
        asked = row.get("question", f"row {row['row_id']}")
        cost = ""
        if row.get("num_forwards") is not None:
            cost = f", {row['num_generated_tokens']} tokens in {row['num_forwards']} forwards"
        print(f"\n  {asked}\n  → {answer.strip()}  [{row['finish_reason']}{cost}]")
    print(f"\n{data.count_rows()} rows in {folder / 'data'}")


if __name__ == "__main__":
    main()
