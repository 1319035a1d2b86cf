"""Finds the Python interpreter for programs in the sandbox, and the packages that they may import.
`RunTests` calls `interpreter`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from batchgen.util.errors import ConfigError

_DESCRIBE = Path(__file__).with_name("inside") / "describe.py"
# The most seconds that an interpreter may take to answer.
_SECONDS = 60


@dataclass(frozen=True)
class Interpreter:
    """The files of an interpreter that a sandbox needs.

    Attributes:
        python: the real path of the interpreter.
        version: the version of Python.
        library: the folder of its standard library.
        shared: the file of its shared library, if it has one.
        packages: pairs of an importable name and the path of its folder or file.
        versions: pairs of a distribution and its version.
    """

    python: str
    version: str
    library: str
    shared: str | None
    packages: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The facts that results depend on: Python and the packages with their versions."""
        packages = "".join(f" {name}=={version}" for name, version in sorted(self.versions))
        return f"Python {self.version}{packages}"


@lru_cache
def interpreter(python: str | None, packages: tuple[str, ...]) -> Interpreter:
    """Ask an interpreter (None: the one that runs this) for its files and those of packages.

    Raises:
        ConfigError: it cannot be run, or lacks a package.
    """
    command = [python or sys.executable, "-I", str(_DESCRIBE), *packages]
    try:
        ended = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, check=True
        )
        facts = json.loads(ended.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"RunTests: python: {command[0]} does not say where its files are ({error}): give "
            "the path of a Python interpreter, or null for the one that runs batchgen"
        ) from None
    if missing := facts.pop("missing"):
        raise ConfigError(
            f"RunTests: packages: {command[0]} lacks {', '.join(missing)}: install it there (pip "
            "install), or leave it out"
        )
    return Interpreter(
        **facts | {key: tuple(facts[key].items()) for key in ("packages", "versions")}
    )
