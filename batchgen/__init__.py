"""Offline batch inference over datasets; see the README.

from batchgen import LLM, SamplingParams, run_job
"""

import os
import sys

# `python -m batchgen` looks for modules in the working directory first, which may be a stranger's
# folder. While Python looks for this module, its argv[0] is -m.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    if sys.path[:1] == [os.getcwd()] != [os.path.dirname(__path__[0])]:
        del sys.path[0]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.constraint.constraint import Constraint
    from batchgen.grading.mathematics.same import same_math
    from batchgen.python.job_calls import run_job
    from batchgen.python.llm import LLM
    from batchgen.python.output import Output
    from batchgen.python.params import SamplingParams

__all__ = ["LLM", "Constraint", "Output", "SamplingParams", "run_job", "same_math"]

_HOME = {
    "Constraint": "batchgen.engine.constraint.constraint",
    "LLM": "batchgen.python.llm",
    "Output": "batchgen.python.output",
    "SamplingParams": "batchgen.python.params",
    "run_job": "batchgen.python.job_calls",
    "same_math": "batchgen.grading.mathematics.same",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Every `import batchgen.…` runs this file, and most have no use for what these names load.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
