"""`batchgen report OUT`: makes the page about a job again, also of a job that is not complete."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import Parser
from batchgen.folder.open_folder import open_folder

_ABOUT = """\
Write OUT/report.html: scores, lengths, speed, configuration and about 200 rows with their tokens,
in one file that needs nothing else. A job writes it when it is complete.

  batchgen report OUT
"""


@verb
def main(arguments: Sequence[str]) -> int:
    parser = Parser("report", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    job = open_folder(parser.parse_args(arguments).out, "report")
    from batchgen.report.write_report import make_report

    print(make_report(job.path))
    return 0
