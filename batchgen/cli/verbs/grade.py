"""The verb `batchgen grade OUT [post=…]`: grades the rows of a complete job, without its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchgen.cli.job_outcome import exit_code
from batchgen.cli.verb_table import VerbParser
from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import user_path

_ABOUT = """\
Run a complete job's `post` steps, or others, over its rows. Grades are written to OUT/grades; the
rows stay as they are. Rows that already have these grades are skipped, so the same command resumes.
If it replaces grades of other steps, or of an older version, it reports how many marks change and
shows the first such rows.

  batchgen grade OUT
  batchgen grade OUT +experiment=gsm8k
  batchgen grade OUT 'post=[{Extract: {methods: [boxed]}}, {Grade: {method: math}}]'
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb, and return its exit code."""
    return exit_code(lambda: _grade(arguments))


def _grade(arguments: Sequence[str]) -> int:
    """Grade the job, compute its scores, and renew its report. Raises ConfigError without `post`
    steps."""
    parser = VerbParser("grade", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument(
        "override",
        metavar="KEY=VALUE",
        nargs="*",
        help="post=…, score.…=… or +experiment=…; default: as in OUT/config.yaml",
    )
    parser.add_argument(
        "--trust",
        metavar="OUT",
        action="append",
        default=[],
        help="run what post in OUT/config.yaml names, even if it is not batchgen's own",
    )
    parser.add_argument(
        "--changes",
        metavar="FILE",
        help="add a JSON line to FILE for each row whose mark changes, with both answers",
    )
    args = parser.parse_intermixed_args(arguments)
    job = GradedJob(args.out, "grade")
    config = scoring(job, args.override, args.trust)
    if not config.post:
        raise ConfigError(
            f"the job in {args.out} has no `post` steps: give some with post=[{{Extract: …}}] or "
            "take those of a ready-made job with +experiment=NAME"
        )
    from batchgen.evals.graders.build_steps import check_scored, post_steps
    from batchgen.evals.grades.changed_marks import ChangedMarks
    from batchgen.evals.scores.samples import Samples
    from batchgen.jobs.run.graded_job import save_scores, score_job
    from batchgen.pages.report.write_report import renew_report

    check_scored(post_steps(config.post), config.score, job.columns)
    with job.locked(), _appender(args.changes) as write:
        samples = Samples(job.path, config.score, by=job.grid_column)
        changes = ChangedMarks(write)
        try:
            count = samples.grades.make(config.post, job.text_column, config.score, changes=changes)
        finally:
            file = args.changes or "--changes FILE keeps all of them when marks are computed again"
            for line in changes.lines(f": {file}"):
                print(line)
        scores = score_job(samples)
        save_scores(job.path, scores)
        renew_report(job.path)
    print(f"{count:,} rows graded" if count else "All rows have these grades already.")
    if scores.score is not None or scores.adapters:
        job.warn_of_copies()
        from batchgen.util.text.text_table import adapter_lines, score_lines, table_text

        lines = [] if scores.score is None else score_lines(scores.score)
        print(table_text(lines + adapter_lines(scores.adapters)))
    return 0


@contextmanager
def _appender(name: str | None) -> Iterator[Callable[[str], None] | None]:
    """Yield a function that appends text to a file; None if `name` is None.

    Raises:
        ConfigError: the file cannot be opened.
        JobError: in the `with` body, the file cannot be written.
    """
    if name is None:
        yield None
        return
    path = user_path(name, "--changes")
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--changes {name} cannot be written: {error.strerror}") from None

    def write(text: str) -> None:
        """Append text to the file, and flush it."""
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            raise JobError(f"cannot write {name}: {error.strerror}") from error

    with file:
        yield write
