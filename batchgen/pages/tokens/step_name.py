"""Looks up the name of a decoding step for pages, such as "denoise step"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from batchgen.config.groups.class_names import class_path

_OF_BATCHGEN = re.compile(r"batchgen\.strategies\.[a-z_]+(?=\.strategy\.\w+$)", re.ASCII)


def step_name(config: Mapping[str, Any]) -> str:
    """The name of a step by the job's `config`, with which its folder may lie.

    It is the constant STEP_NAME of the module `step_name` beside the strategy's own, which needs no
    torch. Only modules of batchgen are imported; steps of other strategies are "steps".
    """
    target = class_path(str((config.get("strategy") or {}).get("_target_", "")))
    if (folder := _OF_BATCHGEN.match(target)) is None:
        return "step"
    if find_spec(folder[0]) is None or find_spec(module := f"{folder[0]}.step_name") is None:
        return "step"
    return str(import_module(module).STEP_NAME)
