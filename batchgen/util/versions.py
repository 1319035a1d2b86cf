"""The versions of batchgen, which pyproject.toml reads from here, and of its libraries."""

from __future__ import annotations

VERSION = "0.1.0"
_LIBRARIES = ("torch", "triton", "transformers", "xgrammar", "datasets", "pyarrow")


def versions() -> str:
    """What `batchgen --version` prints: its own version on the first line, then the libraries'."""
    # Every `import batchgen` runs this file, and few want the metadata of packages.
    import platform
    from importlib import metadata

    lines = [f"batchgen {VERSION}", f"{'python':<13} {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"{name:<13} {version}")
    return "\n".join(lines)
