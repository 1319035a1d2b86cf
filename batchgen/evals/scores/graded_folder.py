"""Opens a complete job for the verbs `grade`, `score` and `compare`, with its grading options.

*Grades* are the columns that `post` steps make, such as marks, in the folder `grades` of a job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.storage.folder.open_folder import open_folder, refuse_incomplete
from batchgen.util.errors import ConfigError
from batchgen.util.paths import short_user_path

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.config.groups.job_config import StepConfig
    from batchgen.config.groups.output_config import ScoreConfig
    from batchgen.storage.leases.folder_lock import FolderLock

# The groups that the user's arguments may change.
_KEYS = ("post", "score", "experiment")


class GradedJob:
    """A complete job, which may have grades.

    Attributes:
        user_path: its folder, as the user typed it.
        path: the folder.
    """

    def __init__(self, user_path: str, verb: str, *, complete: bool = True) -> None:
        """Open a job for a verb. Raises ConfigError if the folder is not a job's, or if the job
        must be `complete` and is not."""
        self.user_path = user_path
        self._reader = open_folder(user_path, verb)
        self.path = self._reader.path
        if complete:
            refuse_incomplete(self._reader, user_path)

    def locked(self) -> FolderLock:
        """A lock on the folder, for writing grades or scores. Raises ConfigError if a job runs
        there."""
        from batchgen.storage.leases.folder_lock import FolderLock

        try:
            return FolderLock(self.path / ".lock")
        except OSError as error:
            raise ConfigError(f"{self.user_path} cannot be written: {error.strerror}") from None

    def warn_of_copies(self) -> None:
        """Warn on stderr if the samples of a row are copies of one answer."""
        from batchgen.config.groups.sampling_config import copies_warning

        sampling = self.config.get("sampling") or {}
        n, temperature = sampling.get("n", 1), sampling.get("temperature", 0.0)
        # config.yaml may have been edited, so that these are of any type.
        are_numbers = isinstance(n, int) and isinstance(temperature, (int, float))
        if are_numbers and (copies := copies_warning(n, temperature)) is not None:
            print(f"batchgen: warning: {self.user_path} has {copies}", file=sys.stderr)

    @property
    def text_column(self) -> str:
        return self._reader.text_column

    @cached_property
    def config(self) -> dict[str, Any]:
        """The job's configuration, as in its config.yaml."""
        return self._reader.config

    @property
    def fingerprints(self) -> dict[str, str]:
        """Those of the job's manifest."""
        fingerprints: dict[str, str] = self._reader.manifest["fingerprints"]
        return fingerprints

    @cached_property
    def columns(self) -> list[str]:
        """The columns of its rows."""
        schema = self._reader.schema
        return [] if schema is None else list(schema.names)

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of its metrics.json."""
        return self._reader.metrics

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Its finished rows with some columns, in batches."""
        return self._reader.batches(columns)

    @property
    def grid_column(self) -> str | None:
        """The column with the adapter of each row, in jobs that run every row with several
        adapters; otherwise None."""
        return ADAPTER if (self.config.get("model") or {}).get("lora_grid") is True else None

    def rows(self, columns: Sequence[str]) -> Any:
        """Its rows with some columns."""
        return self._reader.rows(columns)


@dataclass(frozen=True)
class Scoring:
    """The `post` steps with which a job is graded, and the group `score`."""

    post: tuple[StepConfig, ...]
    score: ScoreConfig


def scoring(
    job: GradedJob, overrides: Sequence[str], trusted: Sequence[str] | None = None
) -> Scoring:
    """The `post` steps and the group `score` of a job, changed by the user's arguments: `post=…`,
    `score.KEY=…`, and `+experiment=NAME`, which takes both from an experiment.

    `trusted` are the values of `--trust`; None if no step will run.

    Raises:
        ConfigError: an argument is of another kind, a value is wrong, or a step needs `--trust`.
    """
    from batchgen.config.compose.compose_config import compose_groups
    from batchgen.config.compose.load_config import load_config
    from batchgen.config.compose.overrides import parse_override
    from batchgen.config.compose.trust import TYPED, Trust

    groups = [parse_override(argument).group for argument in overrides]
    for group, argument in zip(groups, overrides, strict=True):
        if group not in _KEYS:
            raise ConfigError(
                f"{argument}: only post=…, score.KEY=… and +experiment=… are allowed here"
            )
    values: dict[str, Any] = {}
    if "experiment" not in groups:
        values = {key: job.config[key] for key in ("post", "score") if key in job.config}
    read = [short_user_path(job.user_path, "OUT") / "config.yaml"]
    trust = TYPED if trusted is None else Trust.of(read, trusted, overrides)
    config = load_config(compose_groups(values, overrides).groups, trust)
    return Scoring(config.post, config.score)
