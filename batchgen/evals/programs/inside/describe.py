"""Prints, as JSON, the files of the interpreter that runs it; a sandbox needs them.

    python -I describe.py DISTRIBUTION…

It runs outside of any sandbox, and imports nothing of batchgen.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any


def describe_interpreter(names: list[str]) -> dict[str, Any]:
    """The interpreter's files, and the top folders and files of some distributions: name → path."""
    paths: dict[str, str] = {}
    versions: dict[str, str] = {}
    missing: list[str] = []
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        # The top folders and files of the distribution, without its metadata and its scripts.
        tops = {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "/")}
        kept = {top for top in tops if not top.endswith((".dist-info", ".egg-info", ".pth"))}
        kept.discard("__pycache__")
        if not kept:
            missing.append(name)
        versions[name] = package.version
        paths |= {top: os.path.realpath(str(package.locate_file(top))) for top in sorted(kept)}
    folder, library = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    shared = os.path.join(str(folder), str(library))
    return {
        "python": os.path.realpath(sys.executable),
        "version": sys.version.split()[0],
        "library": os.path.dirname(os.path.realpath(os.__file__)),
        "shared": shared if ".so" in str(library) and os.path.isfile(shared) else None,
        "packages": paths,
        "versions": versions,
        "missing": missing,
    }


if __name__ == "__main__":
    print(json.dumps(describe_interpreter(sys.argv[1:])))
