"""The version of batchgen, which pyproject.toml reads from here, and the versions of its
libraries."""

from __future__ import annotations

VERSION = "0.1.0"
_LIBRARIES = ("torch", "triton", "transformers", "xgrammar", "datasets", "pyarrow")


def versions() -> str:
    """Return the text of `batchgen --version`: batchgen's version in the first line, then those of
    Python and the libraries."""
    # Imported here because `import batchgen` runs this file, and the metadata are rarely needed.
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
