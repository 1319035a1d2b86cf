"""The verb `batchgen view OUT [OUT2]`: shows a job, two jobs side by side, or a list of jobs in a
browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.storage.folder.open_folder import open_folder
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, user_path

if TYPE_CHECKING:
    from batchgen.pages.viewer.server import Respond

_ABOUT = """\
Show the rows of a job, running or complete, in a browser, or those of two jobs side by side. For a
folder that contains jobs, the first page lists them.

A server on this machine makes the pages until Ctrl-C. It writes nothing and loads nothing from
elsewhere. To view a job on a remote machine, forward the port: use --port 8000 there and
`ssh -L 8000:127.0.0.1:8000 HOST` here, and open the printed address.
"""
_MAX_PORT = 65535


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb: serve pages until Ctrl-C. Returns 0; mistakes raise ConfigError."""
    parser = VerbParser("view", _ABOUT)
    parser.add_argument(
        "out", metavar="OUT", help="the job's output.dir, or a folder with jobs below it"
    )
    parser.add_argument(
        "other", metavar="OUT2", nargs="?", help="a second job, shown next to it by row_id"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--open", action="store_true", help="open it in the browser, too")
    args = parser.parse_args(arguments)
    if not 0 <= args.port <= _MAX_PORT:
        raise ConfigError(f"view --port must be from 0 to {_MAX_PORT:,}, got {args.port}")
    names = [name for name in (args.out, args.other) if name is not None]
    respond = _jobs(names[0]) if len(names) == 1 and _has_no_job(names[0]) else _rows(names)
    from batchgen.pages.viewer.server import ViewServer

    with ViewServer(respond, args.port) as server:
        # Load what pages need, and compile their templates, before the first request.
        respond("", {})
        respond("rows", {})
        respond("row", {"n": "0"})
        print(f"{' and '.join(names)}: {server.url} (Ctrl-C ends it)", flush=True)
        if args.open:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _has_no_job(job_path: str) -> bool:
    """Whether this is a folder that is not a job's output folder."""
    path = user_path(folder_here(job_path, "batchgen view"), "OUT")
    return path.is_dir() and not (path / "manifest.json").exists()


def _jobs(job_path: str) -> Respond:
    """Return the function that makes the pages of the jobs in a folder. Raises ConfigError if there
    are none."""
    from batchgen.pages.viewer.folder_site import FolderSite
    from batchgen.pages.viewer.jobs_below import DEEPEST, jobs_below

    path = user_path(job_path, "OUT")
    if not jobs_below(path).jobs:
        raise ConfigError(
            f"{job_path} is not the output of a job (has no manifest.json), and there is no job "
            f"up to {DEEPEST} folders below it: give a job's output.dir, or a folder with jobs"
        )
    return FolderSite(path, job_path).respond


def _rows(names: Sequence[str]) -> Respond:
    """Return the function that makes the pages of one or two jobs."""
    paths = {user_path(folder_here(name, "batchgen view"), "OUT").resolve() for name in names}
    if len(paths) < len(names):
        raise ConfigError(f"view: {names[0]} and {names[1]} are the same folder: name two jobs")
    readers = {name: open_folder(name, "view") for name in names}
    from batchgen.pages.viewer.job_view import JobView
    from batchgen.pages.viewer.pages import Site

    return Site([JobView(reader, name) for name, reader in readers.items()]).respond
