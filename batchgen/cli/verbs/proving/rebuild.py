"""`batchgen rebuild FILE`: makes the rows of a lock again, and says whether they are equal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import Parser
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path

if TYPE_CHECKING:
    from batchgen.proof.lock_file import Lock
    from batchgen.proof.rebuilt import RebuiltStep

_ABOUT = """\
Make the rows again that a lock describes, step by step, and compare each shard with it. A single
job is written into output.dir, several jobs into folders below it; the same command goes on after
it was stopped. Exit code 0 only if all rows are equal.

  batchgen rebuild out.lock output.dir=again
  batchgen rebuild out.lock output.dir=again model.path=/models/m draft.dataset.path=rows.jsonl
  batchgen rebuild out.lock --row q17 --against published

--row makes one row of the last step (or of --step) alone, with the rows that it is made of, and
prints it. With --against it proves that the row is in the set: the digests of the set's other rows
lead from it to the root that the lock has.

A lock is a stranger's file: code that it names does not run unless --trust allows it, and the
models, data sets and files that it names are read only if they are typed, or confirmed with --yes.
Models and data must have the digests of the lock.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    given = _given(arguments)
    path = user_path(given.file, "FILE")
    from batchgen.proof.lock_file import Lock
    from batchgen.proof.locked_jobs import locked_jobs

    lock = Lock.read(path)
    if given.row is not None:
        return _row(given, lock, path)
    if given.step is not None or given.against is not None:
        raise ConfigError("rebuild --step and --against are for --row")
    jobs = locked_jobs(lock, path, given.override, given.trust, confirmed=given.yes)
    from batchgen.proof.rebuilt import rebuild

    equal = True
    for step in rebuild(jobs, lambda line: print(f"batchgen: {line}", file=sys.stderr)):
        if isinstance(step, int):
            print("stopped; the same command goes on from there", file=sys.stderr)
            return 128 + step
        print(_line(step))
        equal = equal and step.difference is None
    return int(not equal)


def _given(arguments: Sequence[str]) -> Namespace:
    parser = Parser("rebuild", _ABOUT)
    parser.add_argument("file", metavar="FILE", help="what `batchgen lock` has written")
    parser.add_argument(
        "override", metavar="KEY=VALUE", nargs="*",
        help="output.dir, and where models and data are; STEP.KEY=VALUE for one step",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="read the places that the lock names")
    parser.add_argument(
        "--trust", metavar="FILE", action="append", default=[],
        help="run code that the lock names, even if it is not batchgen's own",
    )  # fmt: skip
    parser.add_argument("--row", metavar="ID", help="make the row with this row_id alone")
    parser.add_argument("--step", metavar="NAME", help="of which step; default: the last one")
    parser.add_argument(
        "--against", metavar="DIR", help="the step's folder, or a published copy, with the row"
    )
    return parser.parse_intermixed_args(arguments)


def _row(given: Namespace, lock: Lock, path: Path) -> int:
    """Make one row, and prove it if a set is given."""
    from batchgen.folder.open_folder import open_folder
    from batchgen.folder.read_job import JobFolderReader
    from batchgen.proof.locked_jobs import locked_jobs
    from batchgen.proof.rebuilt_row import prove, rebuild_row
    from batchgen.rows.printed_rows import RowPrinter

    name = given.step or [*lock.steps][-1]
    if name not in lock.steps:
        raise ConfigError(f"--step {name}: the steps are {', '.join(lock.steps)}")
    against = None if given.against is None else open_folder(given.against, "rebuild")
    with TemporaryDirectory(prefix="batchgen-rebuild-") as below:
        overrides = [*given.override, f"output.dir={below}"]
        jobs = locked_jobs(lock, path, overrides, given.trust, confirmed=given.yes)
        folder, rows = rebuild_row(jobs, name, given.row, Path(below, "steps"))
        reader = JobFolderReader(folder)
        RowPrinter(reader, None, as_json=False).print(reader.rows(), whole=True)
    print()
    if against is None:
        print(f"{given.row}: made; --against DIR proves that a set of the lock has it")
        return 0
    proven = prove(rows, lock.proof[name], against.path, given.against)
    for one in proven:
        text = f"proven: row {one.place} of shard {one.shard}, under the root of the lock"
        said = text if one.difference is None else f"not proven: {one.difference}"
        print(f"{given.row}, sample {one.sample}: {said}")
    return int(any(one.difference is not None for one in proven))


def _line(step: RebuiltStep) -> str:
    """What became of a step."""
    if step.difference is not None:
        return f"{step.name}: different: {step.difference}"
    count = f"{step.rows:,} rows in {step.shards:,} shard{'s' * (step.shards != 1)}"
    how = "equal to the byte" if step.same_bytes else "equal rows, in files with other bytes"
    return f"{step.name}: {how}: {count}"
