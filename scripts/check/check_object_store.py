"""Kill and pause the workers of a job on S3 while requests fail, and compare its data with that of
one undisturbed worker in a folder.

    python scripts/check/check_object_store.py --kills 20 --work /tmp/check

The store is moto's server in this process (scripts/check/s3_server.py). A share of its requests is
answered by an error, before or after it has happened, or too late. Workers are killed and stopped
as by check_workers.py, which says more. At last the job is left alone, still with failing requests.
Every data file must be equal, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import shutil
from functools import partial
from pathlib import Path

from check_workers import (
    Forks,
    arguments,
    digests,
    disturb,
    refuse_fewer,
    run_real,
    run_undisturbed,
    write_questions,
)
from s3_server import BUCKET, FaultyS3, served

from batchgen.config.workers_config import WorkersConfig
from batchgen.folder.read_job import JobFolderReader, Shard
from batchgen.leases.lease_files import DATA
from batchgen.leases.object_store import connect
from batchgen.shards.row_order import KEYS
from batchgen.shards.shard_files import shard_files
from batchgen.storage.open_storage import open_storage

URL = f"s3://{BUCKET}/out"


class SafeRows:
    """Reads the rows that are safe in shards and journals; those of a published shard once, since
    the shards are many and requests slow."""

    def __init__(self) -> None:
        self._published: dict[int, set[tuple[int, int]]] = {}

    def __call__(self) -> set[tuple[int, int]]:
        storage = open_storage(URL, WorkersConfig())
        try:
            if not storage.exists(storage.path / "manifest.json"):
                return set()
            reader = JobFolderReader(storage.path, storage)
            data = storage.path / DATA
            published = shard_files(data, storage.names(data))
            found = set()
            for number in reader.shards():
                rows = self._published.get(number) or self._rows(reader.shard(number))
                if number in published:
                    self._published[number] = rows
                found |= rows
            return found
        finally:
            storage.close()

    def _rows(self, shard: Shard) -> set[tuple[int, int]]:
        rows = (row for batch in shard.batches(KEYS) for row in batch.to_pylist())
        return {(row["row_index"], row["sample_index"]) for row in rows}


def check(server: FaultyS3, work: Path, kills: int, count: int, rows: int, seed: int) -> None:
    """Run the job undisturbed in a folder and disturbed on S3, and compare.

    Raises:
        AssertionError: the data differ, or a row that was safe was lost.
    """
    rng = random.Random(seed)
    data, whole = work / "rows.jsonl", work / "whole"
    write_questions(data, rows)
    startup = run_undisturbed(partial(run_real, arguments(whole, data)), whole, rng)
    command = [*arguments(Path("out"), data)[:-1], f"output.dir={URL}", "output.report=false"]
    workers = Forks(partial(run_real, command), count, rng)
    done = disturb(
        workers,
        kills,
        lambda: rng.uniform(0.0, 1.5 * startup),
        SafeRows(),
        lambda: f"; requests failed: {server.faults}",
    )
    server.rate = 0.0
    store = connect(URL)
    found = {
        name: hashlib.sha256(store.read(f"data/{name}") or b"").hexdigest()
        for name in store.names("data")
    }
    assert found == digests(whole), "the data differ"
    left = set(store.names("")) & {"leases", "workers", "journal", "differing"}
    print(
        f"{done}, {server.requests:,} requests, of which failed: {server.faults}: the data equal "
        f"those of one worker in a folder, byte for byte; left: {left or 'nothing'}"
    )
    refuse_fewer(kills, done)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check workers that share a job on S3.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.02, help="the share of requests that fail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; is emptied")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with served(args.seed, timeout=1.0) as server:
        server.rate = args.rate
        check(server, args.work, args.kills, args.workers, args.rows, args.seed)


if __name__ == "__main__":
    main()
