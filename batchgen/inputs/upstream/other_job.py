"""A complete job whose rows another job reads. `read_jobs` makes an `OtherJob`, and `JobSource`
reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchgen.evals.grades.finished_shards import FinishedShards
from batchgen.inputs.dataset.source import ReadJob
from batchgen.storage.costs.chain_costs import all_steps
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.stores.manifest import runs_of_row
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text

_MOST_DEPTH = 1000
"""The maximum length of a chain of jobs that read each other."""


class OtherJob(FinishedShards):
    """A complete job. Its answers are numbered from 0 over all shards.

    Attributes:
        read: what the manifest of the reading job records of this job.
        text_column: the column of generated text.
        by_adapter: whether a row was answered with several adapters, so that its id occurs once for
            each of them.
        is_complete: whether the shards were read, which the first `learn` does.
        needs_grades: whether the grades are used. Set before the first `learn`.
    """

    follows = False

    def __init__(self, reader: JobFolderReader, name: str) -> None:
        """Take a job that is complete. Raises ConfigError if its manifest.json is not batchgen's,
        and JobError if a file is damaged or missing."""
        super().__init__(reader.storage, reader.storage.display_name, reader.whole)
        read, self.text_column = read_facts(lambda: reader.manifest, name, self.user_path)
        self.read = replace(read, costs=all_steps(reader.metrics, name))
        self.by_adapter = runs_of_row(reader.manifest) > 1
        self.is_complete = self.needs_grades = False

    def learn(self) -> bool:
        """Read all shards at the first call, and return whether this was the first call. Raises
        ConfigError if grades are needed and cannot be used."""
        if self.is_complete:
            return False
        if self.needs_grades:
            self._check_grades()
        self.is_complete = True
        return True


def read_facts(
    read: Callable[[], Mapping[str, Any]], name: str, user_path: str
) -> tuple[ReadJob, str]:
    """Read from a manifest what readers need: the record of the job, and the column of generated
    text. Raises ConfigError if the manifest is not batchgen's.

    Args:
        read: returns the manifest.
        name: the job's name in the record.
        user_path: the job's folder, for errors.
    """
    try:
        manifest = read()
        identity, fingerprints = dict(manifest["identity"]), dict(manifest["fingerprints"])
        fingerprints.pop("dataset", None)  # it changes if rows are added
        digest = fingerprint_text(json.dumps([identity, fingerprints], sort_keys=True))
        depth = dict(identity.get("dataset") or {}).get("depth", 0)
        text = identity["output"]["text_column"]
        if type(text) is str and type(depth) is int and 0 <= depth < _MOST_DEPTH:
            return ReadJob(name, digest, depth + 1, identity=identity), text
        why = "text_column or depth"
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ConfigError(f"dataset.path: {user_path}/manifest.json is not of batchgen ({why})")
