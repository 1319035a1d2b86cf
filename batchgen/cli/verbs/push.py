"""The verb `batchgen push DIR USER/SET`: pushes a job's folder, or the folder of a set (rows that
`batchgen select` has chosen), to a data set on the hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser

_ABOUT = """\
Push the folder of a complete job, or one that `select` or `export` wrote, to a data set of the hub,
with its card, its configuration and its manifests. The data set is created if it does not exist.
Files that are already there are not sent again, so the same command resumes, and sends what is new;
shards there that this folder does not have are deleted. A data set that holds the rows
of another job or set is refused, and a damaged file is never sent.

Permission to write comes from `hf auth login`; batchgen stores no token. --while-running pushes
the shards of a job as they are published, until the job is complete.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0; mistakes raise ConfigError."""
    parser = VerbParser("push", _ABOUT)
    parser.add_argument("dir", metavar="DIR", help="a job's output.dir, or the folder of a set")
    parser.add_argument("repo", metavar="USER/SET", help="the data set on the hub")
    parser.add_argument("--private", action="store_true", help="make the data set a private one")
    parser.add_argument("--while-running", action="store_true", help="see above")
    args = parser.parse_args(arguments)
    from batchgen.pipelines.publish.push_folder import FolderPush
    from batchgen.pipelines.publish.pushed_files import PushedFolder

    folder = PushedFolder(args.dir)
    if not args.while_running:
        folder.refuse_incomplete()

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    push = FolderPush(folder, args.repo, private=args.private, say=say)
    if args.while_running:
        push.push_while_running()
    else:
        push.push(complete=True)
    message = f"{push.pushed:,} files pushed" if push.pushed else "All files are there already"
    print(f"{message}: {push.url}")
    return 0
