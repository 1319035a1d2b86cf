"""Copies of the tiny models' folders with other weights or another configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def edit_weights(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the model with changed tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def edit_config(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder with only a config.json; a change to None removes the key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    target.mkdir()
    kept = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target
