"""The versions of batchgen and its libraries, from their metadata: nothing is imported."""

from __future__ import annotations

import platform
from importlib import metadata

from batchgen import __version__

_LIBRARIES = ("torch", "triton", "transformers", "xgrammar", "datasets", "pyarrow")


def version(package: str) -> str:
    """The version of an installed package; "not installed" if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> str:
    """What `batchgen --version` prints: its own version on the first line, then the libraries'."""
    lines = [f"batchgen {__version__}", f"{'python':<13} {platform.python_version()}"]
    lines += [f"{name:<13} {version(name)}" for name in _LIBRARIES]
    return "\n".join(lines)
