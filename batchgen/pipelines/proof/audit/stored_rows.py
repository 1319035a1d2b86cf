"""Reads the stored rows of a job's folder by the number of their input row."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pipelines.proof.audit.drawn_rows import drawn_rows
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.row_order import KEYS, ROW_COLUMN
from batchgen.storage.shards.shard_files import read_columns, shard_files
from batchgen.util.errors import ConfigError


class StoredRows:
    """The rows in the published shards of a job's folder.

    Attributes:
        count: the number of input rows with published answers.
    """

    def __init__(self, reader: JobFolderReader) -> None:
        """Open the shards.

        Raises:
            ConfigError: there is none.
        """
        self._reader = reader
        self._rows_per_shard = int(reader.manifest["identity"]["output"]["rows_per_shard"])
        data = reader.path / "data"
        self._files = shard_files(data) if data.is_dir() else {}
        if not self._files:
            raise ConfigError(f"{reader.storage.display_name}: there are no shards in data/")
        self._shards = sorted(self._files)
        # All shards but the last one of the job have as many rows as they can.
        last = read_columns(self._files[self._shards[-1]], KEYS[:1])
        in_last = pc.count_distinct(last[ROW_COLUMN]).as_py()
        self.count: int = (len(self._shards) - 1) * self._rows_per_shard + in_last

    def choose(self, rows: int, seed: int) -> list[int]:
        """The numbers of some input rows, drawn at random without repetition, ascending; all rows
        if there are no more."""
        drawn = drawn_rows(self.count, rows, seed)
        return sorted(self._number(index) for index in drawn)

    def _number(self, index: int) -> int:
        shard, row = divmod(index, self._rows_per_shard)
        return self._shards[shard] * self._rows_per_shard + row

    def rows(self, indices: Sequence[int]) -> list[pa.Table]:
        """All samples of each of these input rows."""
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> pa.Table:
        schema = self._reader.schema
        assert schema is not None
        shard, batches = self._reader.shard(index // self._rows_per_shard), list[pa.RecordBatch]()
        for batch in shard.batches(schema.names, first_row=index):
            batches.append(batch.filter(pc.equal(batch[ROW_COLUMN], index)))
            if pc.max(batch[ROW_COLUMN]).as_py() > index:
                break
        return pa.Table.from_batches(batches, schema=schema)
