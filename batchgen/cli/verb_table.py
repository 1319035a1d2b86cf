"""The table of verbs: `batchgen VERB …` does something other than run a job. `batchgen/__main__.py`
runs them with `run_verb`."""

from __future__ import annotations

from argparse import ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from batchgen.util.errors import ConfigError


class VerbParser(ArgumentParser):
    """The argument parser of a verb. Mistakes are raised as ConfigError, so that they look like
    those of other commands."""

    def __init__(self, verb: str, about: str, epilog: str | None = None) -> None:
        formatter = RawDescriptionHelpFormatter if "\n" in about else HelpFormatter
        super().__init__(
            prog=f"batchgen {verb}", description=about, epilog=epilog, formatter_class=formatter
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.partition(' ')[2]}: {message} ({self.prog} --help)")


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        module: the module with `main(arguments) -> exit code`. It is imported when the verb is
            used.
        arguments: its arguments, as `batchgen --help` shows them.
        help: what it does, in one line.
    """

    module: str
    arguments: str
    help: str


# The verbs by name, in the order of `batchgen --help`.
VERBS = {
    "init": Verb("batchgen.cli.verbs.init", "FILE", "write a commented job file"),
    "batch": Verb(
        "batchgen.cli.verbs.batch", "IN OUT", "run an OpenAI batch file, and write its results"
    ),
    "plan": Verb(
        "batchgen.cli.verbs.plan", "…", "estimate in seconds what a job would read, need and cost"
    ),
    "status": Verb("batchgen.cli.verbs.status", "OUT", "show a job's progress and its workers"),
    "show": Verb("batchgen.cli.verbs.show", "OUT", "print rows of a job, even while it runs"),
    "view": Verb("batchgen.cli.verbs.view", "OUT [OUT2]", "look at rows in a browser"),
    "export": Verb("batchgen.cli.verbs.export", "OUT", "write a job's rows as JSON lines or CSV"),
    "select": Verb("batchgen.cli.verbs.select", "OUT…", "write a new set from rows of jobs"),
    "push": Verb("batchgen.cli.verbs.push", "DIR USER/SET", "push rows to a data set on the hub"),
    "grade": Verb("batchgen.cli.verbs.grade", "OUT", "grade a job's answers, without the model"),
    "score": Verb("batchgen.cli.verbs.score", "OUT", "score a graded job, with intervals"),
    "compare": Verb("batchgen.cli.verbs.compare", "A B", "compare the scores of two jobs by row"),
    "report": Verb("batchgen.cli.verbs.report", "OUT", "write a job's report.html again"),
    "trace": Verb("batchgen.cli.verbs.trace", "OUT ROW", "follow a row back to where it came from"),
    "audit": Verb("batchgen.cli.verbs.audit", "OUT", "recompute rows and compare them bit for bit"),
    "lock": Verb(
        "batchgen.cli.verbs.lock", "OUT", "write what a data set was made from, in a few kB"
    ),
    "rebuild": Verb(
        "batchgen.cli.verbs.rebuild", "FILE", "remake the rows that a lock describes, and compare"
    ),
    "clean": Verb("batchgen.cli.verbs.clean", "OUT", "delete old versions of a pipeline's steps"),
    "validate": Verb(
        "batchgen.cli.verbs.validate", "OUT", "check a finished job's rows against their constraint"
    ),
}


def run_verb(name: str, arguments: Sequence[str]) -> int:
    """Run a verb, and return its exit code, even if its parser raises SystemExit."""
    module = import_module(VERBS[name].module)
    try:
        code: int = module.main(arguments)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return code
