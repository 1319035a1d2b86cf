"""The verb `batchgen select OUT… --out DIR`: writes a new set with chosen rows of complete jobs.

A *set* is a folder with a table of rows, and a record of the jobs that they come from. Other jobs
and `batchgen export` can read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.cli.job_outcome import column_list, verb
from batchgen.cli.verb_table import VerbParser

_ABOUT = """\
Write a new set of rows from complete jobs. Each condition is an expression over the columns of a
row: the data set's own, those of batchgen (text, finish_reason, …) and those of the grades,
as grades.mark, or as mark if the rows have no such column.

Rows with an error are left out. The options apply in this order:
--where   keep rows for which the expression is true
--best    keep the sample with the highest number in each input row, the first one if equal
--by      sort rows by a number, highest first, or lowest first with --ascending
--dedupe  keep the first of the rows that have the same value
--top     keep the first N rows

A row of the set has an id, the data set's columns, the generated text as `response`, the columns of
the grades, and in `source` the job, row and sample that it came from. The folder has README.md and
selection.json, which has the manifests of the jobs. The same command again changes nothing.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb: print how many rows each option leaves. Returns 0; mistakes raise
    ConfigError."""
    parser = VerbParser("select", _ABOUT)
    parser.add_argument("jobs", metavar="OUT", nargs="+", help="output.dir of a complete job")
    parser.add_argument("--where", metavar="EXPR", help="which rows to keep")
    parser.add_argument("--best", metavar="COLUMN", help="one sample of each input row")
    parser.add_argument("--dedupe", metavar="COLUMN", help="keep one row per value of it")
    parser.add_argument("--top", metavar="N", type=int, help="the first N rows")
    parser.add_argument("--by", metavar="COLUMN", help="sort the rows by this")
    parser.add_argument("--ascending", action="store_true", help="sort the lowest first")
    parser.add_argument(
        "--columns", metavar="A,B", type=column_list, help="default: see above; those of the grades"
        " may be written grades.NAME",
    )  # fmt: skip
    parser.add_argument(
        "--text-as", metavar="NAME", default="response", help="the name of the generated text"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder of the new set")
    args = parser.parse_args(arguments)
    from batchgen.pipelines.publish.chosen_rows import SelectionRequest
    from batchgen.pipelines.publish.data_folder import new_folder
    from batchgen.pipelines.publish.finished_rows import open_rows
    from batchgen.pipelines.publish.selection import select

    choice = SelectionRequest(args.where, args.best, args.dedupe, args.by, args.top, args.ascending)
    out = new_folder(args.out)
    jobs = [open_rows(job) for job in args.jobs]
    result = select(jobs, choice, out, columns=args.columns, text_as=args.text_as)
    if not result.is_new:
        print(f"{args.out} already has these rows.")
        return 0
    for step, rows in result.funnel:
        print(f"{rows:>12,}  {step}")
    print(f"{result.rows:,} rows in {args.out}")
    return 0
