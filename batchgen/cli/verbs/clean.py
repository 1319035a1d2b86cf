"""The verb `batchgen clean OUT`: deletes the folders of older versions of a pipeline's steps.

A pipeline is a chain of jobs, its steps. When the configuration of a step changes, its rows go to a
new folder, and the folder of the older version stays until this verb deletes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.util.paths import user_folder

_ABOUT = """\
Delete old versions of a pipeline's steps. They are listed with their sizes first, and nothing is
deleted unless you confirm. A version is kept if a worker runs in it, if a current step reads it, or
if an incomplete step may still copy its rows.

  batchgen clean OUT
  batchgen clean OUT --yes
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 1 if some old versions are still needed, else 0."""
    parser = VerbParser("clean", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the pipeline's output.dir")
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    args = parser.parse_args(arguments)
    from batchgen.pipelines.run.old_versions import OldVersions
    from batchgen.util.text.text_table import counted, size_text

    versions = OldVersions(user_folder(args.out, "OUT"))
    folders = versions.found()
    if not folders:
        print("There is nothing to delete: all versions are current.")
        return 0
    for version in folders:
        stays = "" if version.needed is None else f"  stays: {version.needed}"
        print(f"{size_text(version.size):>9}  {version.folder}{stays}")
    old = [version for version in folders if version.needed is None]
    code = 1 if len(old) < len(folders) else 0
    total = f"{counted(len(old), 'folder')}, {size_text(sum(version.size for version in old))}"
    if not old or not (args.yes or _agreed(total)):
        print("Nothing was deleted.")
        return code
    for version in old:
        versions.delete(version)
    print(f"Deleted {total}.")
    return code


def _agreed(total: str) -> bool:
    """Ask the user for confirmation. Without a terminal the answer is no."""
    if not sys.stdin.isatty():
        print(f"{total}: add --yes to delete them")
        return False
    return input(f"Delete {total}? [y/N] ").strip().lower() in ("y", "yes")
