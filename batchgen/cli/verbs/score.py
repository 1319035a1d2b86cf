"""`batchgen score OUT`: the scores of a graded job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import Parser
from batchgen.evals.scores.graded_folder import GradedJob, Scoring, scoring
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

if TYPE_CHECKING:
    from batchgen.evals.scores.agreement import Agreement

_ABOUT = """\
Score the marks of a graded job, and print the scores. The intervals are of 95%: for new questions
of the same kind, and for the same questions asked again. Nothing is written without --save, which
puts these scores into the job's metrics.json and report.html. Rows that run with each of several
adapters have a score for each of these.

  batchgen score OUT
  batchgen score OUT score.subset=category score.ks=1,4
  batchgen score OUT score.subset=category --save
  batchgen score JUDGED --agreement mark   # with the marks that the judged answers have
"""


@verb
def main(arguments: Sequence[str]) -> int:
    parser = Parser("score", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument(
        "override",
        metavar="KEY=VALUE",
        nargs="*",
        help="score.subset=…, score.cluster=…, score.ks=…",
    )
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write the scores into metrics.json and report.html"
    )
    parser.add_argument(
        "--agreement",
        metavar="COLUMN",
        help="say how far the marks, 0 and 1, agree with those in this column of the rows (Cohen's "
        "kappa)",
    )
    given = parser.parse_intermixed_args(arguments)
    job = GradedJob(given.out, "score")
    config = scoring(job, given.override)
    from batchgen.evals.scores.job_score import job_scores, save_score
    from batchgen.evals.scores.samples import Samples
    from batchgen.pages.report.write_report import renew_report
    from batchgen.util.text.text_table import adapter_lines, score_lines, table

    job.warn_of_copies()
    scores = job_scores(Samples(job.path, config.score, by=job.grid_column))
    if given.save:
        with job.locked():
            save_score(job.path, scores)
            renew_report(job.path)
    agreed = None if given.agreement is None else _agreement(job, config, given.agreement)
    if given.json:
        values: dict[str, Any] = dict(scores.score or {"adapters": scores.adapters})
        if agreed is not None:
            values["agreement"] = agreed.summary()
        print(json.dumps(values, indent=2, ensure_ascii=False))
        return 0
    lines = [] if scores.score is None else score_lines(scores.score)
    if agreed is not None:
        lines.append(("agreement", _agreement_text(agreed, given.agreement)))
    print(table(lines + adapter_lines(scores.adapters)))
    return 0


def _agreement(job: GradedJob, config: Scoring, column: str) -> Agreement:
    """How far the marks of a job agree with those in a column of its rows."""
    from batchgen.evals.scores.agreement import agreement
    from batchgen.evals.scores.samples import Samples

    if column not in job.columns:
        raise ConfigError(
            f"--agreement {column}: the rows of {job.given} have no such column: choose among "
            f"{some_names(job.columns, column)}, or have the judged marks copied "
            "(dataset.columns)"
        )
    samples = Samples(job.path, config.score, by=column).table()
    found = agreement(samples["mark"].to_pylist(), samples[column].to_pylist())
    if found is None:
        raise ConfigError(f"--agreement {column}: no answer has a mark of 0 or 1 in both")
    return found


def _agreement_text(found: Agreement, column: str) -> str:
    low, high = found.interval
    kappa = "cannot be told" if found.kappa is None else f"{found.kappa:.2f}"
    more = f", {found.left_out:,} left out" if found.left_out else ""
    return (
        f"with {column}: {found.share:.1%} of {found.count:,} answers, kappa {kappa} "
        f"({low:.2f} to {high:.2f}){more}"
    )
