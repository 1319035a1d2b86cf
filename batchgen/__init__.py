"""Offline batch inference over datasets; see the README.

    from batchgen import LLM, SamplingParams, run_job

The names in `__all__` are public, and so are the names that configurations use as `_target_`.
Everything else may change between versions.
"""

import os
import sys

# `python -m batchgen` looks for modules in the working directory first, which may be a stranger's
# folder. While Python looks for this module, its argv[0] is -m. The folder is dropped from the
# search path unless this package itself lies in it.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    if sys.path[:1] == [os.getcwd()] != [os.path.dirname(__path__[0])]:
        del sys.path[0]

from typing import TYPE_CHECKING, Any

from batchgen.util.versions import VERSION as __version__

if TYPE_CHECKING:
    from batchgen.api.python.job_calls import CompleteJob, run_job
    from batchgen.api.python.llm import LLM
    from batchgen.api.python.output import Output
    from batchgen.api.python.params import SamplingParams
    from batchgen.api.python.scored import Score
    from batchgen.engine.constraint.constraint import Constraint
    from batchgen.evals.graders.choices import RowStep
    from batchgen.evals.graders.step import AnswerRow, Column, GradeFailure, PostStep
    from batchgen.evals.instructions.follows_instruction import follows_instruction
    from batchgen.evals.math.same import same_math
    from batchgen.inputs.steps.table_step import BadRow, Dropped, StepRow, TableStep
    from batchgen.storage.folder.read_job import JobFolderReader
    from batchgen.strategies.ar.strategy import ARStrategy
    from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
    from batchgen.strategies.canvas.strategy import CanvasStrategy
    from batchgen.strategies.dllm.strategy import DLLMStrategy
    from batchgen.util.errors import ConfigError, JobError

__all__ = [
    "LLM",
    "ARSpecStrategy",
    "ARStrategy",
    "AnswerRow",
    "BadRow",
    "CanvasStrategy",
    "Column",
    "CompleteJob",
    "ConfigError",
    "Constraint",
    "DLLMStrategy",
    "Dropped",
    "GradeFailure",
    "JobError",
    "JobFolderReader",
    "Output",
    "PostStep",
    "RowStep",
    "SamplingParams",
    "Score",
    "StepRow",
    "TableStep",
    "__version__",
    "follows_instruction",
    "run_job",
    "same_math",
]

_HOME = {
    "ARSpecStrategy": "batchgen.strategies.ar_spec.strategy",
    "ARStrategy": "batchgen.strategies.ar.strategy",
    "AnswerRow": "batchgen.evals.graders.step",
    "BadRow": "batchgen.inputs.steps.table_step",
    "CanvasStrategy": "batchgen.strategies.canvas.strategy",
    "Column": "batchgen.evals.graders.step",
    "CompleteJob": "batchgen.api.python.job_calls",
    "ConfigError": "batchgen.util.errors",
    "Constraint": "batchgen.engine.constraint.constraint",
    "DLLMStrategy": "batchgen.strategies.dllm.strategy",
    "Dropped": "batchgen.inputs.steps.table_step",
    "GradeFailure": "batchgen.evals.graders.step",
    "JobError": "batchgen.util.errors",
    "JobFolderReader": "batchgen.storage.folder.read_job",
    "LLM": "batchgen.api.python.llm",
    "Output": "batchgen.api.python.output",
    "PostStep": "batchgen.evals.graders.step",
    "RowStep": "batchgen.evals.graders.choices",
    "SamplingParams": "batchgen.api.python.params",
    "Score": "batchgen.api.python.scored",
    "StepRow": "batchgen.inputs.steps.table_step",
    "TableStep": "batchgen.inputs.steps.table_step",
    "follows_instruction": "batchgen.evals.instructions.follows_instruction",
    "run_job": "batchgen.api.python.job_calls",
    "same_math": "batchgen.evals.math.same",
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, and return the object.

    Every `import batchgen.…` runs this file, and most imports do not need these names, some of
    which load torch. Raises AttributeError for any other name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
