"""Stops a pipeline early if too many rows of a step's first shard are errors. `run_steps` checks
each running step with an `ErrorWatch`."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pipelines.run.pipeline_values import MOST_ERRORS
from batchgen.storage.shards.shard_files import read_columns, shard_files
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import JobError
from batchgen.util.shorten import beginning
from batchgen.util.text.text_table import counted, row_name

_EXAMPLES = 3  # errors that the message quotes
_SHOWN = 200  # the most characters of each


class TooManyErrors(JobError):
    """The first finished shard of a step has more errors than the pipeline allows."""


class ErrorWatch:
    """Checks the first finished shard of a step.

    Args:
        step: the name of the step, for messages.
        storage: the step's folder.
        limit: the largest allowed share of error rows.
    """

    def __init__(self, step: str, storage: Storage, limit: float) -> None:
        self._step, self._storage, self._most = step, storage, limit
        self._is_seen = False

    def look(self) -> None:
        """Check the first shard if it is finished and unchecked. Raises TooManyErrors if its share
        of errors is above the limit."""
        if self._is_seen:
            return
        data = self._storage.path / "data"
        try:
            shards = shard_files(data, self._storage.names(data))
        except FileNotFoundError:
            return
        if not shards:
            return
        table = read_columns(
            self._storage.parquet(shards[min(shards)]), ["row_id", "sample_index", "error"]
        )
        self._is_seen = True
        errors = table.filter(pc.is_valid(table["error"]))
        if errors.num_rows > self._most * table.num_rows:
            raise TooManyErrors(self._message(table.num_rows, errors))

    def _message(self, rows: int, errors: pa.Table) -> str:
        types = Counter(pc.struct_field(errors["error"], "type").to_pylist())
        counts = ", ".join(f"{name} {count:,}" for name, count in types.most_common())
        lines = [
            f"step {self._step}: {errors.num_rows:,} of the first {counted(rows, 'answer')} are "
            f"errors ({errors.num_rows / rows:.0%}), more than {MOST_ERRORS}={self._most:g} "
            f"allows: {counts}"
        ]
        for row in errors.slice(0, _EXAMPLES).to_pylist():
            name = row_name(row["row_id"], row["sample_index"])
            lines.append(f"  {name}: {beginning(str(row['error']['message']), _SHOWN)}")
        lines.append(
            "The pipeline ends here. Correct the step and run the command again; "
            f"{MOST_ERRORS}=1 continues as it is, and {self._step}.output.retry_errors=true "
            "computes errors again."
        )
        return "\n".join(lines)
