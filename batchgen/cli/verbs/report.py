"""The verb `batchgen report OUT`: writes the page about a job, a pipeline or a folder of jobs
again. The job may be incomplete."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.storage.folder.open_folder import open_folder
from batchgen.storage.folder.step_folders import is_pipeline
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, user_path

_ABOUT = """\
Write OUT/report.html: scores, lengths, speed, configuration and about 200 rows with their tokens,
in one file that needs nothing else. A job writes it when it is complete. For a pipeline's folder it
shows the steps as a graph with counts, the cost and some rows of each, and links to their reports.
For a sweep's folder, or any other folder of graded jobs, it has the table of `batchgen compare` and
plots of the score against the keys that vary.

  batchgen report OUT
  batchgen report SWEEP --x tokens_per_s
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb: print the path of the page. Returns 0; mistakes raise ConfigError."""
    parser = VerbParser("report", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir, or a folder of jobs")
    parser.add_argument(
        "--x",
        metavar="METRIC",
        help="of a sweep: a picture of the score against a number of metrics.json, too",
    )
    options = parser.parse_args(arguments)
    out_given = options.out
    out = user_path(folder_here(out_given, "batchgen report"), "OUT")
    from batchgen.evals.arms.arm_folders import arm_folders
    from batchgen.evals.arms.job_arms import job_arms

    folders = arm_folders([out_given])
    if any(folder.listed for folder in folders):
        from batchgen.evals.arms.arm_table import arm_table
        from batchgen.pages.report.sweep_report import write_sweep_report

        print(write_sweep_report(out, out_given, arm_table(*job_arms(folders)), options.x))
        return 0
    if options.x is not None:
        raise ConfigError(
            f"--x {options.x} compares jobs, and {out_given} is not a folder of jobs: leave it out"
        )
    if is_pipeline(str(out)):
        from batchgen.pages.report.pipeline_report import write_report

        print(write_report(out, out_given))
        return 0
    job = open_folder(out_given, "report")
    from batchgen.pages.report.write_report import make_report

    print(make_report(job.path))
    return 0
