"""What a job would find in its output folder; nothing is changed there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.config import JobConfig, identity
from batchgen.errors import ConfigError
from batchgen.output.job_folder import refuse_foreign_files
from batchgen.output.manifest import Manifest
from batchgen.output.read_job import JobFolderReader

if TYPE_CHECKING:
    from batchgen.build import OpenedJob


def folder_state(config: JobConfig, opened: OpenedJob) -> str:
    """Say in words what the job would do with its folder.

    The files of the model are not read, so a job with another model under the same name is not
    found out here.

    Raises:
        ConfigError: the job would be refused because of what the folder holds.
    """
    path = Path(config.output.dir)
    try:
        refuse_foreign_files(path)
    except FileNotFoundError:
        return f"{path}: a new folder"
    except OSError as error:
        raise ConfigError(f"output.dir={path} cannot be read ({error.strerror})") from None
    if not (path / "manifest.json").exists():
        return f"{path}: a new folder"
    old = Manifest.read(path / "manifest.json")
    fingerprints = {**old.fingerprints, "dataset": opened.source.fingerprint}
    if differences := old.differences(Manifest.build(identity(config), fingerprints)):
        if config.output.overwrite:
            return f"{path}: the output of a different job, which is deleted (output.overwrite)"
        raise ConfigError(
            f"output.dir={path} holds the output of a different job:\n  "
            + "\n  ".join(differences)
            + "\nuse another output.dir, or output.overwrite=true to delete that output"
        )
    done = sum(batch.num_rows for batch in JobFolderReader(path).batches(["row_id"]))
    number = opened.source.num_rows
    total = "" if number is None else f" of {number * config.sampling.n:,}"
    return f"{path}: resumes, {done:,}{total} answers are there"
