"""Offline batch inference over datasets; see the README.

from batchgen import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.constraint.constraint import Constraint
    from batchgen.engine.outputs import RequestOutput
    from batchgen.engine.sampling.params import SamplingParams
    from batchgen.llm import LLM

__all__ = ["LLM", "Constraint", "RequestOutput", "SamplingParams"]

_HOME = {
    "Constraint": "batchgen.engine.constraint.constraint",
    "LLM": "batchgen.llm",
    "RequestOutput": "batchgen.engine.outputs",
    "SamplingParams": "batchgen.engine.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Every `import batchgen.…` runs this file, and most have no use for what these names load.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
