"""`batchgen score OUT`: the scores of a graded job."""

from __future__ import annotations

import json
from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import Parser
from batchgen.evals.scores.graded_folder import GradedJob, scoring

_ABOUT = """\
Score the marks of a graded job, and print the scores. The intervals are of 95%: for new questions
of the same kind, and for the same questions asked again. Nothing is written without --save, which
puts these scores into the job's metrics.json and report.html. Rows that run with each of several
adapters have a score for each of these.

  batchgen score OUT
  batchgen score OUT score.subset=category score.ks=1,4
  batchgen score OUT score.subset=category --save
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
    if given.json:
        values = scores.score or {"adapters": scores.adapters}
        print(json.dumps(values, indent=2, ensure_ascii=False))
        return 0
    lines = [] if scores.score is None else score_lines(scores.score)
    print(table(lines + adapter_lines(scores.adapters)))
    return 0
