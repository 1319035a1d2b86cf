"""The command that runs lm-eval (lm-evaluation-harness) with batchgen.

    python -m batchgen.api.plugins.lm_eval run --tasks TASKS --model_args pretrained=MODEL

What follows `run` are arguments of `lm-eval run`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest import mock

from batchgen.util.errors import ConfigError

MODEL = "batchgen"
"""The name of the model in lm-eval's registry."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 2 for a mistake of the user."""
    verb, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if verb in ("-h", "--help", "") or (verb == "run" and not rest):
        print(__doc__)
        return 0
    try:
        if verb != "run":
            raise ConfigError(f"{verb!r} is not supported: see --help")
        if any(word.partition("=")[0] in ("--model", "-M") for word in rest):
            raise ConfigError("--model is batchgen here: leave it out, or call lm-eval itself")
        evaluate(rest)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(arguments: Sequence[str]) -> None:
    """Call `lm-eval run` with batchgen's model."""
    try:
        from lm_eval._cli import HarnessCLI
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError(
            "lm-eval is not installed, or too old: pip install 'batchgen[lm-eval]'"
        ) from None
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import setup_logging

    model_registry.register(MODEL, target="batchgen.api.plugins.lm_eval_model:BatchgenLM")
    setup_logging()
    with mock.patch.object(sys, "argv", ["lm-eval", "run", "--model", MODEL, *arguments]):
        cli = HarnessCLI()
        cli.execute(cli.parse_args())


if __name__ == "__main__":
    sys.exit(main())
