"""Runs /program.py as a script that reads standard input and writes standard output.

It ends with 0, with 1 after an error, whose last line is the last of standard error, or as the
program ends it.
"""

from __future__ import annotations

import builtins
import sys

from batchgen.evals.programs.inside.limits import begin, text_of


def main() -> None:
    """Run the program as `__main__`."""
    begin()
    names = {"__name__": "__main__", "__builtins__": builtins, "__file__": "/program.py"}
    code = compile(text_of("/program.py"), "/program.py", "exec")
    sys.modules["__main__"].__dict__.update(names)
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit:
        pass  # with any code: what counts is the output
