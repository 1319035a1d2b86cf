"""Runs /program.py in the sandbox, as a script that reads standard input and writes standard
output.

The exit code is 0, or 1 after an error, which is the last line of standard error; or that with
which the program ends itself.
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
        pass  # with any code, as only the output counts
