"""The files of a job's folder `cost`: how many seconds of the device each row took.

    cost/part-00000.0001.parquet …   row_index, sample_index, seconds: what worker 1 has measured of
                                     the rows of shard 0

If several files have the same row, its seconds add up, because all that workers have spent on it
counts. After a kill the seconds since the last save are missing. Rows copied from other jobs have
no costs. `cost_recorder.py` writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.storage.shards.row_order import KEYS
from batchgen.storage.shards.shard_files import read_columns
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.whole_file import whole_file

COST = "cost"
SECONDS = "seconds"
SCHEMA = pa.schema(
    [("row_index", pa.int64()), ("sample_index", pa.int32()), (SECONDS, pa.float64())]
)
_NAME = re.compile(r"part-([0-9]{5,})\.[0-9]{4,}\.parquet")
Costs = dict[tuple[int, int], float]
"""(row_index, sample_index) → seconds."""


def cost_path(folder: Path, shard: int, worker: int) -> Path:
    """The file of the costs that a worker has measured for the rows of a shard."""
    return folder / COST / f"part-{shard:05d}.{worker:04d}.parquet"


def cost_files(storage: Storage) -> Iterator[tuple[int, Path]]:
    """The files of all workers, each with the number of its shard; none if nothing was measured."""
    folder = storage.path / COST
    try:
        names = sorted(storage.names(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if (match := _NAME.fullmatch(name)) is not None:
            yield int(match[1]), folder / name


def read_costs(storage: Storage, path: Path) -> Costs:
    """Read a file of costs.

    Raises:
        JobError: the file is damaged.
    """
    table = read_columns(storage.parquet(path), SCHEMA.names)
    keys = zip(*(table[name].to_pylist() for name in KEYS), strict=True)
    return dict(zip(keys, table[SECONDS].to_pylist(), strict=True))


def shard_costs(storage: Storage, shard: int) -> Costs:
    """The seconds of each row of a shard, summed over the workers.

    Raises:
        JobError: a file is damaged.
    """
    costs = Costs()
    for number, path in cost_files(storage):
        if number == shard:
            for key, seconds in read_costs(storage, path).items():
                costs[key] = costs.get(key, 0.0) + seconds
    return costs


def write_costs(storage: Storage, path: Path, costs: Mapping[tuple[int, int], float]) -> None:
    """Write a file of costs as a whole.

    Raises:
        OSError, JobError: the file cannot be written, or its folder is gone.
    """
    rows = [(row, sample, seconds) for (row, sample), seconds in sorted(costs.items())]
    columns = zip(*rows, strict=True) if rows else ([], [], [])  # those of SCHEMA
    arrays = [pa.array(values, f.type) for values, f in zip(columns, SCHEMA, strict=True)]
    with whole_file(path) as temporary:
        pq.write_table(pa.table(arrays, schema=SCHEMA), temporary, compression="zstd")
    storage.upload(path)
