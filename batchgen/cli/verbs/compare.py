"""`batchgen compare A B`: two graded jobs of one exam, question by question."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import Parser
from batchgen.evals.scores.compared_jobs import compared, comparison_lines
from batchgen.evals.scores.graded_folder import GradedJob
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.evals.scores.paired_comparison import Comparison, Question

SHOWN = 10
_ABOUT = """\
Compare two graded jobs over the questions that both have. Jobs whose prompts or targets differ are
refused, because their scores are not of one exam; --anyway compares them and says what differs.

Differences are B minus A, in points (percent of the questions); intervals are of 95%. "New
questions" tells whether B would be better at other questions of the kind, "same questions" whether
anything but chance changed in these; the latter needs several samples that differ. p is below 0.05
exactly where the interval beside it leaves out 0. The smallest difference that would be noticed
(5%, in four of five cases) is of new questions.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    parser = Parser("compare", _ABOUT)
    parser.add_argument("a", metavar="A", help="output.dir of the first job")
    parser.add_argument("b", metavar="B", nargs="?", help="output.dir of the second job")
    parser.add_argument("override", metavar="KEY=VALUE", nargs="*", help="score.cluster=… of both")
    parser.add_argument("--anyway", action="store_true", help="compare other exams, too")
    parser.add_argument(
        "--rows", type=int, default=SHOWN, help=f"flipped rows to list; default: {SHOWN}"
    )
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")
    given = parser.parse_intermixed_args(arguments)
    if given.rows < 0:
        raise ConfigError(f"compare --rows must be at least 0, got {given.rows}")
    if given.b is None:
        raise ConfigError(f"compare takes two jobs: compare {given.a} B, the folder of another one")
    if more := [word for word in given.override if "=" not in word or Path(word).is_dir()]:
        raise ConfigError(
            f"compare takes two jobs, and {', '.join(more)} would be more: compare them by pairs; "
            "`batchgen view FOLDER` lists the scores of all jobs below a folder"
        )
    jobs = GradedJob(given.a, "compare"), GradedJob(given.b, "compare")
    for job in jobs:
        job.warn_of_copies()
    comparison, found = compared(jobs, given.override, anyway=given.anyway)
    if given.json:
        print(json.dumps(_plain({**asdict(comparison), "differs": list(found)}), indent=2))
        return 0
    if found:
        print("Not one exam:", *found, sep="\n  ")
    print(_text(comparison, given.rows))
    return 0


def _text(found: Comparison, rows: int) -> str:
    from batchgen.util.text.text_table import table

    text = [table(comparison_lines(found))]
    for what, flipped in (("better", found.wins), ("worse", found.losses)):
        if flipped and rows:
            text += ["", f"B is {what} in:", *_listed(flipped, rows)]
    return "\n".join(text)


def _listed(flipped: Sequence[Question], rows: int) -> list[str]:
    lines = [f"  {q.row_id}  {100 * q.a:.1f}% → {100 * q.b:.1f}%" for q in flipped[:rows]]
    if len(flipped) > rows:
        lines.append(f"  … {len(flipped) - rows:,} more: --rows N shows them")
    return lines


def _plain(value: Any) -> Any:
    """The value with null for NaN, as JSON has none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
