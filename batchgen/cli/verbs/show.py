"""The verb `batchgen show OUT`: prints rows of a job for people, or as JSON, while the job runs or
later."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from batchgen.cli.job_outcome import column_list, verb
from batchgen.cli.verb_table import VerbParser
from batchgen.cli.verbs.follow import follow_rows
from batchgen.pages.rows.printed_rows import RowPrinter, message_lines, of_sample
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here
from batchgen.util.text.row_json import json_text
from batchgen.util.text.text_table import counted

SHOWN_ROWS = 5
SHOWN_MESSAGES = 3
_CANDIDATES = 20_000  # number of row ids searched for similar ones


def _parser() -> VerbParser:
    parser = VerbParser(
        "show",
        "Print rows of a job, whether it is running, stopped, killed or complete.",
    )
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--row", metavar="ID", help="the whole row with this row_id")
    what.add_argument("--errors", action="store_true", help="the errors by type, with messages")
    what.add_argument("--follow", action="store_true", help="rows as they finish, to the job's end")
    parser.add_argument("--sample", metavar="K", type=int, help="only this sample of each row")
    parser.add_argument(
        "--rows", metavar="N", type=int,
        help=f"how many rows; default: the first {SHOWN_ROWS}, and all with --json",
    )  # fmt: skip
    parser.add_argument(
        "--columns", metavar="A,B", type=column_list,
        help="what is shown of a row; default: the columns of its prompt and its text",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per row and nothing else"
    )
    return parser


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0; mistakes raise ConfigError."""
    args = _parser().parse_args(arguments)
    if args.rows is not None and args.rows < 0:
        raise ConfigError(f"show: --rows must be at least 0, got {args.rows}")
    reader = open_job_reader(args.out)
    view = RowPrinter(reader, args.columns, as_json=args.json)
    if args.follow:
        folder_here(args.out, "batchgen show --follow")
        return follow_rows(reader, view, args.out, args.sample, as_json=args.json)
    if not args.json:
        print(status_line(reader, args.out))
    if args.row is not None:
        view.print(_samples_of_row(reader, args.row, args.sample), whole=True)
        return 0
    if args.errors:
        _print_errors(reader, args.sample, as_json=args.json)
        return 0
    chosen = of_sample(view.rows(), args.sample)
    limit = args.rows if args.rows is not None or args.json else SHOWN_ROWS
    num_printed = view.print(islice(chosen, None if limit is None else min(limit, sys.maxsize)))
    if args.json:
        return 0
    if next(chosen, None) is not None:
        these = "The first row" if num_printed == 1 else f"The first {num_printed} rows"
        print(f"\n{these}; --rows N shows more, --row ID one of them whole.")
    elif not num_printed:
        print("\nThere are no finished rows yet." if args.sample is None else "\nThere are none.")
    return 0


def _samples_of_row(
    reader: JobFolderReader, row_id: str, sample: int | None
) -> list[dict[str, Any]]:
    """Return the finished samples of a row. Raises ConfigError if there are none; the message
    suggests similar ids or other samples."""
    rows = list(reader.find(row_id))
    if matching := list(of_sample(rows, sample)):
        return matching
    if rows:
        others = ", ".join(str(row["sample_index"]) for row in rows)
        raise ConfigError(
            f"--sample {sample}: row {row_id} has no such finished sample: choose among {others}"
        )
    ids = [row["row_id"] for row in islice(reader.rows(["row_id"]), _CANDIDATES)]
    if not ids:
        raise ConfigError(
            f"--row {row_id}: no row of {reader.storage.display_name} is finished yet"
        )
    row_ids = list(dict.fromkeys(ids))
    similar = _similar(row_id, row_ids)
    ends = row_ids[0] if len(row_ids) == 1 else f"{row_ids[0]} to {row_ids[-1]}"
    raise ConfigError(
        f"--row {row_id}: no finished row of {reader.storage.display_name} has this row_id: "
        + (f"did you mean {', '.join(similar)}?" if similar else f"there are {ends}")
    )


def _similar(row_id: str, row_ids: list[str]) -> list[str]:
    """Return up to three ids that are spelt like `row_id`; none for a number, because numbers of
    other rows always look alike."""
    return [] if row_id.isdigit() else difflib.get_close_matches(row_id, row_ids, n=3, cutoff=0.5)


def _print_errors(reader: JobFolderReader, sample: int | None, *, as_json: bool) -> None:
    """Print each type of error with its number of rows and its first messages."""
    counts: Counter[str] = Counter()
    first: dict[str, list[dict[str, Any]]] = {}
    schema = reader.schema
    rows = reader.rows(["row_id", "sample_index", "error"]) if schema is not None else iter(())
    for row in of_sample(rows, sample):
        if (error := row.pop("error")) is not None:
            counts[error["type"]] += 1
            examples = first.setdefault(error["type"], [])
            if len(examples) < SHOWN_MESSAGES:
                examples.append(row | {"message": error["message"]})
    for type, number in counts.most_common():
        if as_json:
            print(json_text({"type": type, "rows": number, "first": first[type]}))
            continue
        print(f"\n{type}: {counted(number, 'row')}")
        for row in first[type]:
            print("\n".join(message_lines(row)))
    if not counts and not as_json:
        print("\nNo finished row has an error.")
