"""Takes the pooling options of embeddings from the checkpoint where the configuration does not set
them."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.hidden_columns import EMBEDDING
from batchgen.inputs.model.embedder_files import check_modules, checkpoint_pooling, normalises
from batchgen.storage.folder.refused_folder import written_manifest
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError, mistakes_in


def with_pooling(config: JobConfig, path: Path) -> JobConfig:
    """The configuration with the pooling options of the checkpoint at `path`.

    It is unchanged if the job writes no embeddings, sets the options, or continues a folder that
    was begun without them.
    """
    output = config.output
    unset = [key for key in ("pooling", "normalise") if getattr(output, key) is None]
    if EMBEDDING not in output.columns or not unset:
        return config
    with mistakes_in("model"):
        check_modules(path)
        pooling, normalise = output.pooling, output.normalise
        pooling = checkpoint_pooling(path) if pooling is None else pooling
        normalise = normalises(path) if normalise is None else normalise
    changed = replace(config, output=replace(output, pooling=pooling, normalise=normalise))
    if changed == config or _was_begun(config):
        return config
    keys = " ".join(f"output.{key}={str(getattr(changed.output, key)).lower()}" for key in unset)
    print(f"model: embeddings are made as the checkpoint says: {keys}", file=sys.stderr)
    return changed


def _was_begun(config: JobConfig) -> bool:
    """Whether the job in the folder was begun with the present configuration, before options of the
    checkpoint are added."""
    if config.output.overwrite:  # the folder may hold another job
        return False
    try:
        with closing(open_storage(config.output.dir, config.workers)) as storage:
            old = written_manifest(storage)
    except (ConfigError, JobError, OSError):  # the folder is checked later
        return False
    output = json.loads(json.dumps(config_identity(config)["output"]))
    return old is not None and old.identity.get("output") == output
