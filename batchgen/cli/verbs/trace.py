"""The verb `batchgen trace OUT ROW`: follows a row back to its origin, or tells which step dropped
it."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser

_ABOUT = """\
Follow a row back to its origin: from a line of an exported file or a row of a set to the answers it
was made from, with their grades; from a job to the job whose answers it read; and to the row of the
data set and its file. For a missing id, say which step dropped it and why. Exit code 1 if the row
was dropped.

  batchgen trace out/judge q17#3
  batchgen trace chosen 'q17#3'
  batchgen trace sft.parquet --line 17
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 1 if the row was dropped, else 0."""
    parser = VerbParser("trace", _ABOUT)
    parser.add_argument(
        "out", metavar="OUT", help="the folder of a job, a pipeline or a set, or an exported file"
    )
    parser.add_argument("row", metavar="ROW", nargs="?", help="the row_id, or the id in a set")
    parser.add_argument("--line", metavar="N", type=int, help="a line of the file, counted from 1")
    parser.add_argument("--of", metavar="OUT", help="the job or set behind a file without a record")
    parser.add_argument("--sample", metavar="K", type=int, help="only this sample of the row")
    parser.add_argument("--whole", action="store_true", help="do not shorten long texts")
    parser.add_argument("--json", action="store_true", help="a list of objects and nothing else")
    args = parser.parse_intermixed_args(arguments)
    from batchgen.pipelines.trace.trace_row import trace_row
    from batchgen.pipelines.trace.trace_text import trace_lines, trace_values
    from batchgen.util.text.row_json import json_text

    trace = trace_row(args.out, args.row, line=args.line, sample=args.sample, of=args.of)
    if args.json:
        print(json_text(trace_values(trace)))
    else:
        for line in trace_lines(trace, whole=args.whole):
            print(line)
    return int(not trace.is_there)
