"""The verb `batchgen compare A B C …`: compares the scores of graded jobs of one exam, question by
question, in one table.

An *exam* is the questions with their prompts and targets. An *arm* is a job, or several jobs that
differ only in their seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.evals.arms.arm_table import ArmRow, ArmTable
    from batchgen.evals.scores.paired_comparison import PairedQuestion

SHOWN = 10
"""How many flipped rows are listed by default."""
FORMATS = ("text", "markdown", "json", "csv")
_ABOUT = """\
Compare graded jobs of the same exam: the score of each, and its difference from the first over the
questions that both have. A sweep's folder stands for its jobs. Jobs that differ only in
sampling.seed are one arm, and their answers count together; with --by COLUMN the values of a column
are the arms. Jobs with other prompts or targets than the first are not compared, because that is
another exam; --anyway compares them.

Differences are in points (percent of the questions), with 95% intervals. In the table, p is
corrected by Holm for all arms. For two jobs the flipped rows are listed, and p is below 0.05
exactly if the interval next to it does not contain 0. "same questions" tells whether anything but
chance changed in the answers to these questions, which needs several samples that differ.
"noticeable" is the smallest true difference for new questions that such a comparison finds in four
of five cases.

  batchgen compare A B C
  batchgen compare SWEEP
  batchgen compare BASE SWEEP score.column=score
  batchgen compare SWEEP --x tokens_per_forward
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0; mistakes raise ConfigError."""
    parser = VerbParser("compare", _ABOUT)
    parser.add_argument(
        "given",
        metavar="OUT",
        nargs="+",
        help="output.dir of a job, or a folder of jobs; score.KEY=… of all of them",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="compare jobs of different exams, too"
    )
    parser.add_argument("--by", metavar="COLUMN", help="arms are the values of a column")
    parser.add_argument(
        "--x",
        metavar="METRIC",
        help="show the score against a number of metrics.json or of the configuration",
    )
    parser.add_argument(
        "--rows", type=int, default=SHOWN, help=f"flipped rows of two jobs; default: {SHOWN}"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="as --format json"
    )
    args = parser.parse_intermixed_args(arguments)
    if args.rows < 0:
        raise ConfigError(f"compare --rows must be at least 0, got {args.rows}")
    names = [word for word in args.given if not _is_key(word)]
    overrides = [word for word in args.given if _is_key(word)]
    from batchgen.evals.arms.arm_folders import arm_folders, refuse_nothing
    from batchgen.evals.arms.arm_table import arm_table
    from batchgen.evals.arms.frontier import frontier
    from batchgen.evals.arms.job_arms import job_arms

    folders = arm_folders(names)
    if len(folders) < 2 and args.by is None and not any(folder.listed for folder in folders):
        raise ConfigError(
            f"compare takes two jobs or more, or a sweep's folder: compare {' '.join(names)} B, "
            "the folder of another one"
        )
    arms, column = job_arms(folders, overrides, by=args.by, anyway=args.anyway)
    table = arm_table(arms, column)
    refuse_nothing(table, folders)
    if args.x is not None:
        frontier(table, args.x)  # raises ConfigError if no arm has the metric
    print(_text(table, args.format, args.x, args.rows))
    return 0


def _is_key(word: str) -> bool:
    """Whether a word is an argument `key=value`. A folder's name may contain `=`, too."""
    return "=" in word and not Path(word).expanduser().is_dir()


def _text(table: ArmTable, form: str, x: str | None, rows: int) -> str:
    """Return the comparison in a format of --format.

    Args:
        x: the metric of --x.
        rows: the maximum number of flipped rows in each direction.
    """
    from batchgen.evals.arms.arm_values import (
        table_cells,
        table_csv,
        table_lines,
        table_remarks,
        table_values,
    )
    from batchgen.evals.arms.frontier import frontier, frontier_lines
    from batchgen.util.text.data_tables import markdown

    if form == "json":
        return json.dumps(table_values(table, x), indent=2, ensure_ascii=False)
    if form == "csv":
        return table_csv(table, x)
    if form == "markdown":
        return "\n".join(
            [markdown(table_cells(table, x)), "", *(f"- {r}" for r in table_remarks(table))]
        )
    text = table_lines(table, x)
    if x is not None:
        text += ["", *frontier_lines(frontier(table, x))]
    elif len(table.rows) == 2:
        text += _details(table.rows[1], table.column, rows)
    return "\n".join(text)


def _details(row: ArmRow, column: str, rows: int) -> list[str]:
    """Return the lines that are only printed for exactly two arms: the comparison, and the flipped
    rows.

    Args:
        row: the second arm of the table.
        column: the column of scores.
        rows: the maximum number of flipped rows in each direction.
    """
    from batchgen.evals.scores.compared_jobs import comparison_lines
    from batchgen.util.text.text_table import table_text

    comparison = row.comparison
    if comparison is None:
        return []
    text = ["", table_text(comparison_lines(comparison, column))]
    better, worse = ("better", "worse") if column == "mark" else ("higher", "lower")
    for what, flipped in ((better, comparison.wins), (worse, comparison.losses)):
        if flipped and rows:
            text += ["", f"B is {what} in:", *_listed(flipped, column, rows)]
    return text


def _listed(flipped: Sequence[PairedQuestion], column: str, rows: int) -> list[str]:
    """Return a line for each flipped row, up to `rows` of them."""
    from batchgen.util.text.text_table import number_text, percent_text

    as_text = percent_text if column == "mark" else number_text
    lines = [f"  {q.row_id}  {as_text(q.a)} → {as_text(q.b)}" for q in flipped[:rows]]
    if len(flipped) > rows:
        lines.append(f"  … {len(flipped) - rows:,} more: --rows N shows them")
    return lines
