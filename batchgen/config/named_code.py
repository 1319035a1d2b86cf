"""Finds the class or function that a configuration names by its import path.

Nothing else imports by a name that is not written in batchgen's own code. Whether a configuration
may name it is decided before, by `config.trust`.
"""

from __future__ import annotations

import os
import sys
from pkgutil import resolve_name
from typing import Any

from batchgen.util.errors import ConfigError

OWN = "batchgen."
"""How import paths of batchgen's own classes begin."""


def named_code(path: str, place: str) -> Any:
    """What has an import path `package.module.Class`; the user's own modules may be in the working
    directory, too. `place` is where the path stands, for error messages.

    Raises ConfigError if there is nothing, or it is none of batchgen's own where the path says so:
    `batchgen.jobs.run_job.os.system` is not.
    """
    is_own = path.startswith(OWN)
    if not is_own and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{place}: {path} is not there: {error}") from None
    if is_own and not str(getattr(found, "__module__", "")).startswith(OWN):
        raise ConfigError(f"{place}: {path} is not batchgen's own: give the path of its own module")
    return found
