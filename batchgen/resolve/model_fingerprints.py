"""Digests of what decides the answers of a job besides its configuration and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchgen.config.job_config import JobConfig
from batchgen.model.model_source import model_files
from batchgen.model.open_model import OpenedModel
from batchgen.util.fingerprint import fingerprint_files, fingerprint_text

if TYPE_CHECKING:
    import torch


def model_fingerprints(
    config: JobConfig, model: OpenedModel, others: Mapping[str, OpenedModel], dtype: torch.dtype
) -> dict[str, str]:
    """Digests by name. Every file of the models is read, unless its digest is known from before."""
    found = {
        "model": fingerprint_files(model_files(model.path)),
        # `auto` may mean another dtype on another machine, and that gives other tokens.
        "dtype": str(dtype).removeprefix("torch."),
    }
    if (weights := model.weights_text(config.engine.device)) is not None:
        found["weights"] = weights  # of FP8 is computed with only where the device can
    for name, other in others.items():
        found[f"{name}_model"] = fingerprint_files(model_files(other.path))
    if (constraint := config.params.constraint) is not None:
        # The configuration is compared without the order of keys, in which the row writes them.
        found["constraint"] = fingerprint_text(constraint.text)
    return found
