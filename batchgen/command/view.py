"""`batchgen view OUT [OUT2]`: the rows of a job, or of two side by side, in a browser."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.command.job_rows import exit_code, open_folder
from batchgen.command.verbs import Parser
from batchgen.errors import ConfigError

_ABOUT = """\
Show the rows of a job in a browser, while it runs or later, or those of two jobs side by side.

A server on this machine makes the pages; it ends with Ctrl-C. Nothing is written, and nothing is
loaded from elsewhere. On a machine that one reaches by ssh, forward the port: give --port 8000 here
and `ssh -L 8000:127.0.0.1:8000 HOST` there, and open the address that is printed.
"""
_MOST_PORT = 65535


def main(arguments: Sequence[str]) -> int:
    """Run the verb and return its exit code."""
    return exit_code(lambda: _view(arguments))


def _view(arguments: Sequence[str]) -> int:
    parser = Parser("view", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument(
        "other", metavar="OUT2", nargs="?", help="that of a second job, shown beside it by row_id"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--open", action="store_true", help="open it in the browser, too")
    given = parser.parse_args(arguments)
    if not 0 <= given.port <= _MOST_PORT:
        raise ConfigError(f"view --port must be from 0 to {_MOST_PORT:,}, got {given.port}")
    names = [name for name in (given.out, given.other) if name is not None]
    readers = {name: open_folder(name, "view") for name in names}
    if given.other is not None and len({reader.path for reader in readers.values()}) < 2:
        raise ConfigError(f"view: {given.out} and {given.other} are the same folder: name two jobs")
    from batchgen.viewer.job_view import JobView
    from batchgen.viewer.pages import Site
    from batchgen.viewer.server import ViewServer

    site = Site([JobView(reader, name) for name, reader in readers.items()])
    with ViewServer(site.respond, given.port) as server:
        # Loads what pages need, and compiles their templates, before anybody waits for it.
        site.respond("rows", {})
        site.respond("row", {"n": "0"})
        print(f"{' and '.join(readers)}: {server.url} (Ctrl-C ends it)", flush=True)
        if given.open:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
