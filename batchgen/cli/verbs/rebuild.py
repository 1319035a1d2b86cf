"""The verb `batchgen rebuild FILE`: remakes the rows that a lock describes, and reports whether
they are equal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.util.paths import user_path

if TYPE_CHECKING:
    from batchgen.pipelines.proof.rebuilt import RebuiltStep

_ABOUT = """\
Remake the rows that a lock describes, step by step, and compare each shard with it. A single job is
written to output.dir, several jobs to folders inside it; the same command resumes. Exit code 0 only
if all rows are equal.

  batchgen rebuild out.lock output.dir=again
  batchgen rebuild out.lock output.dir=again model.path=/models/m draft.dataset.path=rows.jsonl

A lock may come from a stranger: code that it names runs only with --trust, and models, data sets
and files that it names are read only if you type them or confirm them with --yes. Models and data
must have the digests in the lock.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0 if all rows are equal, 1 if some differ, and 128 plus the signal's
    number if a signal stopped it."""
    args = _parsed_arguments(arguments)
    path = user_path(args.file, "FILE")
    from batchgen.pipelines.proof.lock_file import LockFile
    from batchgen.pipelines.proof.locked_jobs import locked_jobs

    lock = LockFile.read(path)
    jobs = locked_jobs(lock, path, args.override, args.trust, confirmed=args.yes)
    from batchgen.pipelines.proof.rebuilt import rebuild

    equal = True
    for step in rebuild(jobs, lambda line: print(f"batchgen: {line}", file=sys.stderr)):
        if isinstance(step, int):
            print("stopped; the same command resumes", file=sys.stderr)
            return 128 + step
        print(_line(step))
        equal = equal and step.difference is None
    return int(not equal)


def _parsed_arguments(arguments: Sequence[str]) -> Namespace:
    parser = VerbParser("rebuild", _ABOUT)
    parser.add_argument("file", metavar="FILE", help="what `batchgen lock` has written")
    parser.add_argument(
        "override", metavar="KEY=VALUE", nargs="*",
        help="output.dir, and where models and data are; STEP.KEY=VALUE for one step",
    )  # fmt: skip
    parser.add_argument(
        "--yes", action="store_true", help=("read the models and data that the lock names")
    )
    parser.add_argument(
        "--trust", metavar="FILE", action="append", default=[],
        help="run code that the lock names, even if it is not batchgen's own",
    )  # fmt: skip
    return parser.parse_intermixed_args(arguments)


def _line(step: RebuiltStep) -> str:
    """Return the line that reports the result of one step."""
    if step.difference is not None:
        return f"{step.name}: different: {step.difference}"
    count = f"{step.rows:,} rows in {step.shards:,} shard{'s' * (step.shards != 1)}"
    how = "equal byte for byte" if step.same_bytes else "equal rows, in files with other bytes"
    return f"{step.name}: {how}: {count}"
