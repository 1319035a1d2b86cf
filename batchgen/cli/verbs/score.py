"""`batchgen score OUT`: the scores of a graded job, or of one that still runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.storage.metrics.job_scores import JobScores
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.evals.scores.judge_agreements import JudgeAgreements

_ABOUT = """\
Score the marks of a graded job, and print the scores. The intervals are of 95%: for new questions
of the same kind, and for the same questions asked again. Nothing is written without --save, which
puts these scores into the job's metrics.json and report.html. Rows that run with each of several
adapters have a score for each of these.

With --so-far a job may still run: the answers that are there are graded in memory. Short answers
end first, so it says how much better the shorter half of the answers is than the longer one, and
which score is possible at all.

  batchgen score OUT
  batchgen score OUT score.subset=category score.ks=1,4
  batchgen score OUT score.column=score           # of a judge, or any other column of numbers
  batchgen score OUT score.subset=category --save
  batchgen score OUT --so-far
  batchgen score OUT --format markdown
  batchgen score JUDGED --agreement mark          # with marks that the judged answers have
  batchgen score PAIRS --agreement '(1 + mark - other_mark) / 2'
"""


def _parser() -> VerbParser:
    parser = VerbParser("score", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument(
        "override",
        metavar="KEY=VALUE",
        nargs="*",
        help="score.column=…, score.subset=…, score.cluster=…, score.ks=…",
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "json", "csv"), default="text",
        help="default: text; json has everything",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="as --format json"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the scores into metrics.json and report.html"
    )
    parser.add_argument(
        "--so-far", action="store_true", help="score the answers of a job that is not complete"
    )
    parser.add_argument(
        "--trust",
        metavar="OUT",
        action="append",
        default=[],
        help="with --so-far: run what post in OUT/config.yaml names that is not batchgen's own",
    )
    parser.add_argument(
        "--agreement",
        metavar="EXPR",
        help="say how far the marks, and those of each judge, agree with this column of the rows, "
        "or expression over them (Cohen's kappa); above a half is right, below it wrong",
    )
    return parser


@verb
def main(arguments: Sequence[str]) -> int:
    given = _parser().parse_intermixed_args(arguments)
    if given.agreement is not None and (given.so_far or given.format not in ("text", "json")):
        raise ConfigError("score --agreement needs a complete job, and text or JSON as its format")
    if given.so_far and given.save:
        raise ConfigError("score --so-far covers only some of the answers: leave out --save")
    job = GradedJob(given.out, "score", complete=not given.so_far)
    from batchgen.evals.scores.job_score import job_scores, save_score
    from batchgen.evals.scores.samples import Samples
    from batchgen.pages.report.write_report import renew_report

    job.warn_of_copies()
    if given.so_far:
        from batchgen.evals.scores.so_far import score_so_far

        trusted = scoring(job, given.override, given.trust)
        values = score_so_far(job, trusted.post, trusted.score)
        print(_text(JobScores(values), given.format))
        return 0
    config = scoring(job, given.override)
    scores = job_scores(Samples(job.path, config.score, by=job.grid_column))
    if given.save:
        with job.locked():
            save_score(job.path, scores)
            renew_report(job.path)
    known, agreed = given.agreement, None
    if known is not None:
        from batchgen.evals.scores.judge_agreements import judge_agreements

        agreed = judge_agreements(job, config.score, known)
    print(_text(scores, given.format, agreed, known))
    return 0


def _text(
    scores: JobScores, form: str, agreed: JudgeAgreements | None = None, truth: str | None = None
) -> str:
    """The scores, and how far they agree with marks that are known."""
    from batchgen.evals.scores.score_tables import header, score_cells, score_table_rows
    from batchgen.util.text.data_tables import csv_text, markdown
    from batchgen.util.text.text_table import adapter_lines, score_lines, table_text

    if form == "json":
        values: dict[str, Any] = dict(scores.score or {"adapters": scores.adapters})
        if agreed is not None:
            values["agreement"] = agreed.summary()
        return json.dumps(values, indent=2, ensure_ascii=False)
    if form == "csv":
        return csv_text(header(scores), score_table_rows(scores))
    if form == "markdown":
        return markdown([header(scores), *score_cells(scores)])
    lines = [] if scores.score is None else score_lines(scores.score)
    if scores.score is not None and "so_far" in scores.score:
        from batchgen.evals.scores.so_far import so_far_lines

        lines = [*so_far_lines(scores.score), *lines]
    if agreed is not None:
        lines = [*lines, *agreed.lines(truth or "")]
    return table_text(lines + adapter_lines(scores.adapters))
