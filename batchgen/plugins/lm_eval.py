"""The command that runs lm-eval (lm-evaluation-harness) with batchgen, at once or in two phases.

    python -m batchgen.plugins.lm_eval run --tasks TASKS --model_args pretrained=MODEL
    python -m batchgen.plugins.lm_eval dump FOLDER --tasks TASKS --model_args pretrained=MODEL
    batchgen FOLDER/score.yaml; batchgen FOLDER/generate.yaml
    python -m batchgen.plugins.lm_eval replay FOLDER --tasks TASKS --model_args pretrained=MODEL

What follows `run`, or the folder, are arguments of `lm-eval run`. `dump` writes the requests of the
tasks as jobs, which any number of workers can run, and `replay` makes the scores of their results.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from batchgen.plugins.harness_phases import DumpedAnswers, ReplayedAnswers
from batchgen.util.errors import ConfigError

MODEL = "batchgen"
"""The name of the model in lm-eval's registry."""
VERBS = ("run", "dump", "replay")


class _Dumped(Exception):
    """All requests of the tasks have been written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 2 for a mistake of the user."""
    verb, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    rest = rest[:-1]
    if verb in ("-h", "--help", "") or (verb == "run" and not rest):
        print(__doc__)
        return 0
    try:
        _run(verb, rest)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(verb: str, rest: Sequence[str]) -> None:
    if verb not in VERBS:
        raise ConfigError(f"{verb!r} is none of {', '.join(VERBS)}: see --help")
    if any(word.partition("=")[0] in ("--model", "-M") for word in rest):
        raise ConfigError("--model is batchgen here: leave it out, or call lm-eval itself")
    if verb == "run":
        return evaluate(MODEL, "batchgen.plugins.lm_eval_model:BatchgenLM", rest)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"{verb} needs a folder before the arguments of lm-eval")
    folder, rest = Path(rest[0]), rest[1:]
    if verb == "dump":
        _dump(folder, rest)
    else:
        _replay(folder, rest)


def evaluate(name: str, model: Any, arguments: Sequence[str]) -> None:
    """Call `lm-eval run` with a model, which is a class, or a text MODULE:CLASS."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import setup_logging

    model_registry.register(name, target=model)
    setup_logging()
    with mock.patch.object(sys, "argv", ["lm-eval", "run", "--model", name, *arguments]):
        cli = HarnessCLI()
        cli.execute(cli.parse_args())


def _dump(folder: Path, arguments: Sequence[str]) -> None:
    """Write the requests of the tasks, and the jobs that compute them."""
    from lm_eval.api.task import ConfigurableTask, Task

    from batchgen.plugins.lm_eval_model import PhaseLM

    made: list[DumpedAnswers] = []

    class DumpLM(PhaseLM):
        def answers_of(self, job: dict[str, Any]) -> DumpedAnswers:
            made.append(DumpedAnswers(folder, job))
            return made[0]

    def all_asked(_: object) -> NoReturn:
        raise _Dumped

    folder.mkdir(parents=True, exist_ok=True)
    # lm-eval filters responses when the model has had all requests.
    with (
        mock.patch.object(Task, "apply_filters", all_asked),
        mock.patch.object(ConfigurableTask, "apply_filters", all_asked),
    ):
        try:
            evaluate(f"{MODEL}-dump", DumpLM, arguments)
        except _Dumped:
            commands = [f"batchgen {shlex.quote(str(job))}" for job in made[0].jobs]
            replay = shlex.join(["replay", str(folder), *arguments])
            commands.append(f"python -m batchgen.plugins.lm_eval {replay}")
            (folder / "commands.txt").write_text("\n".join(commands) + "\n", encoding="utf-8")
            print("The requests are written. What comes next:", *commands, sep="\n    ")


def _replay(folder: Path, arguments: Sequence[str]) -> None:
    """Make the scores of what the jobs have computed."""
    from batchgen.plugins.lm_eval_model import PhaseLM

    class ReplayLM(PhaseLM):
        def answers_of(self, job: dict[str, Any]) -> ReplayedAnswers:
            return ReplayedAnswers(folder)

    evaluate(f"{MODEL}-replay", ReplayLM, arguments)


if __name__ == "__main__":
    sys.exit(main())
