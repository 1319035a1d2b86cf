"""The verb `batchgen score OUT`: prints the scores of a graded job, or of a job that is still
running."""

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
puts these scores into the job's metrics.json and report.html. A job that runs its rows with several
adapters has a score for each adapter.

With --so-far a job may still run: the answers that are there are graded in memory. Short answers
end first, which biases the score. So the scores of the shorter and of the longer half of the
answers are shown, too, and the lowest and the highest score that the job can still get.

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
        help="with --so-far: allow post steps of OUT/config.yaml that are not part of batchgen",
    )
    parser.add_argument(
        "--agreement",
        metavar="EXPR",
        help="compare the marks, and those of each judge, with this column of the rows, or with an "
        "expression over columns (Cohen's kappa); a value above 0.5 is right, one below it wrong",
    )
    return parser


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0; mistakes raise ConfigError."""
    args = _parser().parse_intermixed_args(arguments)
    if args.agreement is not None and (args.so_far or args.format not in ("text", "json")):
        raise ConfigError("score --agreement needs a complete job, and text or JSON as its format")
    if args.so_far and args.save:
        raise ConfigError("score --so-far covers only some of the answers: leave out --save")
    job = GradedJob(args.out, "score", complete=not args.so_far)
    from batchgen.evals.scores.job_score import job_scores, save_score
    from batchgen.evals.scores.samples import Samples
    from batchgen.pages.report.write_report import renew_report

    job.warn_of_copies()
    if args.so_far:
        from batchgen.evals.scores.so_far import score_so_far

        trusted = scoring(job, args.override, args.trust)
        values = score_so_far(job, trusted.post, trusted.score)
        print(_text(JobScores(values), args.format))
        return 0
    config = scoring(job, args.override)
    scores = job_scores(Samples(job.path, config.score, by=job.grid_column))
    if args.save:
        with job.locked():
            save_score(job.path, scores)
            renew_report(job.path)
    agreements = None
    if args.agreement is not None:
        from batchgen.evals.scores.judge_agreements import judge_agreements

        agreements = judge_agreements(job, config.score, args.agreement)
    print(_text(scores, args.format, agreements, args.agreement))
    return 0


def _text(
    scores: JobScores,
    form: str,
    agreements: JudgeAgreements | None = None,
    expression: str | None = None,
) -> str:
    """Return the scores in a format of --format.

    Args:
        agreements: how well the marks agree with `expression`; None without --agreement.
    """
    from batchgen.evals.scores.score_tables import header, score_cells, score_table_rows
    from batchgen.util.text.data_tables import csv_text, markdown
    from batchgen.util.text.text_table import adapter_lines, score_lines, table_text

    if form == "json":
        values: dict[str, Any] = dict(scores.score or {"adapters": scores.adapters})
        if agreements is not None:
            values["agreement"] = agreements.summary()
        return json.dumps(values, indent=2, ensure_ascii=False)
    if form == "csv":
        return csv_text(header(scores), score_table_rows(scores))
    if form == "markdown":
        return markdown([header(scores), *score_cells(scores)])
    lines = [] if scores.score is None else score_lines(scores.score)
    if scores.score is not None and "so_far" in scores.score:
        from batchgen.evals.scores.so_far import so_far_lines

        lines = [*so_far_lines(scores.score), *lines]
    if agreements is not None:
        lines = [*lines, *agreements.lines(expression or "")]
    return table_text(lines + adapter_lines(scores.adapters))
