"""Looks up the name of a decoding step for pages, such as "denoise step". The pages of rows and
tokens call `step_name`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from batchgen.config.groups.class_names import class_path

_OF_BATCHGEN = re.compile(r"batchgen\.strategies\.[a-z_]+(?=\.strategy\.\w+$)", re.ASCII)
"""The package of a strategy of batchgen, in the path of the strategy's class."""


def step_name(config: Mapping[str, Any]) -> str:
    """Return the name of a step of a job with this configuration.

    The name is the constant STEP_NAME of the module `step_name` in the strategy's package; this
    module does not import torch. The configuration comes from the job's folder and is not trusted,
    so only modules of batchgen are imported. The name for other strategies is "step".
    """
    target = class_path(str((config.get("strategy") or {}).get("_target_", "")))
    if (folder := _OF_BATCHGEN.match(target)) is None:
        return "step"
    if find_spec(folder[0]) is None or find_spec(module := f"{folder[0]}.step_name") is None:
        return "step"
    return str(import_module(module).STEP_NAME)
