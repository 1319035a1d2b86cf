"""The verb `batchgen lock OUT`: writes a file of a few kB that says how a data set was made, with
digests of its rows. `batchgen rebuild` remakes the rows from this file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.util.paths import user_path

_ABOUT = """\
Write the lock of a complete job, or of a pipeline: the configuration of each step, digests of its
models, data set, steps and code, the versions of the libraries, and the root of a tree of digests
over all its rows. Jobs whose rows it reads (dataset=job) are included. `batchgen rebuild` makes the
rows again from the lock and says whether they are equal.

  batchgen lock out -o out.lock
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0; mistakes raise ConfigError."""
    parser = VerbParser("lock", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the output.dir of a job or of a pipeline")
    parser.add_argument(
        "-o", dest="file", metavar="FILE", help="a new file; default: standard output"
    )
    args = parser.parse_args(arguments)
    from batchgen.pipelines.proof.make_lock import make_lock
    from batchgen.storage.stores.whole_file import write_atomic

    lock = make_lock(args.out)
    if args.file is None:
        print(lock.text(), end="")
        return 0
    path = user_path(args.file, "-o")
    write_atomic(path, lock.text(), f"-o {args.file}")
    rows = sum(proof.rows for proof in lock.proof.values())
    steps = len(lock.proof)
    size = path.stat().st_size
    of_steps = f"{steps} steps" if steps > 1 else "one job"
    print(f"{args.file}: {size:,} bytes, {of_steps} with {rows:,} rows", file=sys.stderr)
    return 0
